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

from halteres.engine.torch.lora import Adaptation
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


def project(x_ND: Tensor, projection: Projection, lora: Adaptation | None) -> Tensor:
    """x @ W^T + bias, plus the adapter's scale * (x @ A_i^T) @ B_i^T on the outputs of each part i.

    x has the type of W, as have the outputs.
    """
    if not torch.is_grad_enabled():
        return project_forward(x_ND, projection, lora)[0]
    tensors = lora.tensors if lora is not None else ()
    return _Project.apply(x_ND, projection, lora, *tensors)  # pyright: ignore[reportReturnType]


def project_forward(x_ND: Tensor, projection: Projection, lora: Adaptation | None) -> tuple[Tensor, Tensor | None]:
    """The outputs, and x @ A^T, which the backward needs."""
    if lora is None or x_ND.dtype == torch.float32:
        y_NE = linear(x_ND, projection.weight_ED, projection.bias_E)
        return y_NE, None if lora is None else lora.add_to(y_NE, x_ND)
    # Rounded once: what an adapter adds is often smaller than what rounding the sum without it takes.
    added_NE = x_ND.new_zeros((x_ND.shape[0], projection.weight_ED.shape[0]))
    h = lora.add_to(added_NE, x_ND)
    return plus(x_ND, projection.weight_ED, projection.bias_E, added_NE), h


def logits_forward(x_ND: Tensor, head: Projection, lora: Adaptation | None) -> tuple[Tensor, Tensor | None]:
    """As `project_forward`, in fp32: rounded to eight bits, the likeliest of many tokens would be equal."""
    logits_NV = unrounded(x_ND, head.weight_ED, head.bias_E)
    if lora is None or x_ND.dtype == torch.float32:
        return logits_NV, None if lora is None else lora.add_to(logits_NV, x_ND)
    added_NV = x_ND.new_zeros(logits_NV.shape)
    h = lora.add_to(added_NV, x_ND)
    return logits_NV.add_(added_NV), h


def project_backward(
    dy_NE: Tensor, x_ND: Tensor, h_NR: Tensor | None, projection: Projection, lora: Adaptation | None, need_dx: bool
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
    def forward(ctx: Any, x_ND: Tensor, projection: Projection, lora: Adaptation | None, *tensors: Tensor) -> Tensor:
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
