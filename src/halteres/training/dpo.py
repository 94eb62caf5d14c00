"""Direct preference optimisation: the loss of pairs in closed form, and its gradient as weights of
a cross entropy.

    h_P     = beta ((logp chosen - reference chosen) - (logp rejected - reference rejected))
    loss_P  = -(1 - e) log sigmoid(h) - e log sigmoid(-h)           e: label smoothing
    d loss / d logp chosen = -beta ((1 - e) sigmoid(-h) - e sigmoid(h)) = - d loss / d logp rejected

A training service computes `cross_entropy`, the sum of -weight * logp over tokens, and its
gradient. With the derivative above as weights, positive on the chosen answer and negative on the
rejected one, that gradient is the loss's own. The SDK's `forward_backward_custom` does the same
with torch; here numpy does.

Source: Rafailov et al. (arXiv 2305.18290), as TRL's `loss_type="sigmoid"`; the smoothed loss:
Mitchell, "A note on DPO with noisy preferences" (2023), which TRL 1.16 leaves out of that type.
P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halteres.training.turns import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLosses:
    """What P pairs come to, before a mean is taken."""

    losses_P: FloatArray
    weights_P: FloatArray  # -d loss / d logp of the chosen answer, per token; of the other: minus
    chosen_P: FloatArray  # implicit rewards: beta times the log-ratio to the reference, nats
    rejected_P: FloatArray

    @property
    def margins_P(self) -> FloatArray:
        """Lead of the chosen answer, in implicit rewards."""
        return self.chosen_P - self.rejected_P


def pair_losses(
    policy_P2: FloatArray, reference_P2: FloatArray, *, beta: float, label_smoothing: float = 0.0
) -> PairLosses:
    """The loss of each pair, and the weights that its gradient is computed with.

    Args:
        policy_P2: shape (P, 2): log-probabilities of the chosen and the rejected answer, nats,
            summed over their tokens.
        reference_P2: the same under the reference policy.
        beta: how much a log-ratio counts.
        label_smoothing: share of the pairs that is taken to be labelled the wrong way.

    >>> found = pair_losses(np.array([[-1.0, -2.0]]), np.array([[-1.0, -2.0]]), beta=0.1)
    >>> found.losses_P.round(4), found.weights_P
    (array([0.6931]), array([0.05]))
    """
    ratios_P2 = beta * (policy_P2.astype(np.float64) - reference_P2.astype(np.float64))
    chosen_P, rejected_P = ratios_P2[:, 0], ratios_P2[:, 1]
    h_P = chosen_P - rejected_P
    losses_P = (1 - label_smoothing) * _softplus(-h_P) + label_smoothing * _softplus(h_P)
    weights_P = beta * ((1 - label_smoothing) * _sigmoid(-h_P) - label_smoothing * _sigmoid(h_P))
    return PairLosses(
        losses_P=losses_P, weights_P=weights_P, chosen_P=chosen_P, rejected_P=rejected_P
    )


def _softplus(x_P: FloatArray) -> FloatArray:
    """log(1 + e^x), where neither overflows."""
    return np.logaddexp(0.0, x_P)


def _sigmoid(x_P: FloatArray) -> FloatArray:
    return np.exp(-np.logaddexp(0.0, -x_P))
