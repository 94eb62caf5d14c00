"""The answer to a test: what result.json holds, and what an unfinished test has so far, read from
its files.

The seeds' keys of the answer and ours; the verdict (can one train on this environment with this
model, why, and what to do now); answers of models shown as samples; everything shortened to the
budget of an answer, the verdict last.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from halteres.agent.answer_text import nonempty
from halteres.agent.trial.folder import TestFolder
from halteres.agent.trial.relay import Traffic
from halteres.agent.trial.request import LOCAL, Request, TestedModel
from halteres.groups.group import ScoredGroup
from halteres.next_step import NextStep, for_agents
from halteres.observe.metrics import Row, read_rows
from halteres.redaction import Redactor
from halteres.rewards.checking import check_answers
from halteres.runs.reading.rollouts import Failure, RecordedGroup
from halteres.short_texts import clipped, rounded, shortened
from halteres.text import text_of

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

# what the scorer gives for odd answers: name -> score, or why there is none
ODD_ANSWERS = "odd_answers.json"

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


MUCH_TRUNCATED, MANY_FAILURES = 0.3, 0.1
LONGEST_WHY = 300  # characters of what an environment's code said
PARTIAL = 0.5
"""Where an environment does not say what counts as success, a best score below it is hardly a right
answer's.
"""

Steps = str | NextStep | tuple[str | NextStep, ...]
"""What to do next, as result.json holds it."""

TRAIN = NextStep.of("rl_start_training", dry_run=True)
AGAIN = NextStep("rl_test_inference")
SETTINGS = NextStep.of("rl_get_current_config", detail="full")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one can train on what a model answered."""

    trainable: bool | None  # None: it cannot be said
    why: str
    next: Steps


def judge(outcome: Outcome) -> Verdict:
    """What the groups, or the answers to free prompts, of one model say."""
    groups, file = outcome.groups, outcome.request.program.path
    if outcome.request.prompts:
        if not outcome.responses:
            return _judge_nothing(outcome)
        scored = f"{len(outcome.scores)} of {len(outcome.responses)} answers could be scored"
        return Verdict(
            None, f"{scored}; whether rewards vary, only the environment's own tasks tell.", AGAIN
        )
    if not groups:
        return _judge_nothing(outcome)
    if {len(group.scores) for group in groups} == {1}:
        larger = NextStep.of("rl_test_inference", group_size=16)
        return Verdict(None, "A group of one answer has no variance: ask for more.", larger)
    number, correct = len(outcome.scores), outcome.num_correct(outcome.scores)
    trainable, following = bool(outcome.varied), TRAIN
    if trainable:
        varied = sum(group.varies for group in groups)
        why = f"{varied} of {len(groups)} groups have {_kinds_of_answers(outcome)}"
    elif correct == number:
        why, following = (
            f"Too easy: all {number} answers are right",
            (SETTINGS, ": make its tasks harder"),
        )
    elif correct:
        why, following = (
            "Within every group all answers score the same",
            (SETTINGS, ": is its scorer coarse?"),
        )
    elif len(set(outcome.scores)) > 1:
        why, following = f"Too hard: none of {number} answers is right", _ease(outcome)
    else:  # a scorer that knows no right answer looks the same as a task that is too hard
        blame = f"too hard, or the scorer in {file.name} is at fault: read the samples"
        why = f"All {number} scores are equal ({outcome.scores[0]:.4g}): {blame}"
        following = (f"read {file} and {outcome.output_file}, mend or ease it, then ", AGAIN)
        if outcome.truncated > MUCH_TRUNCATED:  # an answer that is cut off has nothing to be scored
            following = _ease(outcome)
    return Verdict(trainable, "; ".join([why, *_caveats(outcome)]) + ".", following)


def _judge_nothing(outcome: Outcome) -> Verdict:
    ended = outcome.ended
    if ended is None:
        return Verdict(None, "Nothing is scored yet.", AGAIN)
    said = f"{ended.error}. {ended.why}"
    if outcome.scorer_failures:
        said = outcome.scorer_failures[-1].why
    # What foreign code said may be long, and ends with where it failed; the log has all of it.
    cause = shortened(said, LONGEST_WHY)
    if ended.fault == "environment":
        fix = f"mend {outcome.request.program.path}, then "
        return Verdict(False, f"No answer was scored: {cause}", (fix, AGAIN))
    local = NextStep.of("rl_test_inference", backend="local")
    return Verdict(None, f"The model gave nothing to judge by: {cause}", local)


def _kinds_of_answers(outcome: Outcome) -> str:
    best = max(outcome.scores)
    if not outcome.num_correct(outcome.scores):
        return f"answers of different scores, but the best is {best:.4g}: no answer is right"
    if best < PARTIAL and not outcome.request.success_above:
        return (
            f"answers of different scores, but the best is {best:.4g}: no answer is right, if "
            "a right one scores 1"
        )
    is_mixed = any(
        0 < outcome.num_correct(group.scores) < len(group.scores) for group in outcome.groups
    )
    if is_mixed:
        return "both good and bad answers"
    return "answers of different scores"


def _ease(outcome: Outcome) -> Steps:
    limit, own = outcome.request.max_tokens, outcome.request.env.get("max_new_tokens")
    if outcome.truncated > MUCH_TRUNCATED and isinstance(own, int):
        return NextStep.of("rl_edit_config", "max_new_tokens", 2 * (limit or own)), " then ", AGAIN
    if outcome.truncated > MUCH_TRUNCATED and limit:
        return NextStep.of("rl_test_inference", max_tokens=2 * limit)
    return SETTINGS, ": make its tasks easier, or choose a stronger model"


def _caveats(outcome: Outcome) -> Iterator[str]:
    if outcome.truncated > MUCH_TRUNCATED:
        yield f"{outcome.truncated:.0%} of the answers are cut off"
    failed = outcome.scorer_failures
    if len(failed) > MANY_FAILURES * (outcome.completions + len(failed)):
        yield (
            f"{len(failed)} times its code failed "
            f"({shortened(failed[-1].why, LONGEST_WHY).rstrip('.')})"
        )
    if outcome.ended and outcome.ended.error:
        yield outcome.ended.error


def odd_caveats(scores: Mapping[str, Any], success_above: float) -> list[str]:
    """What is wrong with a scorer, by its scores of odd answers (name -> score, or why there is
    none).
    """
    found = check_answers(scores, success_above)
    paid = [one.subject for one in found if one.code != "fails"]
    failed = [one for one in found if one.code == "fails"]
    caveats = []
    if paid:
        caveats = [f"its scorer pays for answers that say nothing ({', '.join(paid)})"]
    if failed:
        names = ", ".join(one.subject for one in failed)
        caveats.append(f"its scorer fails on odd answers ({names}: {failed[0].why})")
    return caveats


SAMPLES, LONGEST_SAMPLE = 2, 2000  # characters of each text of one

IN_CHARACTERS = (
    "The base model '{model}' is not here: prompts were counted in characters, not in its tokens."
)


def report(folder: TestFolder, request: Request, status: str) -> dict[str, Any]:
    """The answer that the files of the test give now."""
    outcomes = [read_outcome(folder, request, model) for model in request.models]
    verdicts = [judge(outcome) for outcome in outcomes]
    several, each = len(outcomes) > 1, request.rollouts
    trained = LOCAL + request.base_model
    decides = _deciding(outcomes, trained)
    deciding, verdict = outcomes[decides], verdicts[decides]
    why = verdict.why
    if several or deciding.model.model != trained:
        why = f"{deciding.model.model}: {why}"
    try:
        odd = msgspec.json.decode((folder.path / ODD_ANSWERS).read_bytes(), type=dict[str, Any])
        why = "; ".join([why.rstrip("."), *odd_caveats(odd, request.success_above)]) + "."
    except OSError:  # not tried, or not yet
        odd = {}
    note = ""
    if any(not one.is_local and not one.tokenizer for one in request.models):
        note = IN_CHARACTERS.format(model=request.base_model)
    num_steps, group_size = request.num_steps, request.group_size
    answers: dict[str, Any] = {"samples": _samples(deciding)}
    if request.prompts:
        num_steps, group_size = len(request.prompts), 1
        answers = {"responses": _responses(outcomes)}
    accuracies = {
        outcome.model.model: outcome.accuracy for outcome in outcomes if outcome.completions
    }
    best_model: str | None = None
    avg_accuracy: float = 0
    if accuracies:
        best_model = max(accuracies, key=lambda model: accuracies[model])
        avg_accuracy = round(sum(accuracies.values()) / len(accuracies), 3)
    tested: list[dict[str, Any]] = []
    for outcome, judged in zip(outcomes, verdicts, strict=True):
        tested.append({**outcome.facts(), "trainable": judged.trainable})
        # of the only model, the summary says why
        if several:
            tested[-1]["verdict"] = judged.why
    return {
        "status": status,
        "test_id": folder.test_id,
        "environment": request.program.name,
        "environment_file": str(request.program.path),
        "draft": request.draft,
        "test_config": {
            "num_steps": num_steps,
            "group_size": group_size,
            "rollouts_per_model": each,
            "total_rollouts": each * len(outcomes),
        },
        "models_tested": tested,
        "summary": {
            "steps_requested": num_steps,
            "models_tested": len(outcomes),
            "models_succeeded": len(accuracies),
            "best_model": best_model,
            "avg_accuracy": avg_accuracy,
            "environment_working": bool(accuracies),
            "output_directory": str(folder.path),
            **nonempty(odd_answers=odd),
            "trainable": verdict.trainable,
            "why": why,
        },
        **answers,
        **nonempty(note=note),
        "next": verdict.next,
    }


def _responses(outcomes: Sequence[Outcome]) -> list[Row]:
    """The answers to free prompts; of several models each with its model."""
    rows: list[Row] = []
    for outcome in outcomes:
        for row in outcome.responses:
            if len(outcomes) > 1:
                row = {"model": outcome.model.model, **row}
            rows.append(row)
    return rows


def _deciding(outcomes: Sequence[Outcome], trained: str) -> int:
    """Whose verdict is the test's: that of the model that would be trained; where it was not
    tested, of the one whose rewards vary most.
    """
    for at, outcome in enumerate(outcomes):
        if outcome.model.model == trained:
            return at
    varied: list[float] = []
    for outcome in outcomes:
        if outcome.varied is None:
            varied.append(-1.0)
        else:
            varied.append(outcome.varied)
    return varied.index(max(varied))


def _samples(outcome: Outcome) -> list[dict[str, Any]]:
    """The best and the worst answer of a few groups: of those whose answers differ first."""
    answered = [(step, group) for step, group in enumerate(outcome.groups, 1) if group.answers]
    samples: list[dict[str, Any]] = []
    for step, group in sorted(answered, key=lambda one: not one[1].varies)[:SAMPLES]:
        scored = sorted(zip(group.scores, group.answers, strict=True), key=lambda it: it[0])
        ranked = [answer for _, answer in scored]
        worst = next((answer for answer in ranked if answer != ranked[-1]), ranked[-1])
        texts = {
            "prompt": group.prompt,
            "best": ranked[-1],
            "worst": worst,
            **nonempty(reference=group.reference),
        }
        samples.append(
            {
                "step": step,
                **{name: shortened(text, LONGEST_SAMPLE) for name, text in texts.items()},
            }
        )
    return samples


BUDGET = 900 * 4  # characters of compact JSON: spec/agent-tools.md 4.8
Body = dict[str, Any]

_CUTS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (240, ()),
    (240, ("verdict",)),  # the summary has the one that counts
    (240, ("verdict", "scores")),
    (120, ("verdict", "scores")),
    (120, ("verdict", "scores", "steps")),
    (40, ("verdict", "scores", "steps")),
    (40, ("verdict", "scores", "steps", "samples")),
    (40, ("verdict", "scores", "steps", "samples", "stdout", "stderr")),  # the log file has them
    (
        40,
        ("verdict", "scores", "steps", "samples", "stdout", "stderr", "log_file", "why", "folder"),
    ),
)
"""Characters of each text, and what is left out, tried one after another until the answer fits."""


def brief(body: Body) -> Body:
    """The answer, cut as far as it must be: words first, then scores, then steps, then samples,
    then paths.
    """
    # in JSON's types, where it comes from a file
    following: Steps = msgspec.convert(body["next"], Steps)
    # Half of a secret would not be known as one.
    whole: Body = Redactor.of_this_process().json({**body, "next": for_agents(following)})
    cuts = (_cut(whole, length, left_out) for length, left_out in _CUTS)
    if _fits(whole):
        short = whole
    else:
        short = next((short for short in cuts if _fits(short)), _cut(whole, *_CUTS[-1]))
    return {**short, "next": following}


def _fits(body: Body) -> bool:
    return len(json.dumps(body, separators=(",", ":"), ensure_ascii=False)) <= BUDGET


def _cut(body: Body, length: int, left_out: Sequence[str]) -> Body:
    short = copy.deepcopy(body)
    names = [name for name in ("scores", "steps") if name in left_out]
    if names:
        short["left_out"] = {"what": names, "where": "each model's output_file"}
    for one in (*short.get("samples", ()), *short.get("responses", ())):
        cut = clipped
        if length > 40:
            cut = shortened
        one.update({name: cut(text, length) for name, text in one.items() if isinstance(text, str)})
    for model in short["models_tested"]:
        # Of what was printed the end counts.
        model.update(
            {name: model[name][-length:] for name in ("stdout", "stderr") if name in model}
        )
        model.update(
            {name: clipped(model[name], 2 * length) for name in ("why", "verdict") if name in model}
        )
        for row in (model, *model["steps"]):
            for name in {*left_out} - {"steps"}:
                row.pop(name, None)
        if "steps" in left_out:
            model["steps"] = []
        if "folder" in left_out:  # the summary names it
            model["output_file"] = model["output_file"].rpartition("/")[2]
    for name in ("samples", "responses"):
        while "samples" in left_out and len(short.get(name, ())) > 1 and not _fits(short):
            short[name].pop()
            short["left_out"]["what"] = [*names, name]
    return short
