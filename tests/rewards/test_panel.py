"""Is the gain real? The share of it that the panel confirms, from the numbers of two
evaluations.
"""

from __future__ import annotations

from typing import Any

import pytest

from halteres.rewards.panel import divergences, shares, transfers


def evaluation(proxy: float, panel: float, **more: float) -> dict[str, Any]:
    row = {"step": 0, "eval/reward/total": proxy, "eval/reward/total_std": 2.0}
    return {**row, "eval/panel/other": panel, "eval/panel/other_std": 0.5, **more}


@pytest.mark.parametrize(
    ("proxy", "panel", "share", "is_low"),
    [
        (5.0, 1.0, 1.0, False),  # two standard deviations each
        (5.0, 0.5, 0.5, False),
        (5.0, 0.25, 0.25, True),
        (5.0, -0.5, -0.5, True),
        (1.5, 0.0, None, False),  # a quarter of a standard deviation is no gain to ask a share of
        (-3.0, -1.0, None, False),
    ],
)
def test_a_share_is_of_gains_in_the_bases_standard_deviations(
    proxy: float, panel: float, share: float | None, is_low: bool
) -> None:
    (found,) = transfers(evaluation(1.0, 0.0), evaluation(proxy, panel))
    assert (found.member, found.share, found.is_low) == ("other", share, is_low)


def test_what_cannot_be_compared_is_not_told() -> None:
    base = evaluation(1.0, 0.0)
    assert transfers({**base, "eval/panel/other_std": 0.0}, evaluation(5.0, 1.0)) == []
    assert transfers(base, {"eval/reward/total": 5.0}) == [], "its scorer was away"
    assert transfers({"eval/percent_correct": 0.5}, evaluation(5.0, 1.0)) == []
    assert transfers(base, {**evaluation(5.0, 1.0), "eval/panel/other": None}) == []


def test_what_a_members_value_is_made_of_is_no_member() -> None:
    """An ensemble whose members come to agree, and a criterion that fewer answers meet, contradict
    nothing.
    """
    parts = ("other/disagreement", "rubric/short", "rubric/correctness")
    spreads = {f"eval/panel/{part}_std": 0.1 for part in parts}
    base = evaluation(1.0, 0.0, **{f"eval/panel/{part}": 0.9 for part in parts}, **spreads)
    later = evaluation(5.0, 1.0, **{f"eval/panel/{part}": 0.1 for part in parts}, **spreads)
    assert [found.member for found in transfers(base, later)] == ["other"]


def test_presence_that_rises_while_correctness_falls_is_a_sign() -> None:
    def graded(presence: float, correctness: float) -> dict[str, Any]:
        names = {
            "eval/reward/rubric/presence": presence,
            "eval/reward/rubric/correctness": correctness,
        }
        return evaluation(1.0, 0.0, **names)

    (found,) = divergences(graded(0.4, 0.8), graded(0.9, 0.6))
    assert (found.component, round(found.presence, 3), round(found.correctness, 3)) == (
        "rubric",
        0.5,
        -0.2,
    )
    assert not list(divergences(graded(0.4, 0.8), graded(0.9, 0.79))), "within what chance does"
    assert not list(divergences(graded(0.4, 0.6), graded(0.9, 0.9)))


@pytest.mark.parametrize(("num_tasks", "is_sign"), [(4, False), (64, True)])
def test_a_small_move_of_few_answers_grades_may_be_chance(num_tasks: int, is_sign: bool) -> None:
    """Moves of .2 where grades spread by .4; two standard errors are .2 of 32 answers, .05 of
    512.
    """
    names = {"eval/reward/rubric/presence_std": 0.4, "eval/reward/rubric/correctness_std": 0.4}
    base = {"eval/reward/rubric/presence": 0.4, "eval/reward/rubric/correctness": 0.8, **names}
    later = {"eval/reward/rubric/presence": 0.6, "eval/reward/rubric/correctness": 0.6}
    count = {"eval/num_tasks": num_tasks, "eval/num_samples": 8}
    assert bool(list(divergences(base, {**later, **count}))) is is_sign


def test_each_member_and_the_worst_of_them_have_their_share_among_the_metrics() -> None:
    second = {"eval/panel/judge": 0.0, "eval/panel/judge_std": 1.0}
    base = evaluation(1.0, 0.0, **second)
    assert shares(base, base) == {}, "before there is a gain there is no share of one"
    later = {**evaluation(5.0, 0.25, **second), "eval/panel/judge": 1.5}
    found = shares(base, later)
    assert found == {
        "eval/panel/other/share_of_gain": 0.25,
        "eval/panel/judge/share_of_gain": 0.75,
        "eval/panel/share_of_gain": 0.25,
    }
    assert [one.member for one in transfers(base, {**later, **found})] == ["other", "judge"], (
        "shares are no members"
    )


@pytest.mark.parametrize(("num_tasks", "is_low"), [(2, False), (8, True)])
def test_a_low_share_of_few_answers_may_be_chance(num_tasks: int, is_low: bool) -> None:
    """Half a standard deviation less than half of the gain; two standard errors are .79 and .40 of
    one.
    """
    count = {"eval/num_tasks": num_tasks, "eval/num_samples": 8}
    (found,) = transfers(evaluation(1.0, 0.0), evaluation(5.0, 0.25, **count))
    assert (found.share, found.is_low) == (0.25, is_low)
