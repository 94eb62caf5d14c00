"""What a pass asks of its loss: value, gradient and metrics of one micro-batch's log-probabilities.

Owns: the losses that the Tinker API names, applied to padded micro-batches; the check that all of it is finite.
Never: sees weights: the gradient is of the log-probabilities, and the pass carries it on.

B datums, T tokens of each.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from halteres.engine.checks import loss_not_finite
from halteres.engine.torch.losses import Inputs, Loss, Settings
from halteres.engine.torch.micro_batches import MicroBatch


@dataclass(frozen=True, slots=True)
class Value:
    """What a loss makes of a micro-batch."""

    total: float  # summed over tokens and datums
    gradient: Tensor | None  # shaped as the log-probabilities; None in a forward pass
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # `:mean` as its sum over datums


Valuing = Generator[None, None, Value]
"""The value of a micro-batch, found in slices: others get their turn in between."""


class Objective(Protocol):
    """A loss, with its settings."""

    def __call__(self, logprobs: Tensor, batch: MicroBatch, gradient: bool) -> Valuing:
        """Its value for log-probabilities of B x T, or B x T x K where tokens have several targets.

        Raises:
            UserError: it cannot be computed, or is not finite; the message names the datum.
        """
        ...


@dataclass(frozen=True, slots=True)
class PerToken:
    """A loss that is a sum over tokens."""

    loss: Loss
    settings: Settings

    def __call__(self, logprobs: Tensor, batch: MicroBatch, gradient: bool) -> Valuing:
        """See `Objective`; in one slice."""
        yield from ()
        return self.value(logprobs, batch, gradient)

    def value(self, logprobs: Tensor, batch: MicroBatch, gradient: bool) -> Value:
        """The same, at once."""
        inputs = batch.inputs()
        with torch.set_grad_enabled(gradient):
            leaf = logprobs.detach().requires_grad_(gradient)
            tokens, clipped_BT = self.loss.per_token(leaf, inputs, self.settings)
            check_finite(tokens.detach(), batch, "loss")
            found = torch.autograd.grad(tokens.sum(), leaf)[0] if gradient else None
        if found is not None:
            check_finite(found, batch, "gradient of the loss")
        total = float(tokens.detach().double().sum())
        return Value(total, found, _metrics(self.loss.scale, leaf.detach(), clipped_BT, inputs))


def check_finite(tokens: Tensor, batch: MicroBatch, what: str) -> None:
    """Refuse a micro-batch with a value that is NaN or infinite; rows of `tokens` are datums, then come positions.

    Raises:
        LossNotFinite: it names datum and position.
    """
    finite = torch.isfinite(tokens)
    if bool(finite.all()):
        return
    row, position = (~finite).nonzero()[0].tolist()[:2]
    where = f" at datum {batch.examples[row].index}, position {position}"
    raise loss_not_finite(where, what, ratios="logprobs" in batch.inputs())


def _metrics(scale: str, logprobs: Tensor, clipped_BT: Tensor | None, inputs: Inputs) -> dict[str, float]:
    """Counts, and how far the policy is from the sampler; means are theirs to take who know all chunks of a request."""
    live_BT = inputs[scale].flatten(2).any(2) if inputs[scale].ndim > 2 else inputs[scale] != 0
    metrics = {"num_loss_tokens:sum": float(live_BT.sum())}
    if clipped_BT is not None:
        metrics["num_clipped_tokens:sum"] = float((clipped_BT & live_BT).sum())
    if "logprobs" in inputs:
        apart = (logprobs - inputs["logprobs"])[live_BT].double()
        metrics["log_ratio:sum"] = float(apart.sum())
        metrics["log_ratio_squared:sum"] = float(apart.square().sum())
        metrics["log_ratio_abs:max"] = float(apart.abs().max()) if len(apart) else 0.0
    return metrics
