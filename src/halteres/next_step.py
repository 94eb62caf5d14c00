"""What to do next, as values: a call of the agent's tools, written out as a call or as a shell's command; several."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from typing import Any

_COMMANDS: dict[tuple[str, ...], str] = {
    ("rl_start_training", "resume_from"): "halteres train --resume {resume_from}",
    ("rl_train_reward_model", "resume_from"): "halteres reward train --resume-run {resume_from}",
    ("rl_evaluate_reward_model", "model", "data"): "halteres reward eval {model} {data}",
    ("rl_stop_training", "run_id"): "halteres runs stop {run_id}",
    ("rl_check_status", "run_id"): "halteres runs status {run_id}",
    ("rl_list_runs",): "halteres runs list",
}
"""What a person types, by the tool and exactly these of its arguments; any other call is written as it is."""


@dataclass(frozen=True, slots=True)
class NextStep:
    """A call that goes on from here.

    >>> step = NextStep("rl_start_training", {"resume_from": "3fa9c1d2"}, "Go on from step 5")
    >>> step.for_agents
    'Go on from step 5: rl_start_training(resume_from="3fa9c1d2")'
    >>> str(step)
    'Go on from step 5: halteres train --resume 3fa9c1d2'
    """

    tool: str
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    reason: str = ""  # what it is for

    @property
    def call(self) -> str:
        """As an agent makes it; a run comes first, without the argument's name."""
        named = dict(self.args)
        run = [named.pop("run_id")] if "run_id" in named else []
        return worded(self.tool, *run, **named)

    @property
    def command(self) -> str:
        """As a person types it."""
        command = _COMMANDS.get((self.tool, *self.args))
        return command.format_map(self.args) if command else self.call

    @property
    def for_agents(self) -> str:
        """What it is for, and the call."""
        return f"{self.reason}: {self.call}" if self.reason else self.call

    def __str__(self) -> str:
        return f"{self.reason}: {self.command}" if self.reason else self.command


@dataclass(frozen=True, slots=True)
class Remedy:
    """What mends something: calls to make one after the other, what to mind then, and calls that follow upon that.

    >>> steps = (NextStep("rl_stop_training", {"run_id": "3fa9"}), NextStep("rl_get_results", {"run_id": "3fa9"}))
    >>> print(Remedy(steps, "only harder tasks would teach more."))
    rl_stop_training("3fa9") then rl_get_results("3fa9"); only harder tasks would teach more.
    """

    steps: tuple[NextStep, ...] = ()
    words: str = ""
    later: tuple[NextStep, ...] = ()

    @property
    def first(self) -> NextStep | None:
        """The call that it begins with."""
        return self.steps[0] if self.steps else None

    def after(self, *tools: str) -> Remedy:
        """What is left to do when its first calls, as far as they are of these tools, have been made."""
        return replace(self, steps=tuple(dropwhile(lambda step: step.tool in tools, self.steps)))

    def __str__(self) -> str:
        now, later = (" then ".join(step.call for step in steps) for steps in (self.steps, self.later))
        return "; ".join(part for part in (now, f"{self.words} {later}".strip()) if part)


def for_agents(following: str | NextStep) -> str:
    """A next step, or a sentence that is none, as an agent reads it."""
    return following.for_agents if isinstance(following, NextStep) else following


def worded(tool: str, /, *arguments: Any, **named: Any) -> str:
    """A call as text; arguments that are None or empty are left out.

    >>> worded("rl_check_status", "3fa9c1d2", wait_s=45, until="eval")
    'rl_check_status("3fa9c1d2", wait_s=45, until="eval")'
    """
    given = [_json(value) for value in arguments]
    given += [f"{key}={_json(value)}" for key, value in named.items() if value not in (None, {}, "")]
    return f"{tool}({', '.join(given)})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
