"""A trainable adapter: weights, gradient, optimiser state, version.

Owns: AdamW on one flat buffer; what happens to the gradient, and when; copies of it all for the disk.
Never: sees data; shares a tensor with a snapshot or a copy.

    forward_backward ──▶ pass gradient ──whole pass succeeded──▶ gradient ──optim_step──▶ weights, version + 1
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halteres.engine.checks import LARGEST, LossNotFinite, check_adam
from halteres.engine.protocol import UPDATE_METRIC, Adam, StepResult
from halteres.engine.torch.lora import Layout, Lora, LoraWeights
from halteres.engine.torch.model import Projection
from halteres.errors import UserError


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False)
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

    def checkpoint(self) -> Checkpoint:
        """The same weights, for the disk.

        Raises:
            UserError: the base model has none.
        """
        if self.layout is None or self.flat is None:
            raise UserError("The base model has no adapter to save.", next="Name a snapshot of an adapter.")
        return Checkpoint(layout=self.layout, flat=self.flat, version=self.version, adam=None)


BASE = Snapshot(layout=None, flat=None, weights={}, version=0)
"""The base model without an adapter."""


@dataclass(slots=True)
class AdamState:
    """Moments over the flat buffer, and the steps they have seen."""

    first: Tensor
    second: Tensor
    steps: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Stepped:
    """What a step would make of weights and moments, computed beside them."""

    weights: Tensor
    adam: AdamState

    @property
    def finite(self) -> bool:
        """Nothing in it is NaN or infinite; smallest and largest say so without a mask as long as the buffer."""
        tensors = self.weights, self.adam.first, self.adam.second
        return all(math.isfinite(float(end)) for tensor in tensors for end in tensor.aminmax())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """What of an adapter is kept on disk; nobody changes it any more."""

    layout: Layout
    flat: Tensor
    version: int
    adam: AdamState | None  # None: weights alone


class Adapter:
    """One adapter; its leaves are views of `flat`, their gradients views of the pass gradient.

    Between passes the pass gradient holds nothing: a step borrows its memory.
    """

    def __init__(self, layout: Layout, flat: Tensor, version: int = 0, adam: AdamState | None = None) -> None:
        self.layout, self.flat, self.version = layout, flat, version
        self.adam = adam or AdamState(torch.zeros_like(flat), torch.zeros_like(flat))
        self._gradient, self._pass_gradient = torch.zeros_like(flat), torch.zeros_like(flat)
        self._accumulated = False
        self._base_norm: float | None = None  # of the weights that it adapts; they never change
        self.weights = _leaves(layout, flat, self._pass_gradient)

    @property
    def gradient(self) -> dict[str, Tensor]:
        """What the next step would apply, by PEFT's names: views."""
        return self.layout.named(self._gradient)

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

    def checkpoint(self, optimizer: bool) -> Checkpoint:
        """A copy in main memory; what happens to the adapter from now on is not in it."""
        own = self.adam
        adam = AdamState(_kept(own.first), _kept(own.second), own.steps) if optimizer else None
        return Checkpoint(layout=self.layout, flat=_kept(self.flat), version=self.version, adam=adam)

    def step(self, adam: Adam) -> StepResult:
        """Apply and clear the gradient. Whatever raises here has changed no weight and no moment.

        Raises:
            InvalidData: a number of `adam` is out of range; the gradient stays too.
            UserError: no gradient was accumulated.
            LossNotFinite: the gradient, or what the step would make of weights and moments, is NaN or infinite; the
                gradient is cleared: the same step on it would be refused again.
        """
        check_adam(adam)
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
        stepped = self._stepped(adam, norm)
        if not stepped.finite:
            self._clear()
            raise LossNotFinite(
                "The step was refused: what it makes of the weights is not finite.",
                "Weights and optimiser are untouched, the gradient has been cleared.",
                f"Lower learning_rate ({adam.learning_rate:g}) or weight_decay ({adam.weight_decay:g}), keep eps "
                f"({adam.eps:g}) above 0, and send forward_backward again.",
            )
        self._take(stepped)
        return StepResult(version=self.version, metrics={"grad_norm:mean": norm, UPDATE_METRIC: self.update_norm()})

    def update_norm(self) -> float:
        """The Frobenius norm of what the adapter adds to the base weights, relative to that of those weights."""
        if self._base_norm is None:
            self._base_norm = _norm(
                torch.linalg.vector_norm(one.weight_ED, dtype=torch.float32) for one in self.weights
            )
        return _norm(map(_product_norm, self.weights.values())) / self._base_norm

    def _stepped(self, adam: Adam, norm: float) -> Stepped:
        """What the step makes of the adapter, which stays as it is; the gradient is used up."""
        fresh = torch.empty_like(self.flat), torch.empty_like(self.flat)  # where memory ends, nothing has changed yet
        if adam.grad_clip_norm > 0:
            self._gradient.mul_(min(1.0, adam.grad_clip_norm / (norm + 1e-6)))
        return _adamw(self.flat, self._gradient, self.adam, adam, (*fresh, self._pass_gradient))

    def _take(self, stepped: Stepped) -> None:
        self.flat.copy_(stepped.weights)
        self.adam.first.copy_(stepped.adam.first)
        self.adam.second.copy_(stepped.adam.second)
        self.adam.steps = stepped.adam.steps
        for lora in self.weights.values():
            lora.fuse()
        self._clear()
        self.version += 1

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


def _norm(parts: Iterable[Tensor]) -> float:
    return math.sqrt(math.fsum(float(part) ** 2 for part in parts))


def _product_norm(lora: Lora) -> Tensor:
    """Of the product B A, which is never made: |BA|^2 is the sum of B'B times AA', element by element."""
    b_ER, a_RD = lora.scaled_b_ER.detach().float(), lora.a_RD.detach().float()
    return ((b_ER.T @ b_ER) * (a_RD @ a_RD.T)).sum().clamp(min=0).sqrt()


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _adamw(
    weights: Tensor, gradient: Tensor, state: AdamState, adam: Adam, free: tuple[Tensor, Tensor, Tensor]
) -> Stepped:
    """One step of torch.optim.AdamW's update (decoupled decay; eps outside the root), in the `free` buffers.

    It uses `gradient` up: three buffers hold the result, a fourth the denominator.
    """
    steps = state.steps + 1
    first = torch.lerp(state.first, gradient, 1 - adam.beta1, out=free[0])
    second = torch.mul(state.second, adam.beta2, out=free[1]).addcmul_(gradient, gradient, value=1 - adam.beta2)
    correction1, correction2 = 1 - adam.beta1**steps, 1 - adam.beta2**steps
    denominator = torch.sqrt(second, out=gradient).div_(math.sqrt(correction2)).add_(adam.eps)
    moved = torch.mul(weights, _as_float32(1 - adam.learning_rate * adam.weight_decay), out=free[2])
    moved.addcdiv_(first, denominator, value=_as_float32(-adam.learning_rate / correction1))
    return Stepped(moved, AdamState(first, second, steps))


def _as_float32(factor: float) -> float:
    """torch refuses a factor that float32 cannot hold; an infinite one makes a step that we refuse."""
    return factor if abs(factor) <= LARGEST else math.copysign(math.inf, factor)
