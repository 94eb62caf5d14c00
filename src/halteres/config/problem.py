"""A setting that cannot be used, and the one error that lists all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halteres.config import sampler_list
from halteres.errors import InvalidConfig
from halteres.logins import refused_in

# problems that a sentence lists, and characters of a refused value in it
MOST_LISTED, LONGEST_GOT = 8, 120

NEXT = "Nothing was changed; mend these settings and try again."


class UnknownField(InvalidConfig):
    """No setting has this name."""

    code = "unknown_field"


class LockedField(InvalidConfig):
    """The run fills it in itself, or the operator's policy holds it."""

    code, status = "locked_field", 403


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
        hint = ""
        if self.did_you_mean:
            hint = f"; did you mean '{self.did_you_mean}'?"
        near = ""
        if self.suggest:
            near = f" (try {' or '.join(str(value) for value in self.suggest)})"
        given = repr(refused_in(self.got))
        if not (len(given) <= LONGEST_GOT):
            given = f"{given[:LONGEST_GOT]}..."
        got = ""
        if self.got is not None:
            got = f" = {given}"
        return f"{self.field}{got}: {self.rule}{near}{hint}"

    @property
    def facts(self) -> dict[str, Any]:
        """The problem as JSON, without what is empty."""
        hints = {"did_you_mean": self.did_you_mean, "suggest": list(self.suggest)}
        facts = {"field": self.field, "got": refused_in(_as_json(self.got)), "rule": self.rule}
        return {**facts, **{name: hint for name, hint in hints.items() if hint}}

    def alone(self, next: str) -> InvalidConfig:
        """The error, where this is the only problem."""
        return InvalidConfig(_full_stop(self.sentence), "", next, **_details([self]))


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingPackage:
    """A package that an environment needs with its settings, and that its Python does not have."""

    package: str
    fix: str  # how to install it, or to do without


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownSetting(Problem):
    """A name that no setting has."""

    rule: str = "there is no such setting"
    available: tuple[str, ...] = ()  # names that settings have

    def alone(self, next: str) -> InvalidConfig:
        """`unknown_field`, with the names that there are."""
        hint = "."
        if self.did_you_mean:
            hint = f": did you mean '{self.did_you_mean}'?"
        what = f"Unknown field '{self.field}'{hint}"
        return UnknownField(
            what, "", next, available_fields=list(self.available), **_details([self])
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedSetting(Problem):
    """A field that may not be set, or not to this value; the rule says why."""

    locked_value: Any

    def alone(self, next: str) -> InvalidConfig:
        """`locked_field`, with the value that holds."""
        what = f"Field '{self.field}' is locked and cannot be changed: {self.rule}."
        return LockedField(
            what, "", next, locked_value=_as_json(self.locked_value), **_details([self])
        )


def refusal(problems: Sequence[Problem], next: str = NEXT) -> InvalidConfig:
    """One error for all of them; a single one is of its own kind."""
    if len(problems) == 1:
        return problems[0].alone(next)
    listed = "; ".join(problem.sentence for problem in problems[:MOST_LISTED])
    listed += f"; and {len(problems) - MOST_LISTED} more" if len(problems) > MOST_LISTED else ""
    what = f"{len(problems)} settings cannot be used."
    return InvalidConfig(what, _full_stop(listed), next, **_details(problems))


def struck_out_problem(field: str, got: Any) -> Problem:
    """The problem with a value that was copied from an answer, which shows no secret."""
    rule = "a secret was struck out of this value where it was shown; give the whole value"
    return Problem(field=field, got=got, rule=rule)


def sampler_problems(
    given: sampler_list.Given, *, is_deterministic: bool, trains_unembed: bool | None
) -> Iterator[Problem]:
    """What a run wants that its samplers cannot do."""
    samplers = sampler_list.samplers_of(given)
    if is_deterministic and not sampler_list.are_exact(samplers):
        rule = "needs samplers of ours alone: vLLM does not draw the same tokens twice"
        yield Problem(field="trainer.deterministic", got=True, rule=rule)
    if trains_unembed and not sampler_list.has_own(samplers):
        rule = "needs an engine in inference.samplers ('own'): vLLM takes no such adapter"
        yield Problem(field="trainer.train_unembed", got=True, rule=rule)


def rule_of(detail: Mapping[str, Any]) -> str:
    """The rule that a value breaks, by one of the details of pydantic's ValidationError."""
    rules = {"string_type": "must be text", "extra_forbidden": "there is no such field"}
    return rules.get(detail["type"]) or detail["msg"].replace("Input should be", "must be")


def _as_json(value: Any) -> Any:
    """The value; as text where JSON has no word for it: infinity, a date."""
    if isinstance(value, str):
        return str(value)  # without what it was typed as
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value


def _full_stop(sentence: str) -> str:
    if sentence.endswith("?"):
        return sentence
    return f"{sentence.rstrip('.')}."


def _details(problems: Sequence[Problem]) -> dict[str, Any]:
    first = problems[0]
    facts = [problem.facts for problem in problems]
    return {"problems": facts, "field": first.field, "did_you_mean": first.did_you_mean}
