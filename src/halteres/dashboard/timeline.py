"""What has happened in a run, in few words.

Owns: which events a person wants to see, and how each is told.
Never: reads a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halteres.observe.metrics import Row

MOST_EVENTS, MOST_MARKS, LENGTH = 60, 300, 200
"""The newest that are told; marks over the curves; characters of one."""

_TOLD: dict[str, tuple[str, ...]] = {
    "status": ("status", "phase"),
    "ready": ("role",),
    "checkpoint": ("name",),
    "eval": ("step",),
    "eval_failed": ("step", "error"),
    "no_evaluation": ("error",),
    "alert": ("rule", "step"),
    "stop_requested": ("by", "mode"),
    "process_exit": ("role", "code"),
    "restart": ("role", "attempt"),
    "restarts_used_up": ("role",),
    "policy_cap": ("note",),
    "goal_reached": ("note",),
    "drift": ("note",),
    "conclusion_failed": ("error",),
    "sink": ("sink", "state", "url", "note"),
}
"""Kind of event -> its keys that say what it was."""


def timeline_of(events: Sequence[Row]) -> list[dict[str, Any]]:
    """{t, kind, text}, oldest first."""
    known = [event for event in events if isinstance(kind := event.get("type"), str) and kind in _TOLD]
    return [
        {"t": t if isinstance(t := event.get("t"), int | float) else None, "kind": event["type"], "text": _text(event)}
        for event in known[-MOST_EVENTS:]
    ]


def _text(event: Row) -> str:
    said = (_word(key, event.get(key)) for key in _TOLD[event["type"]])
    return " ".join(word for word in said if word)[:LENGTH]


def _word(key: str, value: Any) -> str:
    if value is None:
        return ""
    return f"{key} {value}" if key in ("step", "code", "attempt") else str(value)


def marks_of(events: Sequence[Row]) -> list[dict[str, Any]]:
    """{rule, step} of every time that a rule spoke: for marks over the curves."""
    alerts = [event for event in events if event.get("type") == "alert" and isinstance(event.get("step"), int)]
    return [{"rule": str(event.get("rule"))[:LENGTH], "step": event["step"]} for event in alerts[-MOST_MARKS:]]
