"""An adapter: LoRA weights, all views of one flat buffer; what they add to a projection; gradient,
optimiser, version.

    forward_backward ──▶ pass gradient ──whole pass succeeded──▶ gradient ──optim_step──▶ weights,
    version + 1

A's of one projection lie next to each other, so the stacked A of a fused projection is a view too.
No tensor is shared with a snapshot, or with a copy for the disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halteres.engine.checks import LARGEST, LossNotFinite, check_adam
from halteres.engine.protocol import UPDATE_METRIC, Adam, LoraConfig, StepResult
from halteres.engine.shapes import check_shape
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.projections import Projection, operand_type, reduced
from halteres.engine.torch.token_sampling import as_seed
from halteres.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """The adapter of one projection: `scale * B_i @ A_i` for each part i. R = parts * rank.

    One A serves all parts; the B's go part by part. They are also kept times the scale, as blocks
    of one matrix. What matmuls read has the type of the base's weights; what is trained is fp32.
    Whoever changes an A or a B calls `fuse`. All of it is left to torch's default BLAS: oneDNN lays
    such narrow matrices out anew, and takes twice as long.
    """

    a_RD: Tensor
    b: tuple[Tensor, ...]  # per part, E_i x rank
    read_a_RD: Tensor  # A as matmuls read it; shares its memory if the base's weights are fp32
    scaled_b_ER: Tensor
    blocks: tuple[tuple[slice, slice], ...]  # where each part's B lies in it
    scale: float

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """A, then every B: what is trained and saved."""
        return self.a_RD, *self.b

    def fuse(self) -> None:
        """Copy A, where it has another type, and the B's into the block-diagonal matrix."""
        with torch.no_grad():
            if self.read_a_RD.dtype != self.a_RD.dtype:
                self.read_a_RD.copy_(self.a_RD)
            for b, block in zip(self.b, self.blocks, strict=True):
                torch.mul(b, self.scale, out=self.scaled_b_ER[block])

    def add_to(self, y_NE: Tensor, x_ND: Tensor) -> Tensor:
        """See `Adaptation`; x @ A^T is N x R."""
        h_NR = reduced(x_ND, self.read_a_RD)
        for outputs, columns in self.blocks:
            y_NE[:, outputs].addmm_(h_NR[:, columns], self.scaled_b_ER[outputs, columns].t())
        return h_NR

    def gradients(
        self, dy_NE: Tensor, x_ND: Tensor, h: Tensor, dx_ND: Tensor | None
    ) -> tuple[Tensor, ...]:
        """See `Adaptation`."""
        g_NR = torch.empty_like(h)
        for outputs, columns in self.blocks:
            torch.mm(dy_NE[:, outputs], self.scaled_b_ER[outputs, columns], out=g_NR[:, columns])
        if dx_ND is not None:
            dx_ND.addmm_(g_NR, self.read_a_RD)
        parts = (torch.mm(dy_NE[:, outputs].t(), h[:, columns]) for outputs, columns in self.blocks)
        return torch.mm(g_NR.t(), x_ND).float(), *(part.float().mul_(self.scale) for part in parts)


LoraWeights = Mapping[Projection, Lora]  # a projection without an adapter is absent


@dataclass(frozen=True, slots=True)
class Layout:
    """Where an adapter's tensors lie in its flat buffer; a pure function of base model and
    configuration.
    """

    config: LoraConfig
    projections: tuple[Projection, ...]

    @classmethod
    def of(cls, base: BaseModel, config: LoraConfig) -> Layout:
        """The layout of an adapter on this base."""
        check_shape(config)
        chosen: list[Projection] = []
        for layer in base.layers:
            chosen += layer.attention if config.train_attn else ()
            chosen += layer.mlp if config.train_mlp else ()
        chosen += (base.head,) if config.train_unembed else ()
        return cls(config, tuple(chosen))

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.config.alpha / self.config.rank

    @property
    def size(self) -> int:
        """Numbers in the flat buffer."""
        rank = self.config.rank
        return sum(
            rank * (len(p.parts) * p.inputs + p.weight_ED.shape[0]) for p in self.projections
        )

    def views(self, flat: Tensor) -> dict[Projection, Lora]:
        """The adapter's tensors in a flat buffer, as views, and its B's fused."""
        rank, views = self.config.rank, dict[Projection, Lora]()
        for projection, a_RD, b in self.split(flat):
            columns = (slice(i * rank, (i + 1) * rank) for i in range(len(b)))
            rows = (slice(part.start, part.stop) for part in projection.parts)
            dtype = operand_type(projection.weight_ED)
            views[projection] = Lora(
                a_RD=a_RD,
                b=b,
                read_a_RD=a_RD.to(dtype),
                scaled_b_ER=a_RD.new_zeros(
                    (projection.weight_ED.shape[0], a_RD.shape[0]), dtype=dtype
                ),
                blocks=tuple(zip(rows, columns, strict=True)),
                scale=self.scale,
            )
            views[projection].fuse()
        return views

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors by PEFT's names, as views: `<module>.lora_A.weight` (rank x in), `lora_B`
        (out x rank).
        """
        rank, found = self.config.rank, dict[str, Tensor]()
        for projection, a_RD, b in self.split(flat):
            for i, part in enumerate(projection.parts):
                found[f"base_model.model.{part.module}.lora_A.weight"] = a_RD[
                    i * rank : (i + 1) * rank
                ]
                found[f"base_model.model.{part.module}.lora_B.weight"] = b[i]
        return found

    def initial(self, device: torch.device) -> Tensor:
        """A fresh flat buffer: A kaiming-uniform (as PEFT draws it), B zero. Same seed, same
        numbers; no seed is 0.
        """
        generator = torch.Generator().manual_seed(as_seed(self.config.seed or 0))
        flat = torch.zeros(self.size)
        for _, a_RD, _ in self.split(flat):
            bound = 1 / math.sqrt(a_RD.shape[1])
            a_RD.uniform_(-bound, bound, generator=generator)
        return flat.to(device)

    def split(self, flat: Tensor) -> Iterator[tuple[Projection, Tensor, tuple[Tensor, ...]]]:
        """Each projection with its stacked A and its B's, as views."""
        rank, start = self.config.rank, 0

        def take(rows: int, columns: int) -> Tensor:
            nonlocal start
            start += rows * columns
            return flat[start - rows * columns : start].view(rows, columns)

        for projection in self.projections:
            a_RD = take(len(projection.parts) * rank, projection.inputs)
            yield (
                projection,
                a_RD,
                tuple(take(part.stop - part.start, rank) for part in projection.parts),
            )


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
        """The same weights, for the disk."""
        if self.layout is None or self.flat is None:
            raise UserError(
                "The base model has no adapter to save.", next="Name a snapshot of an adapter."
            )
        return Checkpoint(layout=self.layout, flat=self.flat, version=self.version, adam=None)


BASE = Snapshot(layout=None, flat=None, weights={}, version=0)  # the base model without an adapter


@dataclass(slots=True)
class AdamState:
    """Moments over the flat buffer, and the steps they have seen."""

    first: Tensor
    second: Tensor
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """What of an adapter goes to disk; nobody changes it any more."""

    layout: Layout
    flat: Tensor
    version: int
    adam: AdamState | None  # None: weights alone


class Adapter:
    """One adapter; its leaves are views of `flat`, their gradients views of the pass gradient.

    Between passes the pass gradient holds nothing: a step borrows its memory.
    """

    def __init__(
        self, layout: Layout, flat: Tensor, version: int = 0, adam: AdamState | None = None
    ) -> None:
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

    @property
    def pass_gradient(self) -> Tensor:
        """What the pass under way has added up: the flat buffer itself."""
        return self._pass_gradient

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
        adam = AdamState(_copied(own.first), _copied(own.second), own.steps) if optimizer else None
        return Checkpoint(
            layout=self.layout, flat=_copied(self.flat), version=self.version, adam=adam
        )

    def step(self, adam: Adam) -> StepResult:
        """Apply and clear the gradient.

        Whatever raises here has changed no weight and no moment. After a LossNotFinite the gradient
        is cleared: the same step on it would be refused again.
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
                "Look for huge importance ratios, advantages or weights in the data; lower the "
                "learning rate.",
            )
        free = (
            torch.empty_like(self.flat),
            torch.empty_like(self.flat),
            self._pass_gradient,
        )  # nothing has changed yet
        if adam.grad_clip_norm > 0:
            self._gradient.mul_(min(1.0, adam.grad_clip_norm / (norm + 1e-6)))
        stepped = _adamw(self.flat, self._gradient, self.adam, adam, free)
        # Smallest and largest say whether all are finite without a mask as long as the buffer.
        if not all(math.isfinite(float(end)) for tensor in stepped for end in tensor.aminmax()):
            self._clear()
            raise LossNotFinite(
                "The step was refused: what it makes of the weights is not finite.",
                "Weights and optimiser are untouched, the gradient has been cleared.",
                f"Lower learning_rate ({adam.learning_rate:g}) or weight_decay "
                f"({adam.weight_decay:g}), keep eps "
                f"({adam.eps:g}) above 0, and send forward_backward again.",
            )
        for own, new in zip((self.flat, self.adam.first, self.adam.second), stepped, strict=True):
            own.copy_(new)
        self.adam.steps += 1
        for lora in self.weights.values():
            lora.fuse()
        self._clear()
        self.version += 1
        return StepResult(
            version=self.version,
            metrics={"grad_norm:mean": norm, UPDATE_METRIC: self.update_norm()},
        )

    def update_norm(self) -> float:
        """The Frobenius norm of what the adapter adds to the base weights, relative to that of
        those weights.

        The product B A is never made: |BA|^2 is the sum of B'B times AA', element by element.
        """
        if self._base_norm is None:
            self._base_norm = _norm(one.source.norm() for one in self.weights)
        weights = (
            (one.scaled_b_ER.detach().float(), one.a_RD.detach().float())
            for one in self.weights.values()
        )
        products = (
            ((b_ER.T @ b_ER) * (a_RD @ a_RD.T)).sum().clamp(min=0).sqrt() for b_ER, a_RD in weights
        )
        return _norm(products) / self._base_norm

    def _clear(self) -> None:
        self._gradient.zero_()
        self._accumulated = False


def _leaves(layout: Layout, flat: Tensor, gradient: Tensor) -> dict[Projection, Lora]:
    """Views of the weights that autograd treats as leaves, accumulating into views of
    `gradient`.
    """

    def leaf(weight: Tensor, grad: Tensor) -> Tensor:
        made = weight.detach().requires_grad_()
        made.grad = grad
        return made

    weights = layout.views(flat)
    return {
        projection: replace(
            weights[projection],
            a_RD=leaf(weights[projection].a_RD, a_RD),
            b=tuple(map(leaf, weights[projection].b, b)),
        )
        for projection, a_RD, b in layout.split(gradient)
    }


def _norm(parts: Iterable[Tensor | float]) -> float:
    return math.sqrt(math.fsum(float(part) ** 2 for part in parts))


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _adamw(
    weights: Tensor,
    gradient: Tensor,
    state: AdamState,
    adam: Adam,
    free: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and both moments after one step of torch.optim.AdamW (decoupled decay; eps outside
    the root), in `free`.

    It uses `gradient` up: three buffers hold the result, a fourth the denominator.
    """
    steps = state.steps + 1
    first = torch.lerp(state.first, gradient, 1 - adam.beta1, out=free[0])
    second = torch.mul(state.second, adam.beta2, out=free[1]).addcmul_(
        gradient, gradient, value=1 - adam.beta2
    )
    correction1, correction2 = 1 - adam.beta1**steps, 1 - adam.beta2**steps
    denominator = torch.sqrt(second, out=gradient).div_(math.sqrt(correction2)).add_(adam.eps)
    moved = torch.mul(weights, _as_float32(1 - adam.learning_rate * adam.weight_decay), out=free[2])
    moved.addcdiv_(first, denominator, value=_as_float32(-adam.learning_rate / correction1))
    return moved, first, second


def _as_float32(factor: float) -> float:
    """torch refuses a factor that float32 cannot hold; an infinite one makes a step that we
    refuse.
    """
    return factor if abs(factor) <= LARGEST else math.copysign(math.inf, factor)
