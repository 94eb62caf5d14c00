"""One thing that must be true, and whether it is.

Owns: the noun; running a check whose failure is an error.
Never: knows what is checked (`preflight`, `agent.checks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from halteres.errors import HalteresError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding."""

    name: str
    ok: bool = True
    found: str = ""  # what was found, a phrase
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])
    failure: HalteresError | None = None  # with which a run is refused; a failed check without one is advice

    @property
    def warning(self) -> str:
        """What a failed check says that no run is refused for; else empty."""
        return "" if self.ok or self.failure else f"{self.name}: {self.found}; {self.remedy}"

    @property
    def facts(self) -> dict[str, Any]:
        """As an answer tells it, without what is empty."""
        told = {"found": self.found, "problem": self.failure.sentence if self.failure else "", "remedy": self.remedy}
        return {"check": self.name, "ok": self.ok, **self.figures, **{k: v for k, v in told.items() if v}}


def attempt(name: str, work: Callable[[], T]) -> tuple[Check, T | None]:
    """A check that holds if `work` succeeds, and its result."""
    try:
        return Check(name=name), work()
    except HalteresError as error:
        return Check(name=name, ok=False, failure=error), None
