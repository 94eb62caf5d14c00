"""The whole answer to a test: what result.json holds, and what an unfinished test has so far.

Owns: the seeds' keys of the answer and ours; which model's verdict is the test's; which answers are shown as samples.
Never: cuts anything but samples (`brief`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halteres.agent.shortening import shortened
from halteres.agent.trial.folder import TestFolder
from halteres.agent.trial.outcome import Group, Outcome
from halteres.agent.trial.reading import read_odd_answers, read_outcome
from halteres.agent.trial.request import LOCAL, Request
from halteres.agent.trial.scoring import odd_caveats
from halteres.agent.trial.verdict import Verdict, judge, judge_prompts

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
