"""x @ W^T by the fastest kernel at hand.

Owns: the choice between oneDNN and torch's default BLAS for fp32 on a CPU; sums that a kernel makes before it rounds.
Never: changes precision: sums are fp32, and what is given has the type of what is read.

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


def _sums_before_rounding() -> bool:
    """Whether oneDNN adds to a product of bf16 matrices on a CPU, and takes from it, before it rounds."""
    x, weight = torch.full((4, 4), 1.0, dtype=torch.bfloat16), torch.full((4, 4), 0.5, dtype=torch.bfloat16)
    try:
        added, taken = (_onednn_with(x, weight, None, x, sign) for sign in ("add", "sub"))
        return torch.equal(added, torch.full_like(x, 3.0)) and torch.equal(taken, torch.full_like(x, 1.0))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def _onednn_with(x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor | None, other_NE: Tensor, sign: str) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.binary(x_ND, other_NE, weight_ED, bias_E, sign)


_cpu_plus = _sums_before_rounding()


def plus(x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor | None, other_NE: Tensor) -> Tensor:
    """x @ W^T + b + other, as `linear`; in bf16 on a CPU rounded once."""
    if _cpu_plus and x_ND.device.type == "cpu" and x_ND.dtype == torch.bfloat16:
        return _onednn_with(x_ND, weight_ED, bias_E, other_NE, "add")
    return linear(x_ND, weight_ED, bias_E).add_(other_NE)


def unrounded(x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """x @ W^T + b in fp32, whatever is read.

    No operator for a CPU reads bf16 and gives fp32. The product again, less its rounded self, is what rounding took:
    two matmuls are as fast as one in fp32, which would need the weights in fp32.
    """
    rounded_NE = linear(x_ND, weight_ED, bias_E)
    if not (_cpu_plus and x_ND.device.type == "cpu" and x_ND.dtype == torch.bfloat16):
        return rounded_NE.float()
    return rounded_NE.float().add_(_onednn_with(x_ND, weight_ED, bias_E, rounded_NE, "sub"))


def linear(x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """x @ W^T + b for 2-D operands. Not differentiable: callers bring their own backward.

    Operands are contiguous, or transposes of contiguous ones: oneDNN's fallback for other strides is 100x slower.
    """
    if x_ND.device.type == "cpu" and x_ND.dtype == torch.float32:
        return _cpu_linear(x_ND, weight_ED, bias_E)
    return F.linear(x_ND, weight_ED, bias_E)
