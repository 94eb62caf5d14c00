"""What is to be done to a host, before any of it is done.

Owns: the nouns `Step` and `Plan`; that nothing is written before everything is known to be possible.
Never: knows a host.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halteres.agent.hosts.change import Change, backup_of

Verb = Literal["write", "update", "remove", "leave", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that a person is told of: a settings file, a skill."""

    what: str  # its path
    changes: tuple[Change, ...]
    beside: tuple[Change, ...] = ()  # made too, and nobody's to know
    kept: str = ""  # why it stays though it was to change

    @property
    def verb(self) -> Verb:
        """What becomes of it. `leave`: nothing, for it is as it is to be."""
        real = [change for change in self.changes if not change.is_nothing]
        if self.kept:
            return "keep"
        if not real:
            return "leave"
        if all(change.after is None for change in real):
            return "remove"
        return "write" if all(change.before is None for change in real) else "update"

    @property
    def backup(self) -> Path | None:
        """Where what was there before us is kept, if this step changes it."""
        keeping = (change for change in self.changes if change.keeps and change.before and not change.is_nothing)
        return next((backup_of(change.file) for change in keeping), None)


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps, in their order."""

    steps: tuple[Step, ...]

    def carry_out(self) -> None:
        """Make every change. What was made before one fails stays; the same command again does the rest.

        Raises:
            Conflict, NotWritable: of the first change that cannot be made.
        """
        for step in self.steps:
            for change in (*step.changes, *step.beside):
                change.make()
