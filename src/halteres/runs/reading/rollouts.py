"""The rollouts of a run, as its environment wrote them: rollouts/step_N.jsonl, one line for each
group.

They are read while they grow and however large they are: first as marks, then those that are wanted
in full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
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
    """One of several turns. It has tokens where they were kept, one of each list per token."""

    text: str = ""  # what the policy said
    observation: str = ""  # what it was shown after that
    reward: float | None = None  # in the environment's own units; None: not given
    ids: list[int] = []
    logprobs: list[float] = []  # natural log
    lengths: list[int] = []  # characters of `text` that a token adds


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
    rewards: dict[str, float | None] = {}  # component -> what it gave
    masked: bool = False  # its environment says that nothing is learnt from it
    ids: list[int] = []  # these three: as of a turn, where there is only one
    logprobs: list[float] = []
    lengths: list[int] = []

    @property
    def parts(self) -> list[Turn]:
        """Its turns; of one turn, that one."""
        if self.turns:
            return self.turns
        return [Turn(self.text, ids=self.ids, logprobs=self.logprobs, lengths=self.lengths)]

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


class Dropped(msgspec.Struct, gc=False):
    """Why a group is in no batch."""

    code: str = ""
    why: str = ""


class RecordedGroup(msgspec.Struct):
    """A group as its environment recorded it."""

    completions: list[Completion] = []
    failures: list[Failure] = []
    prompt: str = ""
    item: Any = None  # the task, as JSON
    group: int | None = None  # its draw's number in the step
    id: str = ""  # by which the trainer's advantages name it; "" of an older run
    dropped: Dropped | None = None
    left_out: list[str] = []  # of the row: "tokens", "texts"
    left_out_by: str = ""  # the setting that decided it


_decoder = msgspec.json.Decoder(RecordedGroup)


def recorded_groups(file: Path) -> list[RecordedGroup]:
    """The groups of a file; a line that is no group, as a torn one, is left out."""
    found = [decoded(_decoder, line) for line in read_lines(file)]
    return [group for group in found if group is not None]


@dataclass(slots=True)
class StepOfRollouts:
    """All rollouts of one step, as marks: those of the groups that were sent, or, where none was,
    of those that were dropped.
    """

    file: Path
    marks: list[Mark] = field(default_factory=list)
    num_groups: int = 0  # that have rollouts
    # by code: rollouts that came to nothing
    failures: Counter[str] = field(default_factory=Counter)
    # by code: groups that were made whole and then dropped
    dropped: Counter[str] = field(default_factory=Counter)
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
    of_dropped: list[Mark] = []
    with open_regular(found.file) as stream:
        while line := stream.readline(LINE_BYTES):
            if stream.tell() > READ_BYTES:
                found.whole = False
                break
            if (group := decoded(_decoder, line)) is None:
                continue
            offset = stream.tell() - len(line)
            marks = [
                Mark(offset, place, one.score, hash(one.text), one.tokens, one.finish)
                for place, one in enumerate(group.completions)
            ]
            if group.dropped is not None:
                found.dropped[group.dropped.code] += 1
                of_dropped += marks
            else:
                found.num_groups += bool(marks)
                found.marks += marks
            for failure in group.failures:
                found.failures[failure.code] += 1
                found.code, found.why = failure.code, failure.why
    if not found.marks:
        found.marks = of_dropped
    return found


def groups_of(run: RunDirectory, step: int) -> tuple[list[RecordedGroup], bool]:
    """All groups of this step, so far, and whether everything was read. What a later row says of a
    group, as why no batch will hold it, is in the group.
    """
    groups: list[RecordedGroup] = []
    with open_regular(run.path / "rollouts" / f"step_{step}.jsonl") as stream:
        while line := stream.readline(LINE_BYTES):
            if stream.tell() > READ_BYTES:
                return groups, False
            group = decoded(_decoder, line)
            if group is None:
                continue
            reason = group.dropped
            if group.failures and group.failures[-1].code == REFUSED and not group.completions:
                reason = Dropped(REFUSED, group.failures[-1].why)
            earlier = _earlier_row(groups, group, reason)
            if earlier is None:
                groups.append(group)
            else:
                earlier.dropped = reason
    return groups, True


REFUSED = "refused"
"""Of a group that the trajectory server did not take: its failure is in a row of its own."""


def _earlier_row(
    groups: Sequence[RecordedGroup], later: RecordedGroup, reason: Dropped | None
) -> RecordedGroup | None:
    """The group of which a row without completions says why it was dropped."""
    if reason is None or later.completions:
        return None
    for group in reversed(groups):
        is_same = later.id == group.id
        if not later.id:
            is_same = later.group == group.group
        if is_same and group.completions:
            return group
    return None


class _Advantages(msgspec.Struct, gc=False):
    id: str = ""
    advantages: list[list[float]] = []  # of every turn of every rollout


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """What the trainer made of a group."""

    step: int  # that it was trained on in
    advantages: list[list[float]]  # of every turn of every rollout


MOST_STEPS_LATER = 64
"""Steps after the one that a group was drawn for in which it is looked for: as many as
`trainer.max_staleness` allows.
"""

_advantages = msgspec.json.Decoder(_Advantages)


def trained_groups(run: RunDirectory, step: int, ids: Collection[str]) -> dict[str, TrainedGroup]:
    """Those of these groups, drawn for this step, that the trainer was given, by id. One that had
    to wait is in the batch of a later step.
    """
    found: dict[str, TrainedGroup] = {}
    for number in range(step, step + 1 + MOST_STEPS_LATER):
        if len(found) == len(ids):
            break
        for line in read_lines(run.path / "rollouts" / f"advantages_{number}.jsonl"):
            row = decoded(_advantages, line)
            if row is not None and row.id in ids:
                found.setdefault(row.id, TrainedGroup(number, row.advantages))
    return found


def last_trained_step(run: RunDirectory) -> int | None:
    """The newest step of which there are advantages; None: of an older run, or before the first."""
    names = (file.stem for file in (run.path / "rollouts").glob("advantages_*.jsonl"))
    numbers = [name.removeprefix("advantages_") for name in names]
    return max((int(number) for number in numbers if number.isdecimal()), default=None)
