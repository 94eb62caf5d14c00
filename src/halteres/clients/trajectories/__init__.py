"""Clients of the trajectory server: one for environments (asynchronous), one for trainers (plain
calls).

Both talk to the original Atropos server too, which knows none of our extensions.
"""

from halteres.clients.trajectories.address import Address
from halteres.clients.trajectories.calls import KeyReused, LeaseLost, NotAllowed, UnknownEnvironment
from halteres.clients.trajectories.environment import (
    EnvironmentClient,
    EnvStatus,
    Posted,
    Registered,
    new_key,
)
from halteres.clients.trajectories.trainer import Lease, TrainerClient, TrainerRegistration

__all__ = [
    "Address",
    "EnvStatus",
    "EnvironmentClient",
    "KeyReused",
    "Lease",
    "LeaseLost",
    "NotAllowed",
    "Posted",
    "Registered",
    "TrainerClient",
    "TrainerRegistration",
    "UnknownEnvironment",
    "new_key",
]
