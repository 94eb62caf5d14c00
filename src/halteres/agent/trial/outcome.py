"""What the files of a test say of one model: its groups or answers, and how its test ended."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from halteres.agent.trial.folder import TestFolder
from halteres.agent.trial.relay import Traffic
from halteres.agent.trial.request import Request, TestedModel
from halteres.groups.group import ScoredGroup
from halteres.observe.metrics import Row, read_rows
from halteres.runs.reading.rollouts import Failure, RecordedGroup
from halteres.short_texts import rounded
from halteres.tokenizer import text_of

DROPPED = frozenset(("too_long", "wrong_size", "same_scores", "nothing_collected"))
"""What `process` records of a group that did not fail and was not kept all the same."""

REFERENCES = (
    "answer",
    "solution",
    "target",
    "expected",
    "reference",
    "ground_truth",
    "gold",
    "label",
)
"""What the right answer is called in an item; the first that is there."""

Fault = Literal["model", "environment", "test"]


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """ended.json: how the test of one model ended. Without an error it went through."""

    error: str = ""  # what, one sentence; the seeds' words
    why: str = ""
    fault: Fault | None = None
    seconds: float = 0.0
    traffic: Traffic = msgspec.field(default_factory=Traffic)
    stdout: str = ""  # its end, where something went wrong
    stderr: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskAnswers:
    """The scored answers to one task."""

    scores: tuple[float, ...]
    prompt: str = ""  # the last message before the answer, where there are messages
    answers: tuple[str, ...] = ()  # one for each score, or none where they are not recorded
    reference: str = ""  # the right answer, where the item has a field for it

    @property
    def varies(self) -> bool:
        """Whether some answer is better than another: what a group teaches by."""
        return len(set(self.scores)) > 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One model's groups, or its answers to free prompts, and how its test ended."""

    model: TestedModel
    request: Request
    output_file: Path
    log_file: Path
    groups: tuple[TaskAnswers, ...]
    responses: tuple[Row, ...]  # to free prompts: prompt, completion, score, note
    failures: tuple[Failure, ...]  # attempts that were replaced, groups that were given up
    ended: Ended | None  # None: it goes on

    @cached_property
    def scores(self) -> tuple[float, ...]:
        """All that were given."""
        if self.request.prompts:
            given = [row.get("score") for row in self.responses]
            return tuple(score for score in given if isinstance(score, int | float))
        return tuple(score for group in self.groups for score in group.scores)

    @property
    def completions(self) -> int:
        """Answers of whole groups, or to free prompts."""
        if self.request.prompts:
            return len(self.responses)
        return len(self.scores)

    def num_correct(self, scores: Sequence[float]) -> int:
        """How many of these count as success."""
        return sum(score > self.request.success_above for score in scores)

    @property
    def accuracy(self) -> float:
        """The share of answers that count as success."""
        if self.scores:
            return round(self.num_correct(self.scores) / len(self.scores), 3)
        return 0

    @property
    def varied(self) -> float | None:
        """The share of groups that teach something."""
        if self.groups:
            return sum(group.varies for group in self.groups) / len(self.groups)
        return None

    @property
    def kept_share(self) -> float | None:
        """The share of groups with both right and wrong answers that the measured share of right
        ones leads to expect; None where answers are not of one right and one wrong score.
        """
        number, correct = len(self.scores), self.num_correct(self.scores)
        if len(set(self.scores)) != 2 or correct in (0, number):
            return None
        rate, size = correct / number, self.request.group_size
        return 1 - rate**size - (1 - rate) ** size

    @property
    def truncated(self) -> float:
        """The share of answers that were cut off; 0 where it is not known."""
        traffic = None
        if self.ended:
            traffic = self.ended.traffic
        if traffic and traffic.completions:
            return traffic.truncated / traffic.completions
        return 0.0

    @property
    def scorer_failures(self) -> tuple[Failure, ...]:
        """Attempts that the environment's own code failed at."""
        return tuple(
            row
            for row in self.failures
            if row.code not in DROPPED | {"sampler_error", "group_failed"}
        )

    def facts(self) -> dict[str, Any]:
        """The seeds' figures of one model, then ours; what went wrong only where something did."""
        one, num_steps = self.model, len(self.groups)
        correct = [self.num_correct(group.scores) for group in self.groups]
        with_correct = sum(number > 0 for number in correct)
        success_rate: float = 0
        if num_steps:
            success_rate = round(with_correct / num_steps, 3)
        facts: dict[str, Any] = {
            "model": one.model,
            "name": one.name,
            "scale": one.scale,
            "wandb_run": one.wandb_run,
            "output_file": str(self.output_file),
            "steps": [
                {
                    "step": at,
                    "completions": len(group.scores),
                    "correct": number,
                    "scores": _plain(group.scores),
                }
                for at, (group, number) in enumerate(zip(self.groups, correct, strict=True), 1)
            ],
            "steps_tested": num_steps,
            "total_completions": self.completions,
            "correct_completions": self.num_correct(self.scores),
            "accuracy": self.accuracy,
            "steps_with_correct": with_correct,
            "step_success_rate": success_rate,
        }
        if self.completions:
            facts |= self._score_facts()
        codes = Counter(row.code for row in self.failures)
        if codes:
            facts["failures"] = dict(codes)
        num_dropped = sum(codes[name] for name in DROPPED)
        if num_dropped:
            facts["groups_dropped"] = num_dropped
        if self.ended is not None:
            facts |= self._end_facts(self.ended)
        return facts

    def _score_facts(self) -> dict[str, Any]:
        """What the scores say; null where it is not known."""
        num_failed = len(self.scorer_failures)
        facts: dict[str, Any] = dict.fromkeys(
            ("mean_score", "score_range", "groups_with_variance", "truncated")
        )
        facts["parse_failures"] = round(num_failed / (self.completions + num_failed), 3)
        if self.scores:
            facts["mean_score"] = round(sum(self.scores) / len(self.scores), 3)
            facts["score_range"] = _plain([min(self.scores), max(self.scores)])
        if self.varied is not None:
            facts["groups_with_variance"] = round(self.varied, 3)
        if self.ended and self.ended.traffic.completions:
            facts["truncated"] = round(self.truncated, 3)
        return facts

    def _end_facts(self, ended: Ended) -> dict[str, Any]:
        """How long the test took, how fast the model was, and what went wrong."""
        facts: dict[str, Any] = {
            "seconds": round(ended.seconds, 1),
            "tokens_per_s": rounded(ended.traffic.tokens_per_s, 3),
        }
        if ended.error:
            facts |= {"error": ended.error, "why": ended.why, "log_file": str(self.log_file)}
            facts |= {"stderr": ended.stderr, "stdout": ended.stdout}
        return facts


def _plain(scores: Sequence[float]) -> list[float]:
    """Whole numbers without a point, others with four rounded digits."""
    plain: list[float] = []
    for score in scores:
        if score == int(score):
            plain.append(int(score))
        else:
            plain.append(float(f"{score:.4g}"))
    return plain


def read_outcome(folder: TestFolder, request: Request, model: TestedModel) -> Outcome:
    """What a model's files say now."""
    work, output = folder.work(model), folder.groups(model)
    recorded = folder.recorded_groups(model)
    groups: list[TaskAnswers] = []
    responses: list[Row] = []
    if request.prompts:
        responses = read_rows(output)
    else:
        with_rollouts = [group for group in recorded if group.completions]
        groups = list(_tasks(folder.scored_groups(model), with_rollouts))
    try:
        ended = msgspec.json.decode((work / "ended.json").read_bytes(), type=Ended)
    except OSError:
        ended = None
    return Outcome(
        model=model,
        request=request,
        output_file=output,
        log_file=folder.log(model),
        groups=tuple(groups),
        responses=tuple(responses),
        failures=tuple(failure for group in recorded for failure in group.failures),
        ended=ended,
    )


def _tasks(
    scored: Sequence[ScoredGroup | None], recorded: Sequence[RecordedGroup]
) -> Iterator[TaskAnswers]:
    """Whole groups, next to what was recorded of each; any other line is passed over."""
    for number, group in enumerate(scored):
        record = RecordedGroup()
        if number < len(recorded):
            record = recorded[number]
        if group is not None:
            yield _task(group, record)


def _task(group: ScoredGroup, record: RecordedGroup) -> TaskAnswers:
    """Texts are those of the messages, else as they were recorded."""
    prompt = record.prompt
    answers = [completion.conversation for completion in record.completions]
    chats = group.messages or []
    have_chats = len(chats) == len(group.scores) and all(
        isinstance(chat, list) and len(chat) > 1 for chat in chats
    )
    # of several turns a rollout has several sequences, and its answer is a whole conversation
    if group.episodes is None and have_chats:
        prompt = text_of(chats[0][-2].get("content"))
        answers = [text_of(chat[-1].get("content")) for chat in chats]
    scores = group.rollout_scores
    if len(answers) != len(scores):
        answers = []
    return TaskAnswers(
        scores=scores,
        prompt=prompt,
        answers=tuple(answers),
        reference=reference_of(record.item),
    )


def reference_of(item: Any) -> str:
    """The right answer of an item that is a dataclass or a mapping (in JSON both are objects); else
    nothing.
    """
    fields = fields_of(item)
    return next(
        (str(fields[name]) for name in REFERENCES if fields.get(name) not in (None, "")), ""
    )


def fields_of(item: Any) -> Mapping[str, Any]:
    """The fields of a task that is a dataclass or a mapping."""
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    if isinstance(item, Mapping):
        return item
    return {}
