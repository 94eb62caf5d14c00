"""A trainable adapter: weights, gradient, optimiser state, version.

Owns: AdamW on one flat buffer; what happens to the gradient, and when.
Never: sees data; shares a tensor with a snapshot.

    forward_backward ──▶ pass gradient ──whole pass succeeded──▶ gradient ──optim_step──▶ weights, version + 1
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halteres.engine.checks import LossNotFinite
from halteres.engine.protocol import Adam, StepResult
from halteres.engine.torch.lora import Layout, Lora, LoraWeights
from halteres.engine.torch.model import Projection
from halteres.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """Immutable weights to sample from; without a layout it is the base model."""

    layout: Layout | None
    flat: Tensor | None
    weights: LoraWeights
    version: int

    @classmethod
    def of(cls, layout: Layout, flat: Tensor, version: int) -> Snapshot:
        """A snapshot that owns `flat`."""
        return cls(layout=layout, flat=flat, weights=layout.views(flat), version=version)


BASE = Snapshot(layout=None, flat=None, weights={}, version=0)
"""The base model without an adapter."""


@dataclass(slots=True, kw_only=True)
class AdamState:
    """Moments over the flat buffer, and the steps they have seen."""

    first: Tensor
    second: Tensor
    steps: int = 0


class Adapter:
    """One adapter; its leaves are views of `flat`, their gradients views of the pass gradient."""

    def __init__(self, layout: Layout, flat: Tensor, version: int = 0, adam: AdamState | None = None) -> None:
        self.layout, self.flat, self.version = layout, flat, version
        self.adam = adam or AdamState(first=torch.zeros_like(flat), second=torch.zeros_like(flat))
        self._gradient, self._pass_gradient = torch.zeros_like(flat), torch.zeros_like(flat)
        self._accumulated = False
        self.weights = _leaves(layout, flat, self._pass_gradient)

    def begin_pass(self) -> None:
        """Forget what an unfinished pass left."""
        self._pass_gradient.zero_()

    def end_pass(self) -> None:
        """The whole pass succeeded: its gradient counts."""
        self._gradient.add_(self._pass_gradient)
        self._accumulated = True

    def snapshot(self) -> Snapshot:
        """An immutable copy of the weights."""
        return Snapshot.of(self.layout, self.flat.clone(), self.version)

    def step(self, adam: Adam) -> StepResult:
        """Apply and clear the gradient.

        Raises:
            UserError: no gradient was accumulated.
            LossNotFinite: the gradient is NaN or infinite; the weights stay, the gradient is cleared.
        """
        if not self._accumulated:
            raise UserError(
                "There is no gradient to apply.",
                "No forward_backward succeeded since the last optim_step.",
                "Send forward_backward first.",
            )
        norm = float(torch.linalg.vector_norm(self._gradient))
        if not math.isfinite(norm):
            self._clear()
            raise LossNotFinite(
                "The step was refused: the gradient is not finite.",
                f"Its norm is {norm}. The weights are untouched, the gradient has been cleared.",
                "Look for huge importance ratios, advantages or weights in the data; lower the learning rate.",
            )
        if adam.grad_clip_norm > 0:
            self._gradient.mul_(min(1.0, adam.grad_clip_norm / (norm + 1e-6)))
        _adamw(self.flat, self._gradient, self.adam, adam)
        for lora in self.weights.values():
            lora.fuse()
        self._clear()
        self.version += 1
        return StepResult(version=self.version, metrics={"grad_norm:mean": norm})

    def _clear(self) -> None:
        self._gradient.zero_()
        self._accumulated = False


def _leaves(layout: Layout, flat: Tensor, gradient: Tensor) -> dict[Projection, Lora]:
    """Views of the weights that autograd treats as leaves, accumulating into views of `gradient`."""

    def leaf(weight: Tensor, grad: Tensor) -> Tensor:
        made = weight.detach().requires_grad_()
        made.grad = grad
        return made

    weights, gradients = layout.views(flat), layout.views(gradient)
    return {
        projection: replace(
            lora,
            a_RD=leaf(lora.a_RD, gradients[projection].a_RD),
            b=tuple(map(leaf, lora.b, gradients[projection].b)),
        )
        for projection, lora in weights.items()
    }


def _adamw(weights: Tensor, gradient: Tensor, state: AdamState, adam: Adam) -> None:
    """One step of torch.optim.AdamW's update (decoupled decay; eps outside the root), in place."""
    state.steps += 1
    state.first.lerp_(gradient, 1 - adam.beta1)
    state.second.mul_(adam.beta2).addcmul_(gradient, gradient, value=1 - adam.beta2)
    correction1, correction2 = 1 - adam.beta1**state.steps, 1 - adam.beta2**state.steps
    denominator = state.second.sqrt().div_(math.sqrt(correction2)).add_(adam.eps)
    weights.mul_(1 - adam.learning_rate * adam.weight_decay)
    weights.addcdiv_(state.first, denominator, value=-adam.learning_rate / correction1)
