"""Every loss beside the same formula in float64 numpy, gradient included."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from halteres.rewards import RewardConfig
from halteres.rewards.preferences import Comparison
from halteres.rewards.torch.losses import comparison_loss, plackett_luce

Formula = Any


def ranked(ranks: tuple[int, ...], **more: float) -> Comparison:
    return Comparison(completions=("",) * len(ranks), ranks=ranks, **more)  # type: ignore[arg-type]


BATCH = (
    ranked((0, 1), margin=0.5, weight=2.0),
    ranked((1, 0), weight=0.5),
    ranked((2, 0, 1, 3), weight=1.5),
    ranked((0, 0)),
    ranked((0, 1, 1, 2), weight=0.25),
)
SCORES = np.random.default_rng(0).normal(0, 2, sum(len(one.ranks) for one in BATCH))


def log_s(x: float) -> float:
    return -np.logaddexp(0.0, -x)


def reference(scores: np.ndarray, settings: RewardConfig, threshold: float | None = None) -> float:
    """The formulas as they stand in the specification, pair by pair."""
    total, start, e = 0.0, 0, settings.label_smoothing
    for one in BATCH:
        own = scores[start : start + len(one.ranks)]
        start += len(one.ranks)
        found: list[float] = []
        for a, b in combinations(range(len(own)), 2):
            if one.ranks[a] == one.ranks[b]:
                d = own[a] - own[b]
                if settings.tie_policy == "drop":
                    continue
                if threshold is None:
                    loss = -0.5 * log_s(d) - 0.5 * log_s(-d)
                else:
                    loss = -np.log(1 - np.exp(log_s(d - threshold)) - np.exp(log_s(-d - threshold)))
            else:
                if one.ranks[a] > one.ranks[b]:
                    a, b = b, a
                z = own[a] - own[b] - one.margin - (threshold or 0.0)
                loss = -(1 - e) * log_s(z) - e * log_s(-z)
            found.append(
                loss + (settings.center_rewards_coefficient or 0.0) * (own[a] + own[b]) ** 2
            )
        total += one.weight * float(np.mean(found)) if found else 0.0
    return total


def gradient(function: Formula, at: np.ndarray) -> np.ndarray:
    steps = np.eye(len(at)) * 1e-6
    return np.array([(function(at + step) - function(at - step)) / 2e-6 for step in steps])


@pytest.mark.parametrize(
    "settings",
    [
        RewardConfig(),
        RewardConfig(label_smoothing=0.1),
        RewardConfig(center_rewards_coefficient=0.01),
        RewardConfig(tie_policy="drop", label_smoothing=0.05, center_rewards_coefficient=0.1),
    ],
)
def test_the_pair_loss_is_its_formula(settings: RewardConfig) -> None:
    """Margin, weights, smoothing, centring, all pairs of a ranking over their number, ties at 1/2
    or dropped.
    """
    scores = torch.tensor(SCORES, dtype=torch.float64, requires_grad=True)
    loss = comparison_loss(scores, BATCH, settings)
    loss.backward()
    assert loss.item() == pytest.approx(reference(SCORES, settings), rel=1e-6)
    assert scores.grad is not None
    np.testing.assert_allclose(
        scores.grad.numpy(),
        gradient(lambda at: reference(at, settings), SCORES),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.parametrize("value", [0.05, 0.7, 3.0])
def test_rao_kupper_learns_how_close_a_tie_is(value: float) -> None:
    settings = RewardConfig(tie_policy="rao_kupper")
    scores = torch.tensor(SCORES, dtype=torch.float64, requires_grad=True)
    threshold = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    loss = comparison_loss(scores, BATCH, settings, threshold)
    loss.backward()
    assert loss.item() == pytest.approx(reference(SCORES, settings, value), rel=1e-6)
    assert threshold.grad is not None
    expected = gradient(lambda at: reference(SCORES, settings, float(at[0])), np.array([value]))
    assert threshold.grad.item() == pytest.approx(expected[0], rel=1e-4)


def test_plackett_luce_is_the_chance_of_the_order() -> None:
    scores = torch.tensor([0.3, -1.2, 2.0, 0.5], dtype=torch.float64)
    e = np.exp(scores.numpy())
    chance = e[2] / e.sum() * e[0] / (e[0] + e[1] + e[3]) * e[3] / (e[1] + e[3])
    assert plackett_luce(scores, (1, 3, 0, 2)).item() == pytest.approx(
        -np.log(chance) / 3, rel=1e-9
    )


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0), (0, 0)])
def test_plackett_luce_of_two_is_the_pair_loss(ranks: tuple[int, ...]) -> None:
    scores = torch.tensor([0.4, -0.9], dtype=torch.float64)
    pair = comparison_loss(scores, [ranked(ranks)], RewardConfig())
    assert plackett_luce(scores, ranks).item() == pytest.approx(pair.item(), rel=1e-6)


def test_rankings_are_scored_by_plackett_luce_where_asked_and_pairs_as_ever() -> None:
    settings = RewardConfig(listwise_loss="plackett_luce")
    scores = torch.tensor(SCORES, dtype=torch.float64)
    parts = scores.split([len(one.ranks) for one in BATCH])
    expected = sum(
        one.weight * plackett_luce(part, one.ranks).item()
        if len(one.ranks) > 2
        else comparison_loss(part, [one], RewardConfig()).item()
        for part, one in zip(parts, BATCH, strict=True)
    )
    assert comparison_loss(scores, BATCH, settings).item() == pytest.approx(expected, rel=1e-6)


def test_far_leads_give_finite_losses_and_gradients() -> None:
    scores = torch.tensor([400.0, -400.0, -400.0, 400.0], requires_grad=True)
    rows = [ranked((0, 1)), ranked((0, 0))]
    for threshold in (None, torch.tensor(1e-3)):
        loss = comparison_loss(scores, rows, RewardConfig(tie_policy="rao_kupper"), threshold)
        loss.backward()
        assert torch.isfinite(loss)
        assert scores.grad is not None
        assert torch.isfinite(scores.grad).all()
