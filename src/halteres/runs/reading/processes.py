"""The processes of a run, told in words.

Owns: the words: "running", "exited (N)" (the seeds' two), "not started", "ended by SIGKILL" and what else a state says.
Never: looks at a process; run.json says how each one is.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from halteres.runs.state import RunState

SEED_ROLES = ("api", "trainer", "env")
"""Told first of every RL run: clients of the seeds read them without asking whether they are there."""


def conditions(state: RunState) -> dict[str, str]:
    """Every process of the run, in words."""
    roles = dict.fromkeys((*(SEED_ROLES if state.kind == "rl" else ()), *state.processes))
    return {role: condition(state.processes.get(role, {})) for role in roles}


def condition(facts: Mapping[str, Any]) -> str:
    """One process of run.json, in words."""
    code, told = facts.get("exit"), str(facts.get("state") or "")
    if isinstance(code, int):
        return _killed_by(-code) if code < 0 else told or f"exited ({code})"
    if code is not None:
        return told or "ended"
    return (told or "running") if facts.get("pid") else "not started"


def _killed_by(number: int) -> str:
    try:
        return f"ended by {signal.Signals(number).name}"
    except ValueError:
        return f"ended by signal {number}"
