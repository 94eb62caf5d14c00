"""Advantages: every estimator against its formula in float64, silent where there is nothing to
learn.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from halteres.config.settings import Estimator
from halteres.errors import InvalidData
from halteres.training.advantages import ESTIMATORS, centred, estimate, is_degenerate, standardised
from halteres.training.turns import Turns, returns, state_differences, turns_of
from halteres.types import Batch, Group, Span

from .fakes import batch

Episodes = list[list[float]]
"""Rewards of the turns of each episode."""


def episodes(
    *groups: Episodes, masked: tuple[tuple[int, int], ...] = (), env_ids: tuple[int, ...] = ()
) -> Batch:
    """Groups of episodes: one sequence each, of a context token and an action token per turn."""
    made: list[Group] = []
    for number, group in enumerate(groups):
        lengths = [len(rewards) for rewards in group]
        spans = [
            Span(sequence=e, start=2 * t + 1, stop=2 * t + 2, reward=reward)
            for e, rewards in enumerate(group)
            for t, reward in enumerate(rewards)
        ]
        made.append(
            Group(
                tokens=tuple((1, 2) * length for length in lengths),
                masks=tuple((-100, 2) * length for length in lengths),
                scores=tuple(math.fsum(rewards) for rewards in group),
                logprobs=tuple((1.0, -0.5) * length for length in lengths),
                versions=((0, 0),) * len(group),
                overrides=tuple(
                    {"set_advantage_to_zero": (number, e) in masked} for e in range(len(group))
                ),
                episodes=tuple(range(len(group))),
                spans=tuple(spans),
                env_id=env_ids[number] if env_ids else None,
            )
        )
    return Batch(groups=tuple(made))


def random_groups(seed: int) -> tuple[Episodes, ...]:
    rng = np.random.default_rng(seed)
    return tuple(
        [rng.choice([0.0, -0.1, 0.5, 1.0], size=rng.integers(1, 6)).tolist() for _ in range(4)]
        for _ in range(6)
    )


def by_hand(
    groups: tuple[Episodes, ...], estimator: Estimator, gamma: float, env_ids: tuple[int, ...]
) -> list[float]:
    """The table of `training.advantages`, written out once more, number by number."""
    found: list[tuple[int, int, int, float]] = []  # group, episode, turn, return
    for g, group in enumerate(groups):
        for e, rewards in enumerate(group):
            for t in range(len(rewards)):
                found.append(
                    (g, e, t, sum(gamma ** (u - t) * rewards[u] for u in range(t, len(rewards))))
                )
    every = [value for *_, value in found]

    def deviation(values: list[float]) -> float:
        mean = math.fsum(values) / len(values)
        return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(values)

    def one(g: int, e: int, t: int, value: float) -> float:
        scores = [math.fsum(rewards) for rewards in groups[g]]
        others = scores[:e] + scores[e + 1 :]
        match estimator:
            case "group_mean":
                return scores[e] - mean(scores)
            case "group_std":
                return (
                    (scores[e] - mean(scores)) / deviation(scores) if len(set(scores)) > 1 else 0.0
                )
            case "rloo":
                return scores[e] - mean(others)
            case "reinforce":
                return value
            case "rebn":
                return (value - mean(every)) / deviation(every)
            case "rebn_per_environment":
                same = [v for gg, _, _, v in found if env_ids[gg] == env_ids[g]]
                return (value - mean(same)) / deviation(same)
            case "rebn_leave_one_out":
                rest = [v for gg, ee, _, v in found if (gg, ee) != (g, e)]
                return (value - mean(rest)) / deviation(every)
            case "turn_mean":
                level = [v for gg, _, tt, v in found if (gg, tt) == (g, t)]
                return value - mean(level) if len(level) > 1 else 0.0

    return [one(*each) for each in found]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("seed", range(5))
def test_every_estimator_is_its_formula(estimator: Estimator, seed: int) -> None:
    groups, env_ids = random_groups(seed), (0, 1, 0, 1, 1, 0)
    found = estimate(turns_of(episodes(*groups, env_ids=env_ids)), estimator, 0.9)
    assert found.tolist() == pytest.approx(by_hand(groups, estimator, 0.9, env_ids), abs=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_masked_episode_is_out_of_its_baseline_and_gets_nothing(estimator: Estimator) -> None:
    groups = random_groups(1)
    without = tuple(
        [episode for e, episode in enumerate(group) if (g, e) != (2, 1)]
        for g, group in enumerate(groups)
    )
    turns = turns_of(episodes(*groups, masked=((2, 1),)))
    found = estimate(turns, estimator, 0.9)
    assert not found[turns.masked_K].any() and turns.masked_K.sum() == len(groups[2][1])
    assert found[~turns.masked_K].tolist() == pytest.approx(
        estimate(turns_of(episodes(*without)), estimator, 0.9).tolist(), abs=1e-12
    )


@pytest.mark.parametrize("score", [0.0, 1.0, -0.1, 0.7, 0.81, 1e-9, 1e6 + 0.1])
@pytest.mark.parametrize("estimator", [each for each in ESTIMATORS if each != "reinforce"])
def test_equal_rewards_move_nothing_and_nothing_divides_by_zero(
    score: float, estimator: Estimator
) -> None:
    """The multi-turn seed divides rounding noise by rounding noise here."""
    with np.errstate(all="raise"):
        assert not estimate(turns_of(batch([score] * 16)), estimator).any()


def test_values_that_are_equal_in_float32_only_up_to_rounding_move_nothing() -> None:
    values = np.full(16, -0.1, dtype=np.float32).astype(np.float64)
    values[3] = np.nextafter(np.float32(-0.1), np.float32(0))
    assert is_degenerate(values)
    assert not standardised(values).any() and not centred(values).any()


@pytest.mark.parametrize("estimator", [each for each in ESTIMATORS if each != "reinforce"])
def test_a_single_turn_moves_nothing(estimator: Estimator) -> None:
    """One value has no deviation; the multi-turn seed makes NaN of it and poisons the weights."""
    assert estimate(turns_of(batch([0.5])), estimator).tolist() == [0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_or_reward_that_is_not_finite_is_refused_with_its_place(bad: float) -> None:
    with pytest.raises(InvalidData, match=r"Sequence 2 of group 1 has the score (nan|-?inf)\."):
        turns_of(batch([0.0, 1.0], [0.0, 1.0, bad]))
    spoilt = episodes([[0.0], [1.0]])
    (group,) = spoilt.groups
    wrong: Any = Group(
        **{name: getattr(group, name) for name in group.__slots__ if name != "spans"},
        spans=(Span(sequence=1, start=1, stop=2, reward=bad),),
    )
    with pytest.raises(
        InvalidData, match=r"A turn of sequence 1 of group 0 has the reward (nan|-?inf)\."
    ):
        turns_of(Batch(groups=(wrong,)))


def test_returns_are_discounted_within_an_episode_alone() -> None:
    turns = turns_of(episodes([[1.0, 0.0, 2.0], [4.0]]))
    assert returns(turns, 0.5).tolist() == [1.5, 1.0, 2.0, 4.0]


def test_values_of_states_become_what_each_turn_added() -> None:
    turns = state_differences(turns_of(episodes([[0.25, 0.5, 0.125], [0.5, 1.0]])))
    assert turns.rewards_K.tolist() == [0.25, 0.25, -0.375, 0.5, 0.5]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_returns_of_state_differences_are_the_discounted_values_ahead_less_the_value_reached(
    gamma: float,
) -> None:
    """Per-turn credit: with discount 1 the last state's value less the one before the turn, with 0
    the turn's own gain.

    By hand: sum over u >= t of gamma^(u - t) * (v_u - v_(u-1)), with 0 before the first turn.
    """
    groups = random_groups(3)
    turns = state_differences(turns_of(episodes(*groups)))
    expected = [
        math.fsum(
            gamma ** (u - t) * (values[u] - (values[u - 1] if u else 0.0))
            for u in range(t, len(values))
        )
        for group in groups
        for values in group
        for t in range(len(values))
    ]
    found = returns(turns, gamma)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    assert estimate(turns, "reinforce", gamma).tolist() == found.tolist()


def test_an_episode_of_several_sequences_has_its_turns_together_and_one_score() -> None:
    """The wire lists spans in order of time; two episodes that ran side by side are told apart by
    their sequences.
    """
    group = Group(
        tokens=((1, 2), (1, 2), (1, 2)),
        masks=((-100, 2),) * 3,
        scores=(1.0, 1.0, 0.0),
        logprobs=((1.0, -0.5),) * 3,
        versions=(),
        episodes=(0, 0, 1),
        spans=tuple(
            Span(sequence=s, start=1, stop=2, reward=r) for s, r in ((0, 0.25), (2, 0.0), (1, 0.75))
        ),
    )
    turns: Turns = turns_of(Batch(groups=(group, group)))
    assert turns.episode_K.tolist() == [0, 0, 1, 2, 2, 3]
    assert turns.rewards_K.tolist() == [0.25, 0.75, 0.0] * 2
    assert [span.sequence for span in turns.spans_K] == [0, 1, 2, 3, 4, 5]
    assert turns.scores_E.tolist() == [1.0, 0.0, 1.0, 0.0] and turns.group_E.tolist() == [
        0,
        0,
        1,
        1,
    ]


def test_a_sequence_without_spans_is_one_turn_that_earns_its_score_at_the_end_of_its_episode() -> (
    None
):
    group = Group(
        tokens=((1, 2, 1, 2, 1), (1, 2)),
        masks=((-100, 2, -100, 2, -100), (-100, 2)),
        scores=(0.5, 0.5),
        logprobs=((1.0, -0.5, 1.0, -0.5, 1.0), (1.0, -0.5)),
        versions=(),
        episodes=(0, 0),
    )
    turns = turns_of(Batch(groups=(group,)))
    assert [(span.start, span.stop, span.reward) for span in turns.spans_K] == [
        (1, 4, 0.0),
        (1, 2, 0.5),
    ]
