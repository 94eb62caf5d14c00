"""What happens to a run, and how it ends.

Owns: the nouns that go through its supervisor's inbox; `Verdict`.
Never: decides what follows from one (`controller`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halteres.config.control import Mode
from halteres.errors import HalteresError
from halteres.runs.state import Status
from halteres.runs.supervision.process_group import Exited, Ready, TooSlow


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody wants the run to end."""

    mode: Mode
    why: str


@dataclass(frozen=True, slots=True)
class EngineGone:
    """The engine's process ended though its service had not ended it."""

    code: int | None  # its exit code, negative for a signal; None: its service did not say


@dataclass(frozen=True, slots=True)
class EngineBack:
    """The service has started another engine."""

    engine: Mapping[str, Any]  # its entry for run.json


@dataclass(frozen=True, slots=True)
class DiskFull:
    """Nothing more can be written: not every process notices, and some would wait for ever."""


@dataclass(frozen=True, slots=True)
class LookedAround:
    """It is time to read what the roles have written."""


@dataclass(frozen=True, slots=True)
class GraceOver:
    """The trainer was asked to end, at a cap of the policy or at the figure that was wanted, and has not."""


Message = StopAsked | EngineGone | EngineBack | DiskFull | LookedAround | GraceOver | Ready | TooSlow | Exited
"""Whatever happens to a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How the run ends."""

    status: Status
    error: HalteresError | None = None
    code: str | None = None  # of a run that has not failed, where one speaks of it; an error has its own
    note: str | None = None
