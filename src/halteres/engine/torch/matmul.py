"""x @ W^T by the fastest kernel at hand.

Owns: the choice between oneDNN and torch's default BLAS for fp32 on a CPU; where a batched matmul has the same bits;
sums that a kernel makes before it rounds.
Never: changes precision: sums are fp32, and what is given has the type of what is read.

torch 2.13 sends fp32 `addmm` to MKL, which runs its AVX2 kernels on AMD processors (119 GFLOP/s on a Zen 5 core);
oneDNN, in the same wheel, uses AVX-512 there (260). Its operator is private to torch's own compiler, so it is tried
once at load and replaced by `F.linear` where it is missing or wrong; and where the processor has no AVX-512: there MKL
is faster, with few rows up to twice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

SEQUENTIAL = 192
"""Inputs of a matmul that MKL adds up one after the other. Beyond, it splits the sum by rules that depend on their
number."""

LEAST_ROWS = 8
"""Rows are padded to a multiple of this: with fewer than 4 kernels change, and with them bits. 4 are no faster than 8:
reading the weights is what takes time (measured on a Zen 3 core)."""

LEAST_COLUMNS = 16
"""With 8 outputs or fewer, MKL's bits are others."""


def _onednn(x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x_ND, weight_ED, bias_E, "none", [], "")


def _fastest() -> Linear:
    """oneDNN where it has instructions that MKL leaves unused, answers and agrees with the default."""
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        return F.linear
    x, weight, bias = torch.arange(48.0).view(4, 12) / 48, torch.arange(60.0).view(5, 12) / 60, torch.arange(5.0)
    try:
        agrees = torch.allclose(_onednn(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-6)
    except (AttributeError, RuntimeError, NotImplementedError):
        return F.linear
    return _onednn if agrees else F.linear


_cpu_linear = _fastest()


def _sums_before_rounding() -> bool:
    """Whether oneDNN adds to a product of bf16 matrices on a CPU, and takes from it, before it rounds.

    Without AVX-512 it rounds first: of 2 + 2**-8 nothing is left but 2.
    """
    x, weight, two = (torch.full((4, 4), value, dtype=torch.bfloat16) for value in (1.0, 0.5, 2.0))
    weight[:, 0] += 2**-8
    try:
        added, taken = _onednn_with(x, weight, None, -two, "add"), _onednn_with(x, weight, None, two, "sub")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return bool((added == 2**-8).all() and (taken == 2**-8).all())


def _onednn_with(x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor | None, other_NE: Tensor, sign: str) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.binary(x_ND, other_NE, weight_ED, bias_E, sign)


_bf16_by_onednn = _sums_before_rounding()


def operand_type(weight_ED: Tensor) -> torch.dtype:
    """What x must be, and what `linear` gives: the weights' type, but fp32 for bf16 weights on a CPU without
    instructions for them.

    There the weights are converted for each call: on a Zen 3 core, from 8 rows, 2 to 12 times as fast as torch's own
    bf16 (one row of a large head: a tenth), and nothing is rounded.
    """
    return torch.float32 if _converted(weight_ED) else weight_ED.dtype


def plus(x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor | None, other_NE: Tensor) -> Tensor:
    """x @ W^T + b + other, as `linear`; in bf16 on a CPU rounded once."""
    if _bf16_on_cpu(x_ND):
        return _onednn_with(x_ND, weight_ED, bias_E, other_NE, "add")
    if x_ND.dtype == torch.bfloat16:  # not verified on a GPU
        return torch.addmm(other_NE if bias_E is None else other_NE + bias_E, x_ND, weight_ED.t())
    return linear(x_ND, weight_ED, bias_E).add_(other_NE)


def unrounded(x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """x @ W^T + b in fp32, whatever is read.

    No operator for a CPU reads bf16 and gives fp32. The product again, less its rounded self, is what rounding took:
    two matmuls are as fast as one in fp32, which would need the weights in fp32.
    """
    if x_ND.dtype == torch.bfloat16 and not _bf16_on_cpu(x_ND):  # not verified on a GPU
        found_NE = torch.mm(x_ND, weight_ED.t(), out_dtype=torch.float32)
        return found_NE if bias_E is None else found_NE.add_(bias_E)
    rounded_NE = linear(x_ND, weight_ED, bias_E)
    if x_ND.dtype == torch.float32:
        return rounded_NE
    return rounded_NE.float().add_(_onednn_with(x_ND, weight_ED, bias_E, rounded_NE, "sub"))


def linear(x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """x @ W^T + b for 2-D operands, x of the type that `operand_type` says. Not differentiable: callers bring their own
    backward.

    Operands are contiguous, or transposes of contiguous ones: oneDNN's fallback for other strides is 100x slower.
    """
    if _converted(weight_ED):
        weight_ED, bias_E = weight_ED.float(), None if bias_E is None else bias_E.float()
    if x_ND.device.type == "cpu" and x_ND.dtype == torch.float32:
        return _cpu_linear(x_ND, weight_ED, bias_E)
    return F.linear(x_ND, weight_ED, bias_E)


def _bf16_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.bfloat16


def _converted(weight_ED: Tensor) -> bool:
    return not _bf16_by_onednn and _bf16_on_cpu(weight_ED)


def reduced(x_ND: Tensor, a_RD: Tensor) -> Tensor:
    """x @ A^T of an adapter, to the bit what `torch.bmm` computes over stacked A's, if `stackable` says so."""
    missing = LEAST_COLUMNS - a_RD.shape[0]
    if missing <= 0:
        return torch.mm(x_ND, a_RD.t())
    return torch.mm(x_ND, F.pad(a_RD, (0, 0, 0, missing)).t())[:, :-missing].contiguous()


def stackable(weight_ED: Tensor) -> bool:
    """Whether rows have the same bits in `torch.bmm` as in matmuls of their own, or bits are no matter."""
    return weight_ED.device.type != "cpu" or operand_type(weight_ED) != torch.float32 or _batched_agrees


def _agrees_batched() -> bool:
    """Tried with inputs on both sides of the bound, and of fewer that are padded with zeros."""
    drawn = torch.Generator().manual_seed(0)
    for inputs in (LEAST_COLUMNS, SEQUENTIAL, 2 * SEQUENTIAL):
        x_SMD, a_SRD = torch.randn((3, 8, inputs), generator=drawn), torch.randn((3, 48, inputs), generator=drawn)
        h_SMR, b_SRP = torch.bmm(x_SMD, a_SRD.transpose(1, 2).contiguous()), torch.randn((3, 48, 64), generator=drawn)
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
