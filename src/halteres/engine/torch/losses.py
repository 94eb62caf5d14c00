"""The losses, as sums over tokens.

Owns: each loss's name, inputs and formula per token.
Never: divides by anything: the caller's weights are the normalisation.

Source: the Tinker API's losses (lp: log-probability under the adapter; q: under the sampler; A: advantage; w: weight).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from halteres.engine.checks import check_loss

Inputs = Mapping[str, Tensor]
"""Float32 arrays of N tokens by name."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss: the inputs it reads besides target_tokens, which of them scales a token, and its value per token."""

    inputs: tuple[str, ...]
    scale: str
    per_token: Callable[[Tensor, Inputs], Tensor]


def cross_entropy(logprobs_N: Tensor, inputs: Inputs) -> Tensor:
    """-w * lp; weights may be negative or fractional."""
    return -inputs["weights"] * logprobs_N


def importance_sampling(logprobs_N: Tensor, inputs: Inputs) -> Tensor:
    """-exp(lp - q) * A. Where A is 0 the ratio is not formed: such a q may be anything finite."""
    advantages_N = inputs["advantages"]
    difference_N = torch.where(advantages_N != 0, logprobs_N - inputs["logprobs"], 0.0)
    return -difference_N.exp() * advantages_N


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(("weights",), "weights", cross_entropy),
    "importance_sampling": Loss(("logprobs", "advantages"), "advantages", importance_sampling),
}


def find_loss(name: str) -> Loss:
    """The loss of this name.

    Raises:
        InvalidData: there is none; the known ones are named.
    """
    check_loss(name)
    return LOSSES[name]
