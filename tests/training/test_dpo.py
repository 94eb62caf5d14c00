"""The closed form of DPO against torch's own derivative, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from halteres.training.dpo import pair_losses


def reference(
    policy: torch.Tensor, base: torch.Tensor, beta: float, smoothing: float
) -> torch.Tensor:
    """The loss of each pair, as the papers write it."""
    ratios = policy - base
    h = beta * (ratios[:, 0] - ratios[:, 1])
    positive = torch.nn.functional.logsigmoid(h)
    negative = torch.nn.functional.logsigmoid(-h)
    return -(1 - smoothing) * positive - smoothing * negative


@pytest.mark.parametrize("beta", [0.01, 0.1, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_losses_and_weights_are_torchs(beta: float, smoothing: float) -> None:
    generator = np.random.default_rng(7)
    policy_P2 = generator.normal(-40, 25, size=(64, 2))
    base_P2 = generator.normal(-40, 25, size=(64, 2))
    policy = torch.tensor(policy_P2, requires_grad=True)
    losses = reference(policy, torch.tensor(base_P2), beta, smoothing)
    losses.sum().backward()
    assert policy.grad is not None
    gradient_P2 = policy.grad.numpy()

    found = pair_losses(policy_P2, base_P2, beta=beta, label_smoothing=smoothing)
    np.testing.assert_allclose(found.losses_P, losses.detach().numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(-found.weights_P, gradient_P2[:, 0], rtol=1e-10, atol=1e-15)
    np.testing.assert_allclose(found.weights_P, gradient_P2[:, 1], rtol=1e-10, atol=1e-15)
    np.testing.assert_allclose(found.chosen_P - found.rejected_P, found.margins_P)


def test_log_ratios_of_any_size_give_finite_numbers() -> None:
    policy_P2 = np.array([[-1e4, 0.0], [0.0, -1e4], [0.0, 0.0]])
    found = pair_losses(policy_P2, np.zeros((3, 2)), beta=1.0)
    assert np.isfinite(found.losses_P).all() and np.isfinite(found.weights_P).all()
    assert found.losses_P.tolist() == pytest.approx([1e4, 0.0, np.log(2)])
    assert found.weights_P.tolist() == pytest.approx([1.0, 0.0, 0.5])
