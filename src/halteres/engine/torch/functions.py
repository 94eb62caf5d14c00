"""Differentiable pieces of a decoder layer, each with its backward written out.

Owns: RMS norm, projection with adapter, gated activation (`heads` has the rest).
Never: computes gradients of base weights; they are frozen, and autograd would spend twice the time on a norm
(`F.rms_norm` and its backward, 4,096 x 128 on one CPU core: 0.94 ms, here 0.47).

The same functions run without gradient in the sampler, so sampled and trained log-probabilities agree.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from halteres.engine.torch.lora import Lora
from halteres.engine.torch.matmul import linear, plus, unrounded
from halteres.engine.torch.model import Projection


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, computed in x's type."""
    if x_ND.requires_grad:
        return _RmsNorm.apply(x_ND, weight_D, eps, dtype)  # pyright: ignore[reportReturnType]
    return F.rms_norm(x_ND, weight_D.shape, weight_D, eps).to(dtype)


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x_ND, weight_D)
        ctx.eps = eps
        return F.rms_norm(x_ND, weight_D.shape, weight_D, eps).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x_ND, weight_D = ctx.saved_tensors
        width = x_ND.shape[-1]
        r_N1 = torch.linalg.vector_norm(x_ND, dim=-1, keepdim=True).square_().div_(width).add_(ctx.eps).rsqrt_()
        g_ND = grads[0] * weight_D
        c_N1 = torch.linalg.vecdot(g_ND, x_ND).unsqueeze(-1).mul_(r_N1 * r_N1).div_(-width)
        return g_ND.addcmul_(x_ND, c_N1).mul_(r_N1), None, None, None


def added(x_ND: Tensor, y_ND: Tensor) -> Tensor:
    """The residual stream x and what a layer adds, whose memory is used where its type is that of the sum."""
    return y_ND.add_(x_ND) if y_ND.dtype == x_ND.dtype else x_ND + y_ND


def project(x_ND: Tensor, projection: Projection, lora: Lora | None) -> Tensor:
    """x @ W^T + bias, plus the adapter's scale * (x @ A_i^T) @ B_i^T on the outputs of each part i.

    x has the type of W, as have the outputs.
    """
    if not torch.is_grad_enabled():
        return project_forward(x_ND, projection, lora)[0]
    tensors = lora.tensors if lora is not None else ()
    return _Project.apply(x_ND, projection, lora, *tensors)  # pyright: ignore[reportReturnType]


def project_forward(x_ND: Tensor, projection: Projection, lora: Lora | None) -> tuple[Tensor, Tensor | None]:
    """The outputs, and x @ A^T, which the backward needs."""
    if lora is None:
        return linear(x_ND, projection.weight_ED, projection.bias_E), None
    h_NR = linear(x_ND, lora.read_a_RD)
    return plus(x_ND, projection.weight_ED, projection.bias_E, linear(h_NR, lora.scaled_b_ER)), h_NR


def logits_forward(x_ND: Tensor, head: Projection, lora: Lora | None) -> tuple[Tensor, Tensor | None]:
    """As `project_forward`, in fp32: rounded to eight bits, the likeliest of many tokens would be equal."""
    logits_NV = unrounded(x_ND, head.weight_ED, head.bias_E)
    if lora is None:
        return logits_NV, None
    h_NR = linear(x_ND, lora.read_a_RD)
    return logits_NV.add_(linear(h_NR, lora.scaled_b_ER)), h_NR


def project_backward(
    dy_NE: Tensor, x_ND: Tensor, h_NR: Tensor | None, projection: Projection, lora: Lora | None, need_dx: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of x (None if not needed) and, in fp32, of the adapter's tensors."""
    weight_DE = projection.weight_ED.t()
    if lora is None or h_NR is None:
        return (linear(dy_NE, weight_DE) if need_dx else None,)
    g_NR = linear(dy_NE, lora.scaled_b_ER.t())
    dx_ND = plus(dy_NE, weight_DE, None, linear(g_NR, lora.read_a_RD.t())) if need_dx else None
    da_RD = linear(g_NR.t(), x_ND.t()).float()
    db_RE = linear(h_NR.t(), dy_NE.t())
    return dx_ND, da_RD, *lora.split(db_RE.t())


class _Project(Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, projection: Projection, lora: Lora | None, *tensors: Tensor) -> Tensor:
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


def gated(gate_up_NF: Tensor) -> Tensor:
    """silu(gate) * up of a fused gate-up projection."""
    if gate_up_NF.requires_grad:
        return _Gated.apply(gate_up_NF)  # pyright: ignore[reportReturnType]
    gate_NF, up_NF = gate_up_NF.chunk(2, dim=-1)
    return F.silu(gate_NF).mul_(up_NF)


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate_up_NF: Tensor) -> Tensor:
        gate_NF, up_NF = gate_up_NF.chunk(2, dim=-1)
        silu_NF = F.silu(gate_NF)
        ctx.save_for_backward(gate_up_NF, silu_NF)
        return silu_NF * up_NF

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gate_up_NF, silu_NF), (dy_NF, *_) = ctx.saved_tensors, grads
        gate_NF, up_NF = gate_up_NF.chunk(2, dim=-1)
        dx_NF = torch.empty_like(gate_up_NF)
        dgate_NF, dup_NF = dx_NF.chunk(2, dim=-1)
        torch.mul(silu_NF, dy_NF, out=dup_NF)
        torch.ops.aten.silu_backward.grad_input(dy_NF * up_NF, gate_NF, grad_input=dgate_NF)
        return dx_NF
