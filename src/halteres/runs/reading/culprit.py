"""Which process of a failed run failed.

Owns: the noun `Culprit`; finding it, also in directories whose run.json does not name it.
Never: decides that a run failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halteres.runs.directory import RunDirectory
from halteres.runs.state import RunState

_BY_PHASE = {"api": "service", "trainer": "trainer", "environment": "env"}
"""Who a starting run was waiting for."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """The process that ended though it should not have, or never became ready."""

    process: str
    code: int | None  # its exit code, negative for a signal; None: unknown, or it did not end by itself

    @property
    def facts(self) -> dict[str, Any]:
        """As answers tell it."""
        return {"process": self.process, "code": self.code}


def culprit(run: RunDirectory, state: RunState) -> Culprit | None:
    """Who failed; None for a run that has not, and where no process was to blame."""
    if state.status != "failed":
        return None
    if state.processes.get("engine", {}).get("state") == "ended":
        return Culprit("engine", None)  # where its service or we had ended it, the word would be another
    if state.exit:
        return Culprit(str(state.exit.get("process")), state.exit.get("code"))
    if state.phase == "evaluation":
        return None  # training was over, its processes had been ended: what failed is what comes after it
    for event in _unanswered(run):
        return Culprit(str(event.get("role")), event.get("code"))
    return Culprit(_BY_PHASE[state.phase], None) if state.phase else None


def _unanswered(run: RunDirectory) -> list[Mapping[str, Any]]:
    """Exits after which the process was not started again: the first one ended the run, the others followed from it."""
    exits: dict[str, Mapping[str, Any]] = {}
    for event in run.events():
        if event.get("type") == "process_exit":
            exits.setdefault(str(event.get("role")), event)
        elif event.get("type") == "restart":
            exits.pop(str(event.get("role")), None)
    return [event for event in exits.values() if (event.get("role"), event.get("code")) != ("env", 0)]
