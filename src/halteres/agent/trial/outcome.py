"""What one model's test has come to: its traffic, its end and its groups, read from its files; also while it goes on.

`Outcome` holds the figures that the seeds' tests told, and ours. Whether one can train on it says `report`.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from halteres.agent.trial import wire
from halteres.agent.trial.folder import TestFolder
from halteres.agent.trial.request import Candidate, Request
from halteres.observe.metrics import Row, read_rows

DROPPED = frozenset(("too_long", "wrong_size", "same_scores", "nothing_collected"))


Fault = Literal["model", "environment", "test"]


class Traffic(msgspec.Struct, kw_only=True):
    """Counts of one model, so far."""

    asked: int = 0  # completions that the environment asked for
    completions: int = 0  # that came
    tokens: int = 0  # of them
    truncated: int = 0  # cut off by the limit of tokens
    retries: int = 0
    errors: dict[str, int] = {}  # what was given up on: status -> how often
    last_error: str = ""
    over: Literal["", "model", "budget"] = ""  # why nothing more is sent: the model fails for good, or enough was spent
    in_flight: int = 0
    busy_s: float = 0.0  # during which anything was in flight
    busy_since: float = 0.0  # monotonic

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """One request of the environment's, inside."""
        if self.in_flight == 0:
            self.busy_since = time.monotonic()
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self.busy_s += time.monotonic() - self.busy_since

    def answered(self, answer: Any) -> None:
        """Take in a model's answer."""
        self.completions += len(wire.items(answer))
        self.truncated += sum(wire.finish(item) == "length" for item in wire.items(answer))
        self.tokens += wire.tokens(answer)

    def failed(self, status: int, why: str) -> None:
        """A request was given up."""
        self.errors[str(status)] = self.errors.get(str(status), 0) + 1
        self.last_error = why

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all answers, over the time in which any was waited for."""
        return self.tokens / self.busy_s if self.busy_s > 0 and self.tokens else None


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """ended.json. Without an error it went through."""

    error: str = ""  # what, one sentence; the seeds' words
    why: str = ""
    fault: Fault | None = None
    seconds: float = 0.0
    traffic: Traffic = msgspec.field(default_factory=Traffic)
    stdout: str = ""  # its end, where something went wrong
    stderr: str = ""


"""What `process` records of a group that did not fail and was not kept all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The scored answers to one task."""

    scores: tuple[float, ...]
    prompt: str = ""  # the last message before the answer, where there are messages
    answers: tuple[str, ...] = ()  # one for each score, or none where they are not told
    reference: str = ""  # the right answer, where the item has a field for it

    @property
    def varies(self) -> bool:
        """Whether some answer is better than another: what a group teaches by."""
        return len(set(self.scores)) > 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One model's groups, or its answers to free prompts, and how it ended."""

    candidate: Candidate
    request: Request
    output_file: Path
    log_file: Path
    groups: tuple[Group, ...]
    responses: tuple[Row, ...]  # to free prompts: prompt, completion, score, note
    failures: tuple[Row, ...]  # code, why: attempts that were replaced, groups that were given up
    ended: Ended | None  # None: it goes on

    @cached_property
    def scores(self) -> tuple[float, ...]:
        """All that were given."""
        if self.request.prompts:
            return tuple(row["score"] for row in self.responses if isinstance(row.get("score"), int | float))
        return tuple(score for group in self.groups for score in group.scores)

    @property
    def completions(self) -> int:
        """Answers of groups that were kept, or to free prompts."""
        return len(self.responses) if self.request.prompts else len(self.scores)

    def correct(self, scores: Sequence[float]) -> int:
        """How many of these count as success."""
        return sum(score > self.request.success_above for score in scores)

    @property
    def varied(self) -> float | None:
        """The share of groups that teach something."""
        return sum(group.varies for group in self.groups) / len(self.groups) if self.groups else None

    @property
    def truncated(self) -> float | None:
        """The share of answers that were cut off."""
        traffic = self.ended.traffic if self.ended else None
        return traffic.truncated / traffic.completions if traffic and traffic.completions else None

    @property
    def scorer_failures(self) -> tuple[Row, ...]:
        """Attempts that the environment's own code failed at."""
        return tuple(row for row in self.failures if row["code"] not in DROPPED | {"sampler_error", "group_failed"})

    def facts(self) -> dict[str, Any]:
        """The seeds' figures of one model, then ours. Ratios to three decimals."""
        one = self.candidate
        steps = [self._step(number, group) for number, group in enumerate(self.groups, 1)]
        with_correct = sum(step["correct"] > 0 for step in steps)
        correct = self.correct(self.scores)
        return {
            "model": one.model,
            "name": one.name,
            "scale": one.scale,
            "wandb_run": one.wandb_run,
            "output_file": str(self.output_file),
            "steps": steps,
            "steps_tested": len(steps),
            "total_completions": self.completions,
            "correct_completions": correct,
            "accuracy": round(correct / len(self.scores), 3) if self.scores else 0,
            "steps_with_correct": with_correct,
            "step_success_rate": round(with_correct / len(steps), 3) if steps else 0,
            **self._further(),
            **self._told(),
        }

    def _further(self) -> dict[str, Any]:
        """What the seeds do not have; what went wrong only where something did."""
        scores, failed = self.scores, len(self.scorer_failures)
        codes = Counter(row["code"] for row in self.failures)
        dropped = sum(codes[name] for name in DROPPED)
        told: dict[str, Any] = {"failures": dict(codes)} if codes else {}
        told |= {"groups_dropped": dropped} if dropped else {}
        if not self.completions:
            return told
        return {
            "mean_score": round(sum(scores) / len(scores), 3) if scores else None,
            "score_range": plain([min(scores), max(scores)]) if scores else None,
            "groups_with_variance": _rounded(self.varied),
            "truncated": _rounded(self.truncated),
            "parse_failures": round(failed / (self.completions + failed), 3),
            **told,
        }

    def _told(self) -> dict[str, Any]:
        """How it ended."""
        if self.ended is None:
            return {}
        speed = self.ended.traffic.tokens_per_s
        told: dict[str, Any] = {"seconds": round(self.ended.seconds, 1)}
        told["tokens_per_s"] = None if speed is None else float(f"{speed:.3g}")
        if self.ended.error:
            told |= {"error": self.ended.error, "why": self.ended.why, "log_file": str(self.log_file)}
            told |= {"stderr": self.ended.stderr, "stdout": self.ended.stdout}
        return told

    def _step(self, number: int, group: Group) -> dict[str, Any]:
        scores = group.scores
        return {"step": number, "completions": len(scores), "correct": self.correct(scores), "scores": plain(scores)}


def plain(scores: Sequence[float]) -> list[float]:
    """As an answer tells them: whole numbers without a point, others with four significant digits."""
    return [int(score) if score == int(score) else float(f"{score:.4g}") for score in scores]


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 3)


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
