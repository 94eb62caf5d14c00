"""The seeds' limit on how often a run may be looked at, for operators who want it (`min_status_interval_s`).

Owns: the last look at each run, kept in HALTERES_HOME/looks so that it survives processes; whether the next is limited.
Never: hides an error, an ended run, an alert, or a state that has changed; remembers a run that there is not.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import msgspec

from halteres.agent.watching.looking import Look
from halteres.config import environ
from halteres.config.policies import load_policy
from halteres.errors import HalteresError
from halteres.files import replace_file


class LastLook(msgspec.Struct, frozen=True, kw_only=True):
    """What was told, and when."""

    at: float  # unix seconds
    status: str
    phase: str | None
    step: int
    metrics: dict[str, Any]


def limited(look: Look) -> dict[str, Any] | None:
    """What a look that comes too early is told instead; None where it may be told everything, and is remembered."""
    interval_s = _interval_s()
    if interval_s <= 0:
        return None
    file = environ.home() / "looks" / f"{look.run.run_id}.json"
    last = _read(file)
    if last and look.health == "healthy" and (last.status, last.phase) == (look.state.status, look.state.phase):
        left_s = last.at + interval_s - look.at
        if 0 < left_s <= interval_s:  # a clock that was set back limits nobody for ever
            return _answer(look, last, left_s)
    _remember(file, look)
    return None


def _answer(look: Look, last: LastLook, left_s: float) -> dict[str, Any]:
    return {
        "rate_limited": True,
        "run_id": look.run.run_id,
        "message": f"Rate limited. Next check available in {max(1, math.ceil(left_s / 60))} minutes.",
        "next_check_in_seconds": round(left_s, 1),
        "status": last.status,
        "step": last.step,
        "metrics": last.metrics,
    }


def _interval_s() -> float:
    try:
        return load_policy().min_status_interval_s
    except HalteresError:
        return 0.0  # a policy that cannot be read stops whoever starts a run, not whoever watches one


def _read(file: Path) -> LastLook | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=LastLook)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _remember(file: Path, look: Look) -> None:
    """A home that cannot be written is no reason not to look."""
    state = look.state
    with contextlib.suppress(OSError):
        if state.terminal:
            return file.unlink(missing_ok=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        seen = LastLook(at=look.at, status=state.status, phase=state.phase, step=look.step, metrics=look.metrics)
        replace_file(file, msgspec.json.encode(seen))
