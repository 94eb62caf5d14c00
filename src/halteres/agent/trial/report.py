"""The answer to a test: what result.json holds, and what an unfinished test has so far, read from
its files.

The seeds' keys of the answer and ours; the verdict (can one train on this environment with this
model, why, and what to do now); answers of models shown as samples; everything shortened to the
budget of an answer, the verdict last.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from halteres.agent.answer_text import nonempty
from halteres.agent.trial.folder import TestFolder
from halteres.agent.trial.outcome import Outcome, read_outcome
from halteres.agent.trial.request import LOCAL, Request
from halteres.next_step import NextStep, for_agents
from halteres.observe.metrics import Row
from halteres.redaction import Redactor
from halteres.rewards.checking import check_answers
from halteres.short_texts import clipped, shortened

MUCH_TRUNCATED, MANY_FAILURES = 0.3, 0.1
LENGTH_STEP, USUAL_ANSWER = 64, 512  # tokens: a proposed length is a multiple; of an answer at most
LITTLE_KEPT = 0.5  # share of groups kept, from which down a test says how many are to be expected
POOR_RATE, BY_CHANCE = 1 / 50, 0.25
"""Below which share of right answers training is a poor bet (docs/own-model.md), and how likely at
that share so many right answers must be for the test not to rule it out.
"""
SHORT_ANSWERS = (
    ", or ask for a short answer in the prompt, or show one or two as chat turns (`prompt` may "
    "return whole messages)"
)
LONGEST_WHY = 300  # characters of what an environment's code said
PARTIAL = 0.5
"""Where an environment does not say what counts as success, a best score below it is hardly a right
answer's.
"""

# what the scorer gives for odd answers: name -> score, or why there is none
ODD_ANSWERS = "odd_answers.json"

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
        if outcome.kept_share is not None and outcome.kept_share < LITTLE_KEPT:
            why += f"; {_expected(outcome)}"
        if _is_poor_bet(outcome):
            following = (
                SETTINGS,
                ": make its tasks easier, or choose a stronger model; else ",
                TRAIN,
            )
        elif outcome.truncated > MUCH_TRUNCATED:
            following = (*_ease(outcome), "; else ", TRAIN)
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
    if fitting := _fitting_length(outcome):
        longer = NextStep.of("rl_edit_config", "env.max_token_length", fitting)
        return Verdict(False, f"No answer was scored: {cause}", (longer, " then ", AGAIN))
    if ended.fault == "environment":
        fix = f"mend {outcome.request.program.path}, then "
        return Verdict(False, f"No answer was scored: {cause}", (fix, AGAIN))
    local = NextStep.of("rl_test_inference", backend="local")
    return Verdict(None, f"The model gave nothing to judge by: {cause}", local)


def _fitting_length(outcome: Outcome) -> int:
    """The max_token_length that the longest refused prompt and its answer fit into, in whole steps;
    0 where no prompt was refused, or where prompts were not counted in the trained model's tokens.
    """
    longest = max((failure.prompt_tokens for failure in outcome.failures), default=0)
    if not longest or not outcome.model.is_local:
        return 0
    own = outcome.request.env.get("max_new_tokens")
    answer = outcome.request.max_tokens or USUAL_ANSWER
    if isinstance(own, int):
        answer = max(own, outcome.request.max_tokens or 0)
    # prompt and answer together stay below it
    return -(-(longest + answer + 1) // LENGTH_STEP) * LENGTH_STEP


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


def _expected(outcome: Outcome) -> str:
    """How many groups a run would keep, and whether that is worth its sampling."""
    number, correct = len(outcome.scores), outcome.num_correct(outcome.scores)
    share, size = outcome.kept_share or 0.0, outcome.request.group_size
    expected = (
        f"{correct} of {number} answers are right, and at that rate {share:.0%} of groups of "
        f"{size} have both kinds and are kept"
    )
    if _is_poor_bet(outcome):
        return f"{expected}: a poor bet, for the rate may well be below 1 in {1 / POOR_RATE:.0f}"
    return expected


def _is_poor_bet(outcome: Outcome) -> bool:
    """Whether a share of right answers too small to train on is not ruled out."""
    if outcome.kept_share is None or outcome.kept_share >= LITTLE_KEPT:
        return False
    number = len(outcome.scores)
    # the chances of so many right answers, one more after the other
    chance, fewer = (1 - POOR_RATE) ** number, 0.0
    for right in range(outcome.num_correct(outcome.scores)):
        fewer += chance
        chance *= (number - right) / (right + 1) * POOR_RATE / (1 - POOR_RATE)
    return 1 - fewer > BY_CHANCE


def _ease(outcome: Outcome) -> tuple[str | NextStep, ...]:
    limit, own = outcome.request.max_tokens, outcome.request.env.get("max_new_tokens")
    if outcome.truncated > MUCH_TRUNCATED and isinstance(own, int):
        longer = NextStep.of("rl_edit_config", "max_new_tokens", 2 * (limit or own))
        return longer, " then ", AGAIN, SHORT_ANSWERS
    if outcome.truncated > MUCH_TRUNCATED and limit:
        return NextStep.of("rl_test_inference", max_tokens=2 * limit), SHORT_ANSWERS
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
