"""The rules of drift: each speaks after several steps in a row, and is silent about what chance
does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from halteres.config.settings import TrainerSettings

from .test_diagnosis import CASE, rows, the_one, told

Figures = dict[str, Any]


def of_environment(steps: int, **figures: Any) -> Iterator[Figures]:
    return ({"step": step, "src": "env", **figures} for step in range(1, steps + 1))


BASE: Figures = {
    "step": 0,
    "src": "eval",
    "eval/reward/rm/disagreement": 0.2,
    "eval/reward/rm/disagreement_q95": 0.5,
}


def test_an_ensemble_further_apart_than_on_the_base_models_answers_is_told() -> None:
    alert = the_one([BASE, *of_environment(6, **{"reward/rm/disagreement": 0.6})])
    assert (alert.rule, alert.step) == ("ensemble_disagrees", 3)
    assert alert.evidence.startswith(
        "The members of 'rm' are 0.6 apart, 3 steps in a row above 0.5"
    )


def test_an_ensemble_is_measured_against_the_first_evaluation_alone() -> None:
    apart = {"reward/rm/disagreement": 0.6}
    assert told(of_environment(6, **apart)) == [], "nothing is known of the base model yet"
    later = {**BASE, "step": 20, "eval/reward/rm/disagreement_q95": 0.9}
    assert [alert.rule for alert in told([BASE, later, *of_environment(6, **apart)])] == [
        "ensemble_disagrees"
    ]
    assert told([BASE, *of_environment(2, **apart)]) == []
    assert told([BASE, *of_environment(6, **{"reward/rm/disagreement": 0.49})]) == []


def test_members_that_agreed_on_every_answer_of_the_base_model_have_a_limit_too() -> None:
    agreed = {**BASE, "eval/reward/rm/disagreement_q95": 0.0}
    assert (
        the_one([agreed, *of_environment(6, **{"reward/rm/disagreement": 0.6})]).rule
        == "ensemble_disagrees"
    )
    assert told([agreed, *of_environment(6, **{"reward/rm/disagreement": 0.0})]) == []


def test_an_ensemble_that_counts_its_worst_member_already_is_not_told_to() -> None:
    given = [BASE, *of_environment(6, **{"reward/rm/disagreement": 0.6})]
    worst = {"name": "rm", "model": "a,b", "combination": "min"}
    assert "combination: min" in str(the_one(given).remedy)
    assert "train its members" in str(
        the_one(given, replace(CASE, env={**CASE.env, "rewards": [worst]})).remedy
    )


def test_scores_beyond_the_calibrated_ones_are_told_with_the_model_that_gave_them() -> None:
    alert = the_one(
        of_environment(6, **{"reward/rm/out_of_range": 0.4, "reward/other/out_of_range": 0.1})
    )
    assert (alert.rule, alert.step) == ("scores_out_of_range", 3)
    assert alert.evidence.startswith("40% of the scores of 'rm'")
    assert told(of_environment(6, **{"reward/rm/out_of_range": 0.15})) == []


LEARNED = replace(CASE, env={**CASE.env, "rewards": [{"name": "rm", "model": "reward-model"}]})


def growing(correlation: float | None, longer: float = 2.5) -> Iterator[Figures]:
    length = {
        "tokens/action": lambda step: 900.0 if step < 5 else longer * 900,
        "sequences/count": 48.0,
    }
    return rows(20, **{"groups/length_correlation": correlation, **length})


def test_scores_that_follow_answers_as_they_grow_are_told() -> None:
    alert = the_one(growing(0.7), LEARNED)
    assert (alert.rule, alert.step) == ("reward_follows_length", 12)
    assert alert.evidence.startswith(
        "Longer answers score higher (rank correlation 0.70 within a group), and they are"
    )
    by_path = replace(CASE, env={**CASE.env, "reward_model_path": "reward-model"})
    assert the_one(growing(0.7), by_path).rule == "reward_follows_length"


def test_scores_that_follow_length_are_no_drift_where_answers_do_not_grow_or_a_verifier_scores() -> (
    None
):
    """On arithmetic, right answers are the longer ones from the first step on."""
    assert told(growing(0.9, longer=1.7), LEARNED) == []
    assert told(growing(0.9)) == []
    unpaid = replace(
        CASE, env={**CASE.env, "rewards": [{"name": "rm", "model": "reward-model", "weight": 0.0}]}
    )
    assert told(growing(0.9), unpaid) == [], "the model has no say"
    assert told(growing(-0.9), LEARNED) == [] and told(growing(None), LEARNED) == []


def test_a_policy_beyond_its_budget_is_told_with_a_stronger_penalty() -> None:
    case = replace(CASE, trainer=TrainerSettings(kl_coef=0.02, kl_budget=0.1))
    alert = the_one(rows(6, **{"policy/kl_reference": 0.2}), case)
    assert (alert.rule, alert.step) == ("kl_over_budget", 3)
    assert '"trainer.kl_coef":0.04' in str(alert.remedy)
    assert told(rows(6, **{"policy/kl_reference": 0.09}), case) == []
    assert told(rows(6, **{"policy/kl_reference": 0.2})) == [], "no budget was given"


def test_a_budget_needs_a_divergence_that_is_measured() -> None:
    with pytest.raises(ValidationError, match="needs kl_coef above 0"):
        TrainerSettings(kl_budget=0.1)


def test_a_judge_that_often_fails_is_told_and_one_without_budget_is_not() -> None:
    alert = the_one(
        of_environment(
            6, **{"judge/style/read": 6, "judge/style/failed": 1, "judge/style/unreadable": 3}
        )
    )
    assert (alert.rule, alert.step) == ("judge_fails", 3)
    assert alert.evidence.startswith(
        "The judge of 'style' failed, or could not be read, for 40% of the questions"
    )
    assert told(of_environment(6, **{"judge/style/read": 9, "judge/style/failed": 1})) == []
    assert told(of_environment(6, **{"judge/style/over_budget": 9})) == []
