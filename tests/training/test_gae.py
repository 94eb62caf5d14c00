"""Generalised advantage estimation against definitions written out anew, in float64.

The references know nothing of arrays over a batch: they take one episode as a list of turns, and
sum the terms of each definition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from halteres.training.advantages import standardised
from halteres.training.datums import to_sequences
from halteres.training.gae import (
    SampledTokens,
    TokenValues,
    estimate_tokens,
    sampled_tokens,
    token_rewards,
    turn_means,
)
from halteres.training.turns import turns_of
from halteres.types import Batch, Group, Span


@dataclass(frozen=True)
class Episode:
    """As the references read it: for each turn the values of its tokens, and its reward."""

    values: list[list[float]]
    rewards: list[float]
    penalties: list[list[float]]


def random_episodes(seed: int, count: int) -> list[Episode]:
    random = np.random.default_rng(seed)
    found: list[Episode] = []
    for _ in range(count):
        lengths = random.integers(1, 5, random.integers(1, 5)).tolist()
        found.append(
            Episode(
                values=[random.normal(size=n).tolist() for n in lengths],
                rewards=random.normal(size=len(lengths)).tolist(),
                penalties=[random.normal(0, 0.1, n).tolist() for n in lengths],
            )
        )
    return found


def batch_of(episodes: Sequence[Episode], *, apart: bool = False) -> Batch:
    """The episodes as one group: two tokens of context before each turn. `apart`: a sequence for
    each turn.
    """
    rows: list[list[float]] = []
    spans: list[Span] = []
    owners: list[int] = []
    for number, episode in enumerate(episodes):
        for turn, values in enumerate(episode.values):
            if apart or turn == 0:
                rows.append([])
                owners.append(number)
            row = rows[-1]
            row += [1.0, 1.0]
            start = len(row)
            row += [-0.5] * len(values)
            place = {"sequence": len(rows) - 1, "start": start, "stop": len(row)}
            spans.append(Span(**place, reward=episode.rewards[turn]))
    tokens = tuple(tuple(range(len(row))) for row in rows)
    group = Group(
        tokens=tokens,
        masks=tuple(
            tuple(-100 if lp == 1.0 else t for t, lp in zip(one, row, strict=True))
            for one, row in zip(tokens, rows, strict=True)
        ),
        scores=tuple(sum(episodes[owner].rewards) for owner in owners),
        logprobs=tuple(tuple(row) for row in rows),
        versions=((0, 0),) * len(rows),
        episodes=tuple(owners),
        spans=tuple(spans),
    )
    return Batch(groups=(group,))


def reference(
    episode: Episode, discount: float, decay: float
) -> tuple[list[float], list[float], list[float]]:
    """Advantages, returns and temporal differences of an episode: A = Σ (Π of γ and λ) δ."""
    places = [(turn, i) for turn, own in enumerate(episode.values) for i in range(len(own))]
    values = [episode.values[turn][i] for turn, i in places]
    paid = [
        -episode.penalties[turn][i]
        + (episode.rewards[turn] if i == len(episode.values[turn]) - 1 else 0.0)
        for turn, i in places
    ]

    def step(m: int) -> float:
        """γ between token m and the next."""
        return discount if places[m][0] != places[m + 1][0] else 1.0

    last = len(places) - 1
    deltas = [
        paid[m] - values[m] + (step(m) * values[m + 1] if m < last else 0.0)
        for m in range(last + 1)
    ]
    advantages = [
        math.fsum(
            deltas[later] * decay ** (later - m) * math.prod(step(i) for i in range(m, later))
            for later in range(m, last + 1)
        )
        for m in range(last + 1)
    ]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)], paid


def estimated(
    episodes: Sequence[Episode], discount: float, decay: float, **how: Any
) -> tuple[TokenValues, np.ndarray]:
    """By the module, and the rewards that it was given."""
    batch = batch_of(episodes, **how)
    turns, sequences = turns_of(batch), to_sequences(batch, needs_logprobs=True)
    tokens = sampled_tokens(turns, sequences, 2048)
    penalties = [p for e in episodes for own in e.penalties for p in own]
    rewards_M = token_rewards(tokens, turns, discount) - np.array(penalties)
    values_M = np.array([v for e in episodes for own in e.values for v in own])
    found = estimate_tokens(tokens, rewards_M, values_M, discount=discount, decay=decay)
    return found, rewards_M


@pytest.mark.parametrize("apart", [False, True], ids=["one sequence", "a sequence per turn"])
@pytest.mark.parametrize(("discount", "decay"), [(1, 0.95), (0.9, 0.95), (0.7, 0), (0.5, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_advantages_and_returns_are_the_sums_of_their_definition(
    seed: int, discount: float, decay: float, apart: bool
) -> None:
    episodes = random_episodes(seed, 7)
    found, rewards_M = estimated(episodes, discount, decay, apart=apart)
    expected = [reference(episode, discount, decay) for episode in episodes]
    for name, column in (("advantages_M", 0), ("returns_M", 1)):
        whole = [x for one in expected for x in one[column]]
        np.testing.assert_allclose(getattr(found, name), whole, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(rewards_M, [x for one in expected for x in one[2]], atol=1e-12)


def test_with_lambda_1_the_returns_are_the_discounted_rewards_whatever_the_values() -> None:
    episodes = random_episodes(5, 6)
    found, _ = estimated(episodes, 0.8, 1.0)
    whole: list[float] = []
    for one in episodes:
        paid = [r - sum(p) for r, p in zip(one.rewards, one.penalties, strict=True)]
        for turn, penalties in enumerate(one.penalties):
            later = sum(0.8 ** (u - turn) * paid[u] for u in range(turn + 1, len(paid)))
            whole += [one.rewards[turn] - sum(penalties[i:]) + later for i in range(len(penalties))]
    np.testing.assert_allclose(found.returns_M, whole, atol=1e-12)


def test_a_perfect_critic_explains_all_and_a_constant_one_nothing() -> None:
    episodes = random_episodes(6, 6)
    first, rewards_M = estimated(episodes, 0.9, 1.0)
    tokens = first.tokens
    how = {"discount": 0.9, "decay": 1.0}
    perfect = estimate_tokens(tokens, rewards_M, first.returns_M, **how)
    constant = estimate_tokens(tokens, rewards_M, np.full(len(tokens), 3.0), **how)
    np.testing.assert_allclose(perfect.advantages_M, 0, atol=1e-12)
    assert perfect.explained_variance == pytest.approx(1.0)
    assert constant.explained_variance == pytest.approx(0.0, abs=1e-12)
    residuals = [r - v for r, v in zip(first.returns_M, first.values_M, strict=True)]

    def variance(numbers: Sequence[float]) -> float:
        mean = math.fsum(numbers) / len(numbers)
        return math.fsum((x - mean) ** 2 for x in numbers) / len(numbers)

    by_hand = 1 - variance(residuals) / variance(first.returns_M.tolist())
    assert first.explained_variance == pytest.approx(by_hand, rel=1e-12)


def test_where_all_returns_are_equal_no_variance_is_explained() -> None:
    equal = Episode(values=[[0.3, 0.1]], rewards=[1.0], penalties=[[0.0, 0.0]])
    found, _ = estimated([equal, equal], 1.0, 1.0)
    assert found.explained_variance is None


def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_tokens_of_a_batch() -> None:
    found, _ = estimated(random_episodes(8, 9), 0.9, 0.95)
    raw = found.advantages_M.tolist()
    mean = math.fsum(raw) / len(raw)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in raw) / (len(raw) - 1))
    np.testing.assert_allclose(
        standardised(found.advantages_M), [(x - mean) / deviation for x in raw], rtol=1e-12
    )


def test_context_and_sequences_that_are_too_long_are_skipped() -> None:
    """The reward of a turn that is too long falls on the token before it, one turn earlier."""
    long = Episode(
        values=[[0.0, 0.0], [0.0] * 9, [0.0]],
        rewards=[0.0, 4.0, 1.0],
        penalties=[[0.0] * 2, [0.0] * 9, [0.0]],
    )
    batch = batch_of([long], apart=True)
    turns, sequences = turns_of(batch), to_sequences(batch, needs_logprobs=True)
    tokens = sampled_tokens(turns, sequences, 8)
    assert tokens.row_M.tolist() == [1, 2, 1], "row i predicts token i + 1; two of context"
    assert tokens.turn_M.tolist() == [0, 0, 2]
    rewards_M = token_rewards(tokens, turns, 0.5)
    assert rewards_M.tolist() == [0.0, 2.0, 1.0]
    found = estimate_tokens(tokens, rewards_M, np.zeros(3), discount=0.5, decay=1.0)
    assert found.returns_M.tolist() == [2.25, 2.25, 1.0], "the third turn is two turns later"


def test_an_episode_that_begins_with_a_turn_without_tokens_is_paid_at_its_first() -> None:
    one = Episode(values=[[0.0], [0.0]], rewards=[3.0, 0.0], penalties=[[0.0], [0.0]])
    batch = batch_of([one, one])
    turns, sequences = turns_of(batch), to_sequences(batch, needs_logprobs=True)
    whole = sampled_tokens(turns, sequences, 64)
    kept = np.array([0, 1, 3])
    tokens = SampledTokens(
        inputs_S=whole.inputs_S,
        sequence_M=whole.sequence_M[kept],
        row_M=whole.row_M[kept],
        turn_M=whole.turn_M[kept],
        episode_M=whole.episode_M[kept],
    )
    assert token_rewards(tokens, turns, 0.5).tolist() == [3.0, 0.0, 3.0]


def test_an_empty_batch_has_no_tokens() -> None:
    turns = turns_of(Batch(groups=()))
    tokens = sampled_tokens(turns, (), 64)
    assert len(tokens) == 0
    found = estimate_tokens(tokens, np.zeros(0), np.zeros(0), discount=0.9, decay=0.9)
    assert found.advantages_M.tolist() == [] and found.explained_variance is None
    assert token_rewards(tokens, turns, 1.0).tolist() == []


def test_numbers_of_tokens_are_spread_over_their_sequences_and_their_mean_is_a_turns() -> None:
    episodes = random_episodes(3, 3)
    batch = batch_of(episodes)
    turns, sequences = turns_of(batch), to_sequences(batch, needs_logprobs=True)
    tokens = sampled_tokens(turns, sequences, 64)
    numbers_M = np.arange(1.0, len(tokens) + 1)
    spread = tokens.spread(numbers_M)
    for one, sequence in zip(spread, sequences, strict=True):
        assert ((one[1:] != 0) == sequence.actions_N).all()
    assert np.concatenate([one[one != 0] for one in spread]).tolist() == numbers_M.tolist()
    np.testing.assert_array_equal(tokens.at_tokens(spread), numbers_M)
    means = turn_means(tokens, numbers_M, len(turns.rewards_K))
    first = len(episodes[0].values[0])
    assert means[0] == pytest.approx((first + 1) / 2)
