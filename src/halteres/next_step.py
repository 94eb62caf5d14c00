"""What to do next, as values: a call of the agent's tools, and words with calls in them; each
reader's form of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from typing import Any, TypeAlias

_COMMANDS: dict[tuple[str, ...], str] = {
    ("rl_start_training", "resume_from"): "halteres train --resume {resume_from}",
    ("rl_train_reward_model", "resume_from"): "halteres reward train --resume-run {resume_from}",
    ("rl_evaluate_reward_model", "model", "data"): "halteres reward eval {model} {data}",
    ("rl_stop_training", "run_id"): "halteres runs stop {run_id}",
    ("rl_check_status", "run_id"): "halteres runs status {run_id}",
    ("rl_list_runs",): "halteres runs list",
}
"""What a person types, by the tool and exactly these of its arguments; any other call is written as
it is.
"""


class Placeholder(str):
    """The name of an argument whose value the reader fills in: written without quotation marks."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class NextStep:
    """A call that goes on from here; arguments that are None or empty are not given.

    >>> step = NextStep("rl_start_training", {"resume_from": "3fa9c1d2"}, "Go on from step 5")
    >>> for_agents(step)
    'Go on from step 5: rl_start_training(resume_from="3fa9c1d2")'
    >>> str(step)
    'Go on from step 5: halteres train --resume 3fa9c1d2'
    """

    tool: str
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    reason: str = ""  # what it is for
    # arguments without their names, which come first; None: a run alone
    positional: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, tool: str, /, *positional: Any, **args: Any) -> NextStep:
        """The call as Python has it.

        >>> NextStep.of("rl_check_status", "3fa9c1d2", wait_s=45, until="eval").call
        'rl_check_status("3fa9c1d2", wait_s=45, until="eval")'
        """
        return cls(tool, args, "", positional)

    @property
    def given(self) -> dict[str, Any]:
        """The arguments by name that are given."""
        return {name: value for name, value in self.args.items() if value not in (None, {}, "")}

    @property
    def call(self) -> str:
        """As an agent makes it."""
        given, first = self.given, self.positional
        if first is None:
            first = []
            if "run_id" in given:
                first = [given.pop("run_id")]
        words = [*map(_json, first), *(f"{name}={_json(value)}" for name, value in given.items())]
        return f"{self.tool}({', '.join(words)})"

    @property
    def command(self) -> str:
        """As a person types it."""
        given = self.given
        if self.positional:  # a run, wherever one argument has no name
            given = {"run_id": self.positional[0], **given}
        command = _COMMANDS.get((self.tool, *given))
        has_all = len(self.positional or ()) <= 1
        if command and has_all:
            return command.format_map(given)
        return self.call

    def __str__(self) -> str:
        return for_people(self)


@dataclass(frozen=True, slots=True)
class Remedy:
    """What mends something: calls to make one after the other, what to mind then, and calls that
    follow upon that.

    >>> run = {"run_id": "3fa9"}
    >>> steps = (NextStep("rl_stop_training", run), NextStep("rl_get_results", run))
    >>> print(Remedy(steps, "only harder tasks would teach more."))
    rl_stop_training("3fa9") then rl_get_results("3fa9"); only harder tasks would teach more.
    """

    steps: tuple[NextStep, ...] = ()
    words: str = ""
    later: tuple[NextStep, ...] = ()

    @property
    def first(self) -> NextStep | None:
        """The call that it begins with."""
        if self.steps:
            return self.steps[0]
        return None

    def after(self, *tools: str) -> Remedy:
        """What is left to do when its first calls, as far as they are of these tools, have been
        made.
        """
        return replace(self, steps=tuple(dropwhile(lambda step: step.tool in tools, self.steps)))

    @property
    def parts(self) -> tuple[Advice, ...]:
        """In words and calls."""
        after_steps, after_words = "", ""
        if self.steps and (self.words or self.later):
            after_steps = "; "
        if self.words and self.later:
            after_words = " "
        return (then(*self.steps), after_steps, self.words, after_words, then(*self.later))

    def __str__(self) -> str:
        return for_agents(self)


Advice: TypeAlias = str | NextStep | Remedy | tuple[Any, ...]
"""Words, a call, or several of these in order: `("make room, then ", NextStep("rl_list_runs"))`."""


def then(*advice: Advice) -> Advice:
    """One after the other.

    >>> for_agents(then(NextStep("rl_health_check"), "mend the problems"))
    'rl_health_check() then mend the problems'
    """
    return tuple(part for one in advice for part in (" then ", one))[1:]


def written(advice: Advice, write: Callable[[NextStep], str]) -> str:
    """As text, with each call as `write` has it."""
    if isinstance(advice, str):
        return advice
    if isinstance(advice, NextStep):
        if advice.reason:
            return f"{advice.reason}: {write(advice)}"
        return write(advice)
    return "".join(written(part, write) for part in _parts(advice))


def for_agents(advice: Advice) -> str:
    """As an agent reads it."""
    return written(advice, as_call)


def for_people(advice: Advice) -> str:
    """As a person reads it who has commands."""
    return written(advice, lambda step: step.command)


@dataclass(frozen=True, slots=True)
class Line:
    """One thing to do, for a person: a command to paste, what it is for or when; or words alone."""

    words: str
    command: str = ""

    def __str__(self) -> str:
        if self.words and self.command:
            return f"{self.words}: {self.command}"
        return self.words or self.command


def lines_of(advice: Advice, write: Callable[[NextStep], str]) -> tuple[Line, ...]:
    """The advice step by step: each command, as `write` has it, alone on its line.

    >>> both = then(NextStep("rl_list_runs"), NextStep("rl_stop_training", {"run_id": "3fa9"}))
    >>> [str(line) for line in lines_of(both, lambda step: step.command)]
    ['halteres runs list', 'then: halteres runs stop 3fa9']
    """
    lines: list[Line] = []
    words = ""
    for part in _flat(advice):
        if isinstance(part, str):
            words += part
            continue
        what_for = f"{words} {part.reason}".strip(" ;,.:")
        lines.append(Line(what_for, write(part)))
        words = ""
    if rest := words.strip(" ;,:"):
        lines.append(Line(rest))
    return tuple(lines)


def _flat(advice: Advice) -> Iterator[str | NextStep]:
    if isinstance(advice, str | NextStep):
        yield advice
        return
    for part in _parts(advice):
        yield from _flat(part)


def _parts(advice: Remedy | tuple[Advice, ...]) -> tuple[Advice, ...]:
    if isinstance(advice, Remedy):
        return advice.parts
    return advice


def as_call(step: NextStep) -> str:
    """A call as every wire has it."""
    return step.call


def _json(value: Any) -> str:
    if isinstance(value, Placeholder):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
