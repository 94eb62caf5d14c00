"""The seeds' limit on how often a run may be looked at, for operators who want it (`min_status_interval_s`).

Owns: the last look at each run, kept in HALTERES_HOME/looks so that it survives processes; whether the next is limited.
Never: hides an error, an ended run, an alert, or a state that has changed; remembers a run that there is not.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from halteres.agent.watching.look import Look
from halteres.config import environ
from halteres.config.policies import load_policy
from halteres.errors import HalteresError, NotReady
from halteres.files import NOT_JSON, read_regular, replace_file
from halteres.runs.lock import locked

LOCK = ".lock"
WITHIN_S = 2.0
"""A look is remembered within milliseconds."""


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
    with _alone():
        return _limited(look, interval_s)


def looks_home() -> Path:
    """The folder of all looks: HALTERES_HOME/looks."""
    return environ.home() / "looks"


def _limited(look: Look, interval_s: float) -> dict[str, Any] | None:
    file = looks_home() / f"{look.run.run_id}.json"
    last, now = _read(file), max(look.at, time.time())  # whoever waited for the lock has looked before the other told
    if last and look.health == "healthy" and (last.status, last.phase) == (look.state.status, look.state.phase):
        left_s = last.at + interval_s - now
        if 0 < left_s <= interval_s:  # a clock that was set back limits nobody for ever
            return _answer(look, last, left_s)
    _remember(file, look, now)
    return None


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Of callers at the same time one gets the full look, and the others what it remembered. Where no lock is to be
    had, all of them do: it is no reason not to look."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, NotReady):
            looks_home().mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(looks_home() / LOCK, WITHIN_S, "Another look is being remembered."))
        yield


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
        return msgspec.json.decode(read_regular(file), type=LastLook)
    except (OSError, *NOT_JSON):
        return None


def _remember(file: Path, look: Look, now: float) -> None:
    """A home that cannot be written is no reason not to look."""
    state = look.state
    with contextlib.suppress(OSError):
        if state.terminal:
            return file.unlink(missing_ok=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        seen = LastLook(at=now, status=state.status, phase=state.phase, step=look.step, metrics=look.metrics)
        replace_file(file, msgspec.json.encode(seen))
