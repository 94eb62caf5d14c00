"""The answer to a test: what result.json holds, and what an unfinished test has so far.

The seeds' keys of the answer and ours; the verdict (can one train on this environment with this model, why, and what to
do now); answers of models shown as samples; everything shortened to the budget of an answer, the verdict last.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halteres.agent.fitting import shortened
from halteres.agent.trial.folder import TestFolder
from halteres.agent.trial.outcome import Group, Outcome, read_odd_answers, read_outcome
from halteres.agent.trial.request import LOCAL, Request
from halteres.agent.trial.scoring import odd_caveats
from halteres.redaction import Redactor

MUCH_TRUNCATED = 0.3
MANY_FAILURES = 0.1

LONGEST_WHY = 300  # characters of what an environment's code said

PARTIAL = 0.5
"""Where an environment does not say what counts as success, a best score below it is hardly a right answer's."""

TRAIN = "rl_start_training(dry_run=true)"
AGAIN = "rl_test_inference()"
SETTINGS = 'rl_get_current_config(detail="full")'


@dataclass(frozen=True, slots=True)
class Verdict:
    """One judgement."""

    trainable: bool | None  # None: it cannot be said
    why: str  # one sentence
    next: str  # the call that makes sense now


def judge(outcome: Outcome) -> Verdict:
    """What the groups of one model say."""
    if not outcome.groups:
        return _nothing(outcome)
    sizes = {len(group.scores) for group in outcome.groups}
    if sizes == {1}:
        return Verdict(None, "A group of one answer has no variance: ask for more.", "rl_test_inference(group_size=16)")
    verdict = _vary(outcome) if outcome.varied else _same(outcome)
    return Verdict(verdict.trainable, "; ".join([verdict.why, *_caveats(outcome)]) + ".", verdict.next)


def judge_prompts(outcome: Outcome) -> Verdict:
    """What answers to free prompts say: whether they are scored at all."""
    if not outcome.responses:
        return _nothing(outcome)
    scored = f"{len(outcome.scores)} of {len(outcome.responses)} answers could be scored"
    return Verdict(None, f"{scored}; whether rewards vary, only the environment's own tasks tell.", AGAIN)


def _nothing(outcome: Outcome) -> Verdict:
    ended, file = outcome.ended, outcome.request.environment_file
    if ended is None:
        return Verdict(None, "Nothing is scored yet.", AGAIN)
    cause = _brief(outcome.scorer_failures[-1]["why"] if outcome.scorer_failures else f"{ended.error}. {ended.why}")
    if ended.fault == "environment":
        return Verdict(False, f"No answer was scored: {cause}", f"mend {file}, then {AGAIN}")
    return Verdict(None, f"The model gave nothing to judge by: {cause}", 'rl_test_inference(backend="local")')


def _vary(outcome: Outcome) -> Verdict:
    varied = sum(group.varies for group in outcome.groups)
    return Verdict(True, f"{varied} of {len(outcome.groups)} groups have {_kinds(outcome)}", TRAIN)


def _kinds(outcome: Outcome) -> str:
    best = max(outcome.scores)
    if not outcome.correct(outcome.scores):
        return f"answers of different scores, but the best is {best:.4g}: no answer is right"
    if best < PARTIAL and not outcome.request.success_above:
        return f"answers of different scores, but the best is {best:.4g}: no answer is right, if a right one scores 1"
    return "both good and bad answers" if _mixed(outcome) else "answers of different scores"


def _same(outcome: Outcome) -> Verdict:
    number, correct = len(outcome.scores), outcome.correct(outcome.scores)
    if correct == number:
        return Verdict(False, f"Too easy: all {number} answers are right", f"{SETTINGS}: make its tasks harder")
    if correct == 0 and len(set(outcome.scores)) == 1:
        return _all_alike(outcome)
    if correct == 0:
        return Verdict(False, f"Too hard: none of {number} answers is right", _ease(outcome))
    return Verdict(False, "Within every group all answers score the same", f"{SETTINGS}: is its scorer coarse?")


def _all_alike(outcome: Outcome) -> Verdict:
    """Nobody is right: a scorer that knows no right answer looks the same as a task that is too hard."""
    file = outcome.request.environment_file
    blame = f"too hard, or the scorer in {Path(file).name} is at fault: read the samples"
    why = f"All {len(outcome.scores)} scores are equal ({outcome.scores[0]:.4g}): {blame}"
    if (outcome.truncated or 0) > MUCH_TRUNCATED:  # an answer that is cut off has nothing to be scored
        return Verdict(False, why, _ease(outcome))
    return Verdict(False, why, f"read {file} and {outcome.output_file}, mend or ease it, then {AGAIN}")


def _ease(outcome: Outcome) -> str:
    asked, own = outcome.request.max_tokens, outcome.request.env.get("max_new_tokens")
    if (outcome.truncated or 0) > MUCH_TRUNCATED:
        if isinstance(own, int):
            return f'rl_edit_config("max_new_tokens", {2 * (asked or own)}) then {AGAIN}'
        if asked:
            return f"rl_test_inference(max_tokens={2 * asked})"
    return f"{SETTINGS}: make its tasks easier, or choose a stronger model"


def _caveats(outcome: Outcome) -> list[str]:
    said: list[str] = []
    if (outcome.truncated or 0) > MUCH_TRUNCATED:
        said.append(f"{outcome.truncated:.0%} of the answers are cut off")
    failed = outcome.scorer_failures
    if len(failed) > MANY_FAILURES * (outcome.completions + len(failed)):
        said.append(f"{len(failed)} times its code failed ({_brief(failed[-1]['why']).rstrip('.')})")
    if outcome.ended and outcome.ended.error:
        said.append(outcome.ended.error)
    return said


def _brief(why: str) -> str:
    """What foreign code said may be long, and ends with where it failed; the log has all of it."""
    return shortened(why, LONGEST_WHY)


def _mixed(outcome: Outcome) -> bool:
    """Whether some group has successes and failures: not only different scores."""
    return any(0 < outcome.correct(group.scores) < len(group.scores) for group in outcome.groups)


SAMPLES = 2
LONGEST = 2000  # characters of each text of a sample

IN_CHARACTERS = "The base model '{model}' is not here: prompts were counted in characters, not in its tokens."


def report(folder: TestFolder, request: Request, status: str) -> dict[str, Any]:
    """The answer that the files of the test give now."""
    outcomes = [read_outcome(folder, request, candidate) for candidate in request.candidates]
    verdicts = [judge_prompts(outcome) if request.prompts else judge(outcome) for outcome in outcomes]
    told, verdict = _deciding(request, outcomes, verdicts)
    odd = read_odd_answers(folder)
    why = "; ".join([verdict.why.rstrip("."), *odd_caveats(odd, request.success_above)]) + "."
    return {
        "status": status,
        "test_id": request.test_id,
        "environment": request.environment,
        "environment_file": request.environment_file,
        "draft": request.draft,
        "test_config": _config(request),
        "models_tested": [
            _facts(outcome, judged, alone=len(outcomes) == 1)
            for outcome, judged in zip(outcomes, verdicts, strict=True)
        ],
        "summary": {
            **_summary(folder, request, outcomes),
            **({"odd_answers": odd} if odd else {}),
            "trainable": verdict.trainable,
            "why": why if odd else verdict.why,
        },
        **({"responses": _responses(outcomes)} if request.prompts else {"samples": _samples(told)}),
        **({"note": IN_CHARACTERS.format(model=request.base_model)} if request.counts_characters else {}),
        "next": verdict.next,
    }


def _config(request: Request) -> dict[str, Any]:
    each = request.rollouts
    total = each * len(request.candidates)
    if request.prompts:
        return {"num_steps": len(request.prompts), "group_size": 1, "rollouts_per_model": each, "total_rollouts": total}
    steps = {"num_steps": request.num_steps, "group_size": request.group_size}
    return {**steps, "rollouts_per_model": each, "total_rollouts": total}


def _facts(outcome: Outcome, verdict: Verdict, *, alone: bool) -> dict[str, Any]:
    """Of the only model the summary tells why."""
    told = {**outcome.facts(), "trainable": verdict.trainable}
    return told if alone else {**told, "verdict": verdict.why}


def _deciding(request: Request, outcomes: list[Outcome], verdicts: list[Verdict]) -> tuple[Outcome, Verdict]:
    """The model that would be trained decides; where it was not tested, the one whose rewards vary most."""
    pairs = list(zip(outcomes, verdicts, strict=True))
    trained = [pair for pair in pairs if pair[0].candidate.model == LOCAL + request.base_model]
    outcome, verdict = (trained or sorted(pairs, key=lambda pair: pair[0].varied or -1.0, reverse=True))[0]
    if len(pairs) == 1 and trained:
        return outcome, verdict
    return outcome, Verdict(verdict.trainable, f"{outcome.candidate.model}: {verdict.why}", verdict.next)


def _summary(folder: TestFolder, request: Request, outcomes: list[Outcome]) -> dict[str, Any]:
    working = [outcome for outcome in outcomes if outcome.completions]
    accuracies = {outcome.candidate.model: outcome.facts()["accuracy"] for outcome in working}
    return {
        "steps_requested": _config(request)["num_steps"],
        "models_tested": len(outcomes),
        "models_succeeded": len(working),
        "best_model": max(accuracies, key=lambda model: accuracies[model]) if accuracies else None,
        "avg_accuracy": round(sum(accuracies.values()) / len(accuracies), 3) if accuracies else 0,
        "environment_working": bool(working),
        "output_directory": str(folder.path),
    }


def _samples(outcome: Outcome) -> list[dict[str, Any]]:
    """Groups to look at: those whose answers differ first."""
    answered = [(step, group) for step, group in enumerate(outcome.groups, 1) if group.answers]
    return [_sample(*one) for one in sorted(answered, key=lambda one: not one[1].varies)[:SAMPLES]]


def _sample(step: int, group: Group) -> dict[str, Any]:
    """A group's best and worst answer; its scores are among the model's steps."""
    ranked = sorted(range(len(group.scores)), key=lambda place: group.scores[place])
    best = group.answers[ranked[-1]]
    worst = next((group.answers[place] for place in ranked if group.answers[place] != best), best)
    texts = {"prompt": group.prompt, "best": best, "worst": worst}
    texts |= {"reference": group.reference} if group.reference else {}
    return {"step": step, **{name: shortened(text, LONGEST) for name, text in texts.items()}}


def _responses(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    several = len(outcomes) > 1
    return [
        {**({"model": outcome.candidate.model} if several else {}), **row}
        for outcome in outcomes
        for row in outcome.responses
    ]


BUDGET = 900 * 4  # characters of compact JSON: spec/agent-tools.md 4.8
Body = dict[str, Any]


def brief(body: Body) -> Body:
    """The answer, cut as far as it must be: words first, then scores, then steps, then samples."""
    told = copy.deepcopy(Redactor.of_this_process().json(body))  # half of a secret would not be known as one
    for cutting in (_long_texts, _verdicts, _scores, _texts, _steps, _short_texts, _one_sample, _printed, _paths):
        if _fits(told):
            break
        cutting(told)
    return told


def _fits(body: Body) -> bool:
    return len(json.dumps(body, separators=(",", ":"), ensure_ascii=False)) <= BUDGET


def _long_texts(body: Body) -> None:
    _shorten(body, 240, shortened)


def _texts(body: Body) -> None:
    _shorten(body, 120, shortened)


def _short_texts(body: Body) -> None:
    _shorten(body, 40, _cut)


def _shorten(body: Body, length: int, by: Callable[[str, int], str]) -> None:
    """Cut what models and environments said; of what was printed the end counts."""
    for one in (*body.get("samples", ()), *body.get("responses", ())):
        one.update({name: by(text, length) for name, text in one.items() if isinstance(text, str)})
    for one in body["models_tested"]:
        one.update({name: one[name][-length:] for name in ("stdout", "stderr") if name in one})
        one.update({name: _cut(one[name], 2 * length) for name in ("why", "verdict") if name in one})


def _verdicts(body: Body) -> None:
    """The summary has the one that counts."""
    for one in body["models_tested"]:
        one.pop("verdict", None)


def _scores(body: Body) -> None:
    for step in (step for model in body["models_tested"] for step in model["steps"]):
        step.pop("scores", None)
    _note(body, "scores")


def _steps(body: Body) -> None:
    for one in body["models_tested"]:
        one["steps"] = []
    _note(body, "steps")


def _one_sample(body: Body) -> None:
    """As few as must be, and one at least."""
    for name in ("samples", "responses"):
        while len(body.get(name, ())) > 1 and not _fits(body):
            body[name].pop()
            _note(body, name)


def _printed(body: Body) -> None:
    """The log file has it."""
    for one in body["models_tested"]:
        one.pop("stdout", None)
        one.pop("stderr", None)


def _paths(body: Body) -> None:
    """The summary names their folder; what is told of an error lies there too."""
    for one in body["models_tested"]:
        one["output_file"] = one["output_file"].rpartition("/")[2]
        one.pop("log_file", None)
        one.pop("why", None)


def _note(body: Body, what: str) -> None:
    noted = [*body.get("left_out", {}).get("what", ()), what]
    body["left_out"] = {"what": list(dict.fromkeys(noted)), "where": "each model's output_file"}


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
