"""Rewards: reward models, rubrics and judges, and the list of rewards that an environment is scored
by.

Owns: preference data and its checks; how a text is shown to a reward model; training, evaluating,
calibrating, serving and ranking (torch in `rewards.torch` alone); reward functions, how several
make one reward, what they cost. Never: samples from the policy, makes advantages; a scorer that
could not score gives no number, and never a zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halteres.rewards.torch.model import RewardModel
    from halteres.rewards.torch.trainer import RewardTrainer
    from halteres.rewards.training_plan import RewardConfig

__all__ = ["RewardConfig", "RewardModel", "RewardTrainer"]

_PLACES = {
    "RewardConfig": "halteres.rewards.training_plan",
    "RewardModel": "halteres.rewards.torch.model",
    "RewardTrainer": "halteres.rewards.torch.trainer",
}


def __getattr__(name: str) -> Any:
    """Classes that need torch, imported when they are asked for: environments import this room
    without it.
    """
    from importlib import import_module

    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
