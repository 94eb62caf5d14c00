"""The decoder, once, for training, prefill and decoding.

Owns: the order of operations from tokens to the final hidden state; log-probabilities in chunks.
Never: knows what a batch looks like: positions are in the grid, and attention is a strategy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from halteres.engine.torch.attention import Attention
from halteres.engine.torch.functions import added, gated, logits_forward, project, project_backward, rms_norm
from halteres.engine.torch.fused import FusedModel
from halteres.engine.torch.heads import Grid, Rotation, split_heads
from halteres.engine.torch.lora import Adaptation, Adaptations
from halteres.engine.torch.matmul import LEAST_ROWS, linear
from halteres.engine.torch.model import BaseModel, Projection
from halteres.engine.torch.transformers_model import TransformersModel


def hidden_states(
    base: BaseModel,
    lora: Adaptations,
    tokens_N: Tensor,
    grid: Grid,
    attention: Attention,
    *,
    recompute: bool = False,
) -> Tensor:
    """The final, normalised hidden state of every token, N x D, in the type of the base's weights.

    The residual stream, norms and softmax are fp32. `recompute`: for the backward, each layer keeps its input alone
    and is computed once more there, to the same bits (of models that transformers computes, layers keep everything).
    """
    if isinstance(base, TransformersModel):
        return base.hidden_states(lora, tokens_N, grid, attention)
    assert isinstance(base, FusedModel)  # noqa: S101 - for the type checker
    x_ND, rotation = base.embedding_VD.index_select(0, tokens_N).float(), Rotation.of(base, grid)

    def after(i: int, x_ND: Tensor) -> Tensor:
        layer = base.layers[i]
        n_ND = rms_norm(x_ND, layer.attention_norm_D, base.norm_eps, base.operands)
        heads = split_heads(base, layer, grid, rotation, project(n_ND, layer.qkv, lora.get(layer.qkv)))
        x_ND = added(x_ND, project(attention(i, heads).to(base.operands), layer.out, lora.get(layer.out)))
        n_ND = rms_norm(x_ND, layer.mlp_norm_D, base.norm_eps, base.operands)
        a_NF = gated(project(n_ND, layer.gate_up, lora.get(layer.gate_up)))
        return added(x_ND, project(a_NF, layer.down, lora.get(layer.down)))

    for i in range(len(base.layers)):
        if recompute and torch.is_grad_enabled():
            x_ND = checkpoint(after, i, x_ND, use_reentrant=False, preserve_rng_state=False)
        else:
            x_ND = after(i, x_ND)
    return rms_norm(x_ND, base.final_norm_D, base.norm_eps, base.operands)


def head_logits(base: BaseModel, lora: Adaptations, hidden_ND: Tensor) -> Tensor:
    """Logits of every token, N x V, fp32, without gradient."""
    return logits_forward(hidden_ND, base.head, lora.get(base.head))[0]


def target_logprobs(
    base: BaseModel,
    lora: Adaptations,
    hidden_ND: Tensor,
    targets: Tensor,
    elements: int,
    expected_N: Tensor | None = None,
) -> Tensor:
    """log-softmax at temperature 1 of each token's target, or targets: N or N x K, as they are.

    At most `elements` logits exist at once. `expected` says which tokens will probably have a gradient: it costs them
    no second look at their logits.
    """
    rows = max(LEAST_ROWS, elements // base.vocabulary // LEAST_ROWS * LEAST_ROWS)
    head = lora.get(base.head)
    tensors = head.tensors if head is not None else ()
    targets_NK = targets.view(targets.shape[0], -1)
    found_NK = _TargetLogprobs.apply(hidden_ND, targets_NK, base.head, head, rows, expected_N, *tensors)
    return found_NK.view_as(targets)  # pyright: ignore[reportOptionalMemberAccess]


def _chunks(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))


class _TargetLogprobs(Function):
    """The gradient of a single target's log-probability is a number times W[target] - p @ W, which the forward computes
    for the rows that are expected to have one, while it has their logits: forward and backward of the head in one.

    Of other rows, and beside an adapter of the head or several targets, the backward computes those whose gradient is
    not zero, and their logits again, if there are several chunks. What a single chunk keeps instead is no more than
    what the forward held anyhow.
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
        logprobs_NK, kept = x_ND.new_empty(targets_NK.shape, dtype=torch.float32), None
        for chunk in _chunks(x_ND.shape[0], rows):
            logits_CV, h_CR = logits_forward(x_ND[chunk], head, lora)
            logprobs_CV = torch.log_softmax(logits_CV, dim=1)
            logprobs_NK[chunk] = logprobs_CV.gather(1, targets_NK[chunk])
            if slopes_ND is not None and expected_N is not None:
                rows_E = expected_N[chunk].nonzero().squeeze(1)
                p_EV = (logprobs_CV if len(rows_E) == len(logprobs_CV) else logprobs_CV[rows_E]).exp_()
                own_ED = head.weight_ED.index_select(0, targets_NK[chunk][rows_E, 0]).to(x_ND.dtype)
                slopes_ND[chunk][rows_E] = own_ED.sub_(linear(p_EV.to(x_ND.dtype), head.weight_ED.t()))
            else:
                kept = logprobs_CV, h_CR
        ctx.save_for_backward(x_ND, targets_NK, slopes_ND, expected_N)
        ctx.head, ctx.lora, ctx.rows = head, lora, rows
        ctx.kept = kept if x_ND.shape[0] <= rows else None
        return logprobs_NK

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x_ND, targets_NK, slopes_ND, expected_N), (g_NK, *_) = ctx.saved_tensors, grads
        dx_ND = torch.zeros_like(x_ND) if slopes_ND is None else slopes_ND.mul_(g_NK)
        live_N = g_NK.any(1) if slopes_ND is None else g_NK.any(1) & ~expected_N
        live_M = live_N.nonzero().squeeze(1)
        sums: list[Tensor] = []
        for chunk in _chunks(live_M.shape[0], ctx.rows):
            rows_C = live_M[chunk]
            x_CD, g_CK = x_ND[rows_C], g_NK[rows_C]
            p_CV, h_CR = _TargetLogprobs.probabilities(ctx, x_CD, rows_C)
            d_CV = p_CV.mul_(-g_CK.sum(1, keepdim=True))
            d_CV.scatter_add_(1, targets_NK[rows_C], g_CK)
            dx_CD, *rest = project_backward(d_CV.to(x_CD.dtype), x_CD, h_CR, ctx.head, ctx.lora, True)
            dx_ND[rows_C] = dx_CD  # pyright: ignore[reportArgumentType]
            found = [tensor for tensor in rest if tensor is not None]
            sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
        ctx.kept = None
        return dx_ND, *(None,) * 5, *(sums or [None] * (len(ctx.needs_input_grad) - 6))

    @staticmethod
    def probabilities(ctx: Any, x_CD: Tensor, rows_C: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of these rows, and what the adapter's A makes of them."""
        if ctx.kept is None:
            logits_CV, h_CR = logits_forward(x_CD, ctx.head, ctx.lora)
            return torch.softmax(logits_CV, dim=1), h_CR
        logprobs_NV, h_NR = ctx.kept
        return logprobs_NV[rows_C].exp_(), None if h_NR is None else h_NR[rows_C]
