"""A setting that cannot be used.

Owns: the noun, and the one error that lists all of them.
Never: decides what is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halteres.errors import InvalidConfig

NEXT = "Nothing was changed; mend these settings and try again."


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One setting, what it was given, and the rule it breaks."""

    field: str  # section.field
    got: Any
    rule: str
    did_you_mean: str | None = None
    suggest: tuple[Any, ...] = ()

    @property
    def sentence(self) -> str:
        """The problem as one clause."""
        hint = f"; did you mean '{self.did_you_mean}'?" if self.did_you_mean else ""
        near = f" (try {' or '.join(str(value) for value in self.suggest)})" if self.suggest else ""
        got = f" = {self.got!r}" if self.got is not None else ""
        return f"{self.field}{got}: {self.rule}{near}{hint}"

    @property
    def facts(self) -> dict[str, Any]:
        """The problem as JSON, without what is empty."""
        facts = {"field": self.field, "got": _as_json(self.got), "rule": self.rule}
        if self.did_you_mean:
            facts["did_you_mean"] = self.did_you_mean
        if self.suggest:
            facts["suggest"] = list(self.suggest)
        return facts


def _as_json(value: Any) -> Any:
    """The value, or as text what JSON has no word for: infinity, a date."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value


def refusal(problems: Sequence[Problem], next: str = NEXT) -> InvalidConfig:
    """One error for all of them."""
    count = "1 setting" if len(problems) == 1 else f"{len(problems)} settings"
    first = problems[0]
    listed = "; ".join(problem.sentence for problem in problems)
    return InvalidConfig(
        f"{count} cannot be used.",
        listed if listed.endswith("?") else f"{listed.rstrip('.')}.",
        next,
        problems=[problem.facts for problem in problems],
        field=first.field,
        did_you_mean=first.did_you_mean,
    )
