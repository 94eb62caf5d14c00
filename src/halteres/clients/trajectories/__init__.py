"""Clients of the trajectory server: one for environments (asynchronous), one for trainers (plain calls).

Both talk to the original Atropos server too, which knows none of our extensions.
"""

from halteres.clients.trajectories.calls import Patience
from halteres.clients.trajectories.environment import EnvironmentClient, EnvStatus, Posted, Registered, new_key
from halteres.clients.trajectories.trainer import TrainerClient, TrainerRegistration

__all__ = [
    "EnvStatus",
    "EnvironmentClient",
    "Patience",
    "Posted",
    "Registered",
    "TrainerClient",
    "TrainerRegistration",
    "new_key",
]
