"""Which settings would mend a failed run.

Owns: the change for each kind of failure, computed from the settings that failed.
Never: makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halteres.runs.reading.lenient_settings import Given

TOKENS = 64
"""Lengths are lowered to a multiple of this many tokens."""

Changes = dict[str, Any]


def smaller(env: Mapping[str, Any]) -> Changes:
    """What takes less memory, each a remedy of its own: max_token_length a quarter shorter, half the batch_size.

    >>> smaller({"max_token_length": 1024, "batch_size": 64, "group_size": 8})
    {'max_token_length': 768, 'batch_size': 32}
    """
    length, batch, group = (_count(env.get(name)) for name in ("max_token_length", "batch_size", "group_size"))
    changes = {
        "max_token_length": length * 3 // 4 // TOKENS * TOKENS,
        "batch_size": batch // 2 // max(1, group) * max(1, group),  # whole groups
    }
    return {name: value for name, value in changes.items() if value > 0}


def mending(code: str | None, given: Given) -> Changes:
    """The change that a failed run is best gone on with; none where its settings were not what failed it."""
    if code == "gpu_oom":
        return dict(list(smaller(given.env).items())[-1:])  # the batch rather than the length: answers stay whole
    if code == "nan_loss" and given.trainer.learning_rate:
        return {"learning_rate": float(f"{given.trainer.learning_rate / 2:.2g}")}
    return {}


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
