"""x @ W^T by the fastest kernel at hand.

Owns: the choice between oneDNN and torch's default BLAS for fp32 on a CPU; where a batched matmul has the same bits.
Never: changes precision; both compute in fp32 and differ in the last bits only.

torch 2.13 sends fp32 `addmm` to MKL, which runs its AVX2 kernels on AMD processors (119 GFLOP/s on a Zen 5 core);
oneDNN, in the same wheel, uses AVX-512 there (260). Its operator is private to torch's own compiler, so it is tried
once at load and replaced by `F.linear` where it is missing or wrong.
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

LEAST_COLUMNS = 16
"""With 8 outputs or fewer, MKL's bits are others."""


def _onednn(x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x_ND, weight_ED, bias_E, "none", [], "")


def _fastest() -> Linear:
    """oneDNN where it answers and agrees with the default."""
    x, weight, bias = torch.arange(48.0).view(4, 12) / 48, torch.arange(60.0).view(5, 12) / 60, torch.arange(5.0)
    try:
        agrees = torch.allclose(_onednn(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-6)
    except (AttributeError, RuntimeError, NotImplementedError):
        return F.linear
    return _onednn if agrees else F.linear


_cpu_linear = _fastest()


def linear(x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """x @ W^T + b for 2-D operands. Not differentiable: callers bring their own backward.

    Operands are contiguous, or transposes of contiguous ones: oneDNN's fallback for other strides is 100x slower.
    """
    if _by_onednn(x_ND):
        return _cpu_linear(x_ND, weight_ED, bias_E)
    return F.linear(x_ND, weight_ED, bias_E)


def reduced(x_ND: Tensor, a_RD: Tensor) -> Tensor:
    """x @ A^T of an adapter, to the bit what `torch.bmm` computes over stacked A's, if `stackable` says so.

    Both libraries add up one product after the other in inputs of up to 192; beyond, each splits the sum in its own
    way, so that there the one has to do what the other does.
    """
    if not _by_onednn(x_ND) or (
        x_ND.shape[1] <= SEQUENTIAL and a_RD.shape[0] > 1
    ):  # one output has a kernel of its own
        return linear(x_ND, a_RD)
    missing = max(0, LEAST_COLUMNS - a_RD.shape[0])
    if not missing:
        return torch.mm(x_ND, a_RD.t())
    return torch.mm(x_ND, F.pad(a_RD, (0, 0, 0, missing)).t())[:, :-missing].contiguous()


def stackable(x_ND: Tensor) -> bool:
    """Whether rows have the same bits in `torch.bmm` as in `reduced` and `linear`, or bits are no matter."""
    return not _by_onednn(x_ND) or _batched_agrees


def _by_onednn(x_ND: Tensor) -> bool:
    return x_ND.device.type == "cpu" and x_ND.dtype == torch.float32


def _agrees_batched() -> bool:
    """Tried with inputs on both sides of the bound: rows of several matrices, and the same rows by themselves."""
    for inputs in (LEAST_COLUMNS, 2 * LEAST_COLUMNS, SEQUENTIAL, 2 * SEQUENTIAL):
        x_SMD = torch.rand((3, 8, inputs), generator=torch.Generator().manual_seed(inputs)) - 0.5
        a_SRD = x_SMD.flip(2).repeat(1, 6, 1)[:, : 3 * LEAST_COLUMNS]
        batched = torch.bmm(x_SMD, a_SRD.transpose(1, 2))
        if not all(torch.equal(batched[i], reduced(x_SMD[i], a_SRD[i])) for i in range(3)):
            return False
    return True


_batched_agrees = _agrees_batched()
