"""A model's files, read: also while its test goes on.

Owns: the lines of its groups (Atropos's, with or without messages), the rollouts beside them, how it ended.
Never: writes, or trips over a line that is none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from halteres.agent.trial.ending import Ended
from halteres.agent.trial.folder import TestFolder
from halteres.agent.trial.outcome import Group, Outcome
from halteres.agent.trial.request import Candidate, Request
from halteres.observe.metrics import Row, read_rows

REFERENCES = ("answer", "solution", "target", "expected", "reference", "ground_truth", "gold", "label")
"""What the right answer is called in an item; the first that is there."""


ODD_ANSWERS = "odd_answers.json"


def read_odd_answers(folder: TestFolder) -> dict[str, Any]:
    """What the scorer gives for odd answers (`scoring.odd_scores`); nothing where it was not tried, or not yet."""
    try:
        return msgspec.json.decode((folder.path / ODD_ANSWERS).read_bytes(), type=dict[str, Any])
    except OSError:
        return {}


def read_outcome(folder: TestFolder, request: Request, candidate: Candidate) -> Outcome:
    """What a model's files say now."""
    work, output = folder.work(candidate), folder.groups(candidate)
    rows = [row for file in sorted(work.glob("rollouts/*.jsonl")) for row in read_rows(file)]
    return Outcome(
        candidate=candidate,
        request=request,
        output_file=output,
        log_file=folder.log(candidate),
        groups=() if request.prompts else tuple(_groups(output, [row for row in rows if row["completions"]])),
        responses=tuple(read_rows(output)) if request.prompts else (),
        failures=tuple(failure for row in rows for failure in row["failures"]),
        ended=_ended(work / "ended.json"),
    )


class _Line(msgspec.Struct):
    """A line of the groups' file; its tokens are not read."""

    scores: list[float]
    messages: list[Any] | None = None
    episodes: list[int] | None = None  # of each sequence, where rollouts have several turns


def _groups(output: Path, rollouts: Sequence[Row]) -> Iterator[Group]:
    """Whole groups; a line that is none is passed over. Texts are those of the messages, else of the rollouts."""
    lines = output.read_bytes().split(b"\n") if output.exists() else []
    for number, text in enumerate(line for line in lines if line):
        try:
            line = msgspec.json.decode(text, type=_Line)
        except msgspec.DecodeError:
            continue
        row = rollouts[number] if number < len(rollouts) else {}
        yield _group(line, row)


def _group(line: _Line, row: Row) -> Group:
    scores, chats, reference = tuple(line.scores), line.messages or [], reference_of(row.get("item"))
    if line.episodes is not None:
        return _episodes(dict(zip(line.episodes, scores, strict=False)), row, reference)
    if len(chats) == len(scores) and all(isinstance(chat, list) and len(chat) > 1 for chat in chats):
        answers = tuple(str(chat[-1].get("content")) for chat in chats)
        return Group(scores=scores, prompt=str(chats[0][-2].get("content")), answers=answers, reference=reference)
    answers = tuple(one["text"] for one in row.get("completions", ()))
    whole = answers if len(answers) == len(scores) else ()
    return Group(scores=scores, prompt=row.get("prompt", ""), answers=whole, reference=reference)


def _episodes(scores: Mapping[int, float], row: Row, reference: str) -> Group:
    """A group of several turns, by rollout: its answers are whole conversations, as they were recorded."""
    answers = tuple(_conversation(one) for one in row.get("completions", ()))
    whole = answers if len(answers) == len(scores) else ()
    return Group(scores=tuple(scores.values()), prompt=row.get("prompt", ""), answers=whole, reference=reference)


def _conversation(completion: Row) -> str:
    turns = completion.get("turns") or [completion]
    return "\n\n".join(text for turn in turns for text in (turn["text"], turn.get("observation")) if text)


def reference_of(item: Any) -> str:
    """The right answer of an item that is a dataclass or a mapping (in JSON both are objects); else nothing."""
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        item = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    if not isinstance(item, Mapping):
        return ""
    return next((str(item[name]) for name in REFERENCES if item.get(name) not in (None, "")), "")


def _ended(file: Path) -> Ended | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Ended)
    except OSError:
        return None
