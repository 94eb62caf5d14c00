"""The linear modules of a base model: x @ W^T by the fastest kernel at hand, what an adapter adds,
and both backward.

Base weights are frozen: nothing here computes their gradients. The same functions run without
gradient in the sampler, so that sampled and trained log-probabilities agree. Sums are fp32, and
what is given has the type of what is read.

torch 2.13 sends fp32 `addmm` to MKL, which runs its AVX2 kernels on AMD processors (119 GFLOP/s on
a Zen 5 core); oneDNN, in the same wheel, uses AVX-512 there (260). Its operator is private to
torch's own compiler, so it is tried once at load and replaced by `F.linear` where it is missing or
wrong; and where the processor has no AVX-512: there MKL is faster, with few rows up to twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

SEQUENTIAL = 192
"""Inputs of a matmul that MKL adds up one after the other. Beyond, it splits the sum by rules that
depend on their number.
"""

LEAST_ROWS = 8
"""Rows are padded to a multiple of this: with fewer than 4 kernels change, and with them bits. 4
are no faster than 8: reading the weights is what takes time (measured on a Zen 3 core).
"""

LEAST_COLUMNS = 16  # with 8 outputs or fewer, MKL's bits are others


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One linear module inside a projection, by its transformers name, and the outputs that are its
    own.
    """

    module: str  # e.g. model.layers.0.self_attn.q_proj
    start: int
    stop: int


class Linear(Protocol):
    """Where a projection's weights are, all of them frozen."""

    @property
    def weight(self) -> Tensor:
        """E x D."""
        ...

    @property
    def bias(self) -> Tensor | None:
        """E, where there is one."""
        ...

    def norm(self) -> float:
        """The Frobenius norm of the weight, in fp32."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Weights in this process's memory."""

    weight: Tensor
    bias: Tensor | None

    def norm(self) -> float:
        """See `Linear`."""
        return float(torch.linalg.vector_norm(self.weight, dtype=torch.float32))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """Linear modules that read the same input, as one matmul: E outputs of D inputs."""

    parts: tuple[Part, ...]
    source: Linear

    @property
    def weight_ED(self) -> Tensor:
        """As it is when it is asked for: a sharded one is whole while its layer is computed."""
        return self.source.weight

    @property
    def bias_E(self) -> Tensor | None:
        """See `weight_ED`."""
        return self.source.bias

    @property
    def inputs(self) -> int:
        """D."""
        return self.weight_ED.shape[1]


class Adaptation(Protocol):
    """What adapters add to the outputs of one projection: one adapter to all rows, or several, each
    to its own.
    """

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is trained."""
        ...

    def add_to(self, y_NE: Tensor, x_ND: Tensor) -> Tensor:
        """Add it; what A makes of x, which `gradients` needs."""
        ...

    def gradients(
        self, dy_NE: Tensor, x_ND: Tensor, h: Tensor, dx_ND: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Of `tensors`; that of x is added to `dx_ND`."""
        ...


class Adaptations(Protocol):
    """By projection: `LoraWeights` of one adapter, or those of several for rows of their own."""

    def get(self, projection: Projection, /) -> Adaptation | None:
        """None: no adapter changes it."""
        ...


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


def _onednn(x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x_ND, weight_ED, bias_E, "none", [], "")


def _onednn_with(
    x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor | None, other_NE: Tensor, sign: str
) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.binary(x_ND, other_NE, weight_ED, bias_E, sign)


def _fastest() -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """oneDNN where it has instructions that MKL leaves unused, answers and agrees with the
    default.
    """
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        return F.linear
    x, weight, bias = (
        torch.arange(48.0).view(4, 12) / 48,
        torch.arange(60.0).view(5, 12) / 60,
        torch.arange(5.0),
    )
    try:
        agrees = torch.allclose(
            _onednn(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-6
        )
    except (AttributeError, RuntimeError, NotImplementedError):
        return F.linear
    return _onednn if agrees else F.linear


_cpu_linear = _fastest()


def _sums_before_rounding() -> bool:
    """Whether oneDNN adds to a product of bf16 matrices on a CPU, and takes from it, before it
    rounds.

    Without AVX-512 it rounds first: of 2 + 2**-8 nothing is left but 2.
    """
    x, weight, two = (torch.full((4, 4), value, dtype=torch.bfloat16) for value in (1.0, 0.5, 2.0))
    weight[:, 0] += 2**-8
    try:
        added, taken = (
            _onednn_with(x, weight, None, -two, "add"),
            _onednn_with(x, weight, None, two, "sub"),
        )
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return bool((added == 2**-8).all() and (taken == 2**-8).all())


_bf16_by_onednn = _sums_before_rounding()


def operand_type(weight_ED: Tensor) -> torch.dtype:
    """What x must be, and what `linear` gives: the weights' type, but fp32 for bf16 weights on a
    CPU without instructions for them.

    There the weights are converted for each call: on a Zen 3 core, from 8 rows, 2 to 12 times as
    fast as torch's own bf16 (one row of a large head: a tenth), and nothing is rounded.
    """
    return torch.float32 if _converted(weight_ED) else weight_ED.dtype


def linear(x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """x @ W^T + b for 2-D operands, x of the type that `operand_type` says. Not differentiable:
    callers bring their own backward.

    Operands are contiguous, or transposes of contiguous ones: oneDNN's fallback for other strides
    is 100x slower.
    """
    if _converted(weight_ED):
        weight_ED, bias_E = weight_ED.float(), None if bias_E is None else bias_E.float()
    if x_ND.device.type == "cpu" and x_ND.dtype == torch.float32:
        return _cpu_linear(x_ND, weight_ED, bias_E)
    return F.linear(x_ND, weight_ED, bias_E)


def plus(x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor | None, other_NE: Tensor) -> Tensor:
    """x @ W^T + b + other, as `linear`; in bf16 on a CPU rounded once."""
    if _bf16_on_cpu(x_ND):
        return _onednn_with(x_ND, weight_ED, bias_E, other_NE, "add")
    if x_ND.dtype == torch.bfloat16:  # not verified on a GPU
        return torch.addmm(other_NE if bias_E is None else other_NE + bias_E, x_ND, weight_ED.t())
    return linear(x_ND, weight_ED, bias_E).add_(other_NE)


def unrounded(x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """x @ W^T + b in fp32, whatever is read.

    No operator for a CPU reads bf16 and gives fp32. The product again, less its rounded self, is
    what rounding took: two matmuls are as fast as one in fp32, which would need the weights in
    fp32.
    """
    if x_ND.dtype == torch.bfloat16 and not _bf16_on_cpu(x_ND):  # not verified on a GPU
        found_NE = torch.mm(x_ND, weight_ED.t(), out_dtype=torch.float32)
        return found_NE if bias_E is None else found_NE.add_(bias_E)
    rounded_NE = linear(x_ND, weight_ED, bias_E)
    if x_ND.dtype == torch.float32:
        return rounded_NE
    return rounded_NE.float().add_(_onednn_with(x_ND, weight_ED, bias_E, rounded_NE, "sub"))


def _bf16_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.bfloat16


def _converted(weight_ED: Tensor) -> bool:
    return not _bf16_by_onednn and _bf16_on_cpu(weight_ED)


def reduced(x_ND: Tensor, a_RD: Tensor) -> Tensor:
    """x @ A^T of an adapter, to the bit what `torch.bmm` computes over stacked A's, if `stackable`
    says so.
    """
    missing = LEAST_COLUMNS - a_RD.shape[0]
    if missing <= 0:
        return torch.mm(x_ND, a_RD.t())
    return torch.mm(x_ND, F.pad(a_RD, (0, 0, 0, missing)).t())[:, :-missing].contiguous()


def stackable(weight_ED: Tensor) -> bool:
    """Whether rows have the same bits in `torch.bmm` as in matmuls of their own, or bits are no
    matter.
    """
    return (
        weight_ED.device.type != "cpu"
        or operand_type(weight_ED) != torch.float32
        or _batched_agrees
    )


def _agrees_batched() -> bool:
    """Tried with inputs on both sides of the bound, and of fewer that are padded with zeros."""
    drawn = torch.Generator().manual_seed(0)
    for inputs in (LEAST_COLUMNS, SEQUENTIAL, 2 * SEQUENTIAL):
        x_SMD, a_SRD = (
            torch.randn((3, 8, inputs), generator=drawn),
            torch.randn((3, 48, inputs), generator=drawn),
        )
        h_SMR, b_SRP = (
            torch.bmm(x_SMD, a_SRD.transpose(1, 2).contiguous()),
            torch.randn((3, 48, 64), generator=drawn),
        )
        b_SRP[:, 40:] = 0
        y_SMP = torch.randn((3, 8, 64), generator=drawn)
        for i in range(3):
            apart = torch.addmm(y_SMP[i], h_SMR[i, :, :40], b_SRP[i, :40])
            if not torch.equal(reduced(x_SMD[i], a_SRD[i]), h_SMR[i]):
                return False
            if not torch.equal(y_SMP[i] + torch.bmm(h_SMR, b_SRP)[i], apart):
                return False
    return True


_batched_agrees = _agrees_batched()


def project(x_ND: Tensor, projection: Projection, lora: Adaptation | None) -> Tensor:
    """x @ W^T + bias, plus the adapter's scale * (x @ A_i^T) @ B_i^T on the outputs of each part i.

    x has the type of W, as have the outputs.
    """
    if not torch.is_grad_enabled():
        return project_forward(x_ND, projection, lora)[0]
    tensors = lora.tensors if lora is not None else ()
    return _Project.apply(x_ND, projection, lora, *tensors)  # pyright: ignore[reportReturnType]


def project_forward(
    x_ND: Tensor, projection: Projection, lora: Adaptation | None
) -> tuple[Tensor, Tensor | None]:
    """The outputs, and x @ A^T, which the backward needs."""
    if lora is None or x_ND.dtype == torch.float32:
        y_NE = linear(x_ND, projection.weight_ED, projection.bias_E)
        return y_NE, None if lora is None else lora.add_to(y_NE, x_ND)
    # Rounded once: what an adapter adds is often smaller than what rounding the sum without it
    # takes.
    added_NE = x_ND.new_zeros((x_ND.shape[0], projection.weight_ED.shape[0]))
    h = lora.add_to(added_NE, x_ND)
    return plus(x_ND, projection.weight_ED, projection.bias_E, added_NE), h


def logits_forward(
    x_ND: Tensor, head: Projection, lora: Adaptation | None
) -> tuple[Tensor, Tensor | None]:
    """As `project_forward`, in fp32: rounded to eight bits, the likeliest of many tokens would be
    equal.
    """
    logits_NV = unrounded(x_ND, head.weight_ED, head.bias_E)
    if lora is None or x_ND.dtype == torch.float32:
        return logits_NV, None if lora is None else lora.add_to(logits_NV, x_ND)
    added_NV = x_ND.new_zeros(logits_NV.shape)
    h = lora.add_to(added_NV, x_ND)
    return logits_NV.add_(added_NV), h


def project_backward(
    dy_NE: Tensor,
    x_ND: Tensor,
    h_NR: Tensor | None,
    projection: Projection,
    lora: Adaptation | None,
    need_dx: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of x (None if not needed) and, in fp32, of the adapter's tensors."""
    weight_DE = projection.weight_ED.t()
    if lora is None or h_NR is None:
        return (linear(dy_NE, weight_DE) if need_dx else None,)
    if dy_NE.dtype == torch.float32:
        dx_ND = linear(dy_NE, weight_DE) if need_dx else None
        return dx_ND, *lora.gradients(dy_NE, x_ND, h_NR, dx_ND)
    added_ND = torch.zeros_like(x_ND) if need_dx else None
    gradients = lora.gradients(dy_NE, x_ND, h_NR, added_ND)
    return None if added_ND is None else plus(dy_NE, weight_DE, None, added_ND), *gradients


class _Project(Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, projection: Projection, lora: Adaptation | None, *tensors: Tensor
    ) -> Tensor:
        y_NE, h_NR = project_forward(x_ND, projection, lora)
        ctx.save_for_backward(x_ND, h_NR)
        ctx.projection, ctx.lora = projection, lora
        return y_NE

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x_ND, h_NR = ctx.saved_tensors
        dx, *rest = project_backward(
            grads[0].contiguous(), x_ND, h_NR, ctx.projection, ctx.lora, ctx.needs_input_grad[0]
        )
        return dx, None, None, *rest


def head_logits(head: Projection, lora: Adaptations, hidden_ND: Tensor) -> Tensor:
    """Logits of every token, N x V, fp32, without gradient."""
    return logits_forward(hidden_ND, head, lora.get(head))[0]


def target_logprobs(
    head: Projection,
    lora: Adaptations,
    hidden_ND: Tensor,
    targets: Tensor,
    elements: int,
    expected_N: Tensor | None = None,
) -> Tensor:
    """log-softmax at temperature 1 of each token's target, or targets: N or N x K, as they are.

    At most `elements` logits exist at once. `expected` says which tokens will probably have a
    gradient: it costs them no second look at their logits.
    """
    rows = max(LEAST_ROWS, elements // head.weight_ED.shape[0] // LEAST_ROWS * LEAST_ROWS)
    own = lora.get(head)
    targets_NK, tensors = targets.view(targets.shape[0], -1), own.tensors if own is not None else ()
    found_NK = _TargetLogprobs.apply(hidden_ND, targets_NK, head, own, rows, expected_N, *tensors)
    return found_NK.view_as(targets)  # pyright: ignore[reportOptionalMemberAccess]


class _TargetLogprobs(Function):
    """The gradient of a single target's log-probability is a number times W[target] - p @ W, which
    the forward computes for the rows that are expected to have one, while it has their logits:
    forward and backward of the head in one.

    Of other rows, and beside an adapter of the head or several targets, the backward computes those
    whose gradient is not zero, and their logits again, if there are several chunks. What a single
    chunk keeps instead is no more than what the forward held anyhow.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        targets_NK: Tensor,
        head: Projection,
        lora: Adaptation | None,
        rows: int,
        expected_N: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        fused = ctx.needs_input_grad[0] and lora is None and targets_NK.shape[1] == 1
        slopes_ND = torch.zeros_like(x_ND) if fused and expected_N is not None else None
        logprobs_NK, reused = x_ND.new_empty(targets_NK.shape, dtype=torch.float32), None
        for chunk in _TargetLogprobs.chunks(x_ND.shape[0], rows):
            logits_CV, h_CR = logits_forward(x_ND[chunk], head, lora)
            logprobs_CV = torch.log_softmax(logits_CV, dim=1)
            logprobs_NK[chunk] = logprobs_CV.gather(1, targets_NK[chunk])
            if slopes_ND is not None and expected_N is not None:
                rows_E = expected_N[chunk].nonzero().squeeze(1)
                p_EV = (
                    logprobs_CV if len(rows_E) == len(logprobs_CV) else logprobs_CV[rows_E]
                ).exp_()
                own_ED = head.weight_ED.index_select(0, targets_NK[chunk][rows_E, 0]).to(x_ND.dtype)
                slopes_ND[chunk][rows_E] = own_ED.sub_(
                    linear(p_EV.to(x_ND.dtype), head.weight_ED.t())
                )
            else:
                reused = logprobs_CV, h_CR
        ctx.save_for_backward(x_ND, targets_NK, slopes_ND, expected_N)
        ctx.head, ctx.lora, ctx.rows = head, lora, rows
        ctx.reused = reused if x_ND.shape[0] <= rows else None
        return logprobs_NK

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x_ND, targets_NK, slopes_ND, expected_N), (g_NK, *_) = ctx.saved_tensors, grads
        dx_ND = torch.zeros_like(x_ND) if slopes_ND is None else slopes_ND.mul_(g_NK)
        live_N = g_NK.any(1) if slopes_ND is None else g_NK.any(1) & ~expected_N
        live_M = live_N.nonzero().squeeze(1)
        sums: list[Tensor] = []
        for chunk in _TargetLogprobs.chunks(live_M.shape[0], ctx.rows):
            rows_C = live_M[chunk]
            x_CD, g_CK = x_ND[rows_C], g_NK[rows_C]
            p_CV, h_CR = _TargetLogprobs.probabilities(ctx, x_CD, rows_C)
            d_CV = p_CV.mul_(-g_CK.sum(1, keepdim=True))
            d_CV.scatter_add_(1, targets_NK[rows_C], g_CK)
            dx_CD, *rest = project_backward(
                d_CV.to(x_CD.dtype), x_CD, h_CR, ctx.head, ctx.lora, True
            )
            dx_ND[rows_C] = dx_CD  # pyright: ignore[reportArgumentType]
            found = [tensor for tensor in rest if tensor is not None]
            sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
        ctx.reused = None
        return dx_ND, *(None,) * 5, *(sums or [None] * (len(ctx.needs_input_grad) - 6))

    @staticmethod
    def probabilities(ctx: Any, x_CD: Tensor, rows_C: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of these rows, and what the adapter's A makes of them."""
        if ctx.reused is None:
            logits_CV, h_CR = logits_forward(x_CD, ctx.head, ctx.lora)
            return torch.softmax(logits_CV, dim=1), h_CR
        logprobs_NV, h_NR = ctx.reused
        return logprobs_NV[rows_C].exp_(), None if h_NR is None else h_NR[rows_C]

    @staticmethod
    def chunks(count: int, size: int) -> Iterator[slice]:
        return (slice(start, start + size) for start in range(0, count, size))
