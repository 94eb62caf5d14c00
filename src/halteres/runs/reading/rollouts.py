"""The rollouts of a run, as its environment wrote them: rollouts/step_N.jsonl, one line for each
group.

They are read while they grow and however large they are: first as marks, then those that are wanted
in full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgspec

from halteres.files import open_regular
from halteres.observe.metrics import decoded, read_lines
from halteres.runs.directory import RunDirectory
from halteres.types import Outcome

READ_BYTES = 256 * 1024 * 1024  # how much of one step is looked at: a second's worth
LINE_BYTES = 64 * 1024 * 1024  # a longer line is no group of ours and is passed over


@dataclass(frozen=True, slots=True)
class Mark:
    """One rollout: where it lies, and what is counted of it."""

    offset: int  # bytes, of its group's line
    place: int  # in its group
    score: float | None  # reward units; None: it was not finite
    text: int  # a hash: equal for equal completions
    tokens: int
    finish: str | None


class Turn(msgspec.Struct, frozen=True):
    """One of several turns."""

    text: str = ""  # what the policy said
    observation: str = ""  # what it was shown after that
    reward: float | None = None  # in the environment's own units; None: not given


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One rollout in full."""

    item: Any  # the task, as JSON
    prompt: str
    completion: str
    score: float | None
    tokens: int
    finish: str | None
    group_scores: tuple[float | None, ...]  # of its whole group, itself included
    turns: tuple[Turn, ...] = ()  # of a rollout of several; `completion` has their texts in one
    outcome: str | None = None  # how its episode ended, where the environment says so


class Completion(msgspec.Struct, gc=False):
    """What the policy said in one rollout, and what that was worth."""

    text: str = ""
    score: float | None = None
    tokens: int = 0
    finish: str | None = None
    outcome: str | None = None
    turns: list[Turn] = []

    @property
    def conversation(self) -> str:
        """Its text, or what was said and shown in its turns."""
        if not self.turns:
            return self.text
        texts = [text for turn in self.turns for text in (turn.text, turn.observation)]
        return "\n\n".join(filter(None, texts))


class Failure(msgspec.Struct, gc=False):
    """An attempt that was replaced, or a group that came to nothing."""

    code: str = ""
    why: str = ""
    prompt_tokens: int = 0  # of a prompt that left no room for an answer


class RecordedGroup(msgspec.Struct):
    """A group as its environment recorded it for people: texts, and no tokens."""

    completions: list[Completion] = []
    failures: list[Failure] = []
    prompt: str = ""
    item: Any = None  # the task, as JSON


_decoder = msgspec.json.Decoder(RecordedGroup)


def recorded_groups(file: Path) -> list[RecordedGroup]:
    """The groups of a file; a line that is no group, as a torn one, is left out."""
    found = [decoded(_decoder, line) for line in read_lines(file)]
    return [group for group in found if group is not None]


@dataclass(slots=True)
class StepOfRollouts:
    """All rollouts of one step, as marks."""

    file: Path
    marks: list[Mark] = field(default_factory=list)
    num_groups: int = 0  # that have rollouts
    # by code: rollouts that came to nothing
    failures: Counter[str] = field(default_factory=Counter)
    code: str | None = None  # of the last failure
    why: str | None = None
    whole: bool = True  # everything was read

    def rollouts(self, marks: Sequence[Mark]) -> list[Rollout]:
        """These in full."""
        found = list[Rollout]()
        with open_regular(self.file) as stream:
            for mark in marks:
                stream.seek(mark.offset)
                group = _decoder.decode(stream.readline(LINE_BYTES))
                one = group.completions[mark.place]
                rollout = Rollout(
                    item=group.item,
                    prompt=group.prompt,
                    completion=one.text,
                    score=one.score,
                    tokens=one.tokens,
                    finish=one.finish,
                    turns=tuple(one.turns),
                    outcome=one.outcome if one.outcome in get_args(Outcome) else None,
                    group_scores=tuple(other.score for other in group.completions),
                )
                found.append(rollout)
        return found


def steps_of(run: RunDirectory) -> list[int]:
    """The steps whose rollouts there are, ascending."""
    files = (file for file in (run.path / "rollouts").glob("step_*.jsonl") if file.is_file())
    names = (file.stem.removeprefix("step_") for file in files)
    return sorted(int(name) for name in names if name.isdecimal())


def rollouts_of(run: RunDirectory, step: int) -> StepOfRollouts:
    """All rollouts of this step, so far. A line that was torn by a crash is left out."""
    found = StepOfRollouts(run.path / "rollouts" / f"step_{step}.jsonl")
    with open_regular(found.file) as stream:
        while line := stream.readline(LINE_BYTES):
            if stream.tell() > READ_BYTES:
                found.whole = False
                break
            if (group := decoded(_decoder, line)) is None:
                continue
            offset = stream.tell() - len(line)
            found.num_groups += bool(group.completions)
            found.marks += [
                Mark(offset, place, one.score, hash(one.text), one.tokens, one.finish)
                for place, one in enumerate(group.completions)
            ]
            for failure in group.failures:
                found.failures[failure.code] += 1
                found.code, found.why = failure.code, failure.why
    return found
