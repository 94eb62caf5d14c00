"""Decoder-only models with frozen weights: what all have in common, and the families whose layers
are computed here.

`FusedModel` joins projections that read the same input, and writes its backward out;
`transformers_model` has the others, computed by transformers with our attention and adapters
inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from halteres.engine.torch.projections import (
    Adaptations,
    Part,
    Projection,
    Weights,
    operand_type,
    project,
)
from halteres.models.shape import FAMILIES

ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles do not depend on the length of the sequence."""


@dataclass(frozen=True, slots=True)
class Grid:
    """How the N = B * T tokens of a pass lie, and their positions: A is B where every row has its
    own, else 1.
    """

    rows: int  # B
    length: int  # T
    positions_AT: Tensor

    @classmethod
    def padded(cls, base: BaseModel, rows: int, length: int) -> Grid:
        """B rows at positions 0 to T - 1."""
        return cls(rows, length, torch.arange(length, device=base.device)[None])

    @classmethod
    def following(cls, base: BaseModel, starts: Sequence[int], length: int) -> Grid:
        """B rows of T tokens, each from a position of its own on; padding may lie beyond the last
        position.
        """
        if not any(starts):
            return cls.padded(base, len(starts), length)
        positions_BT = torch.tensor(starts)[:, None] + torch.arange(length)
        return cls(len(starts), length, positions_BT.clamp_(max=base.context - 1).to(base.device))

    @classmethod
    def single(cls, positions_B: Tensor) -> Grid:
        """One token per row, each at a position of its own."""
        return cls(positions_B.shape[0], 1, positions_B[:, None])


@dataclass(frozen=True, slots=True)
class Heads:
    """Queries of G heads per key head, keys and values; X = B * key heads."""

    q_XGTW: Tensor
    k_XTW: Tensor
    v_XTW: Tensor


class Attention(Protocol):
    """How the tokens of one pass see each other and the past."""

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """The attended values, N x (H*W)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """What an adapter may change of one decoder layer: projections in the order of the
    computation.
    """

    attention: tuple[Projection, ...]  # of queries, keys, values, and of what attention gives
    mlp: tuple[Projection, ...]  # all others


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BaseModel:
    """A decoder-only model with frozen weights."""

    architecture: str
    heads: int
    kv_heads: int
    head_width: int
    context: int
    vocabulary: int
    eos_tokens: tuple[int, ...]
    num_parameters: int
    embedding_VD: Tensor
    layers: Sequence[Layer]
    head: Projection

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding_VD.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.embedding_VD.dtype

    @property
    def operands(self) -> torch.dtype:
        """Of what matmuls read and give beside the weights; everything else is computed in fp32."""
        return operand_type(self.embedding_VD)

    @property
    def attention_dtype(self) -> torch.dtype:
        """Of queries, keys and values as attention reads them: fp32; on a GPU bfloat16 where the
        weights are.
        """
        return self.dtype if self.device.type != "cpu" else torch.float32

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of cached keys and values. Training rounds to it, too: both see the same numbers."""
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of one position, all layers."""
        return 2 * len(self.layers) * self.kv_heads * self.head_width * self.cache_dtype.itemsize

    def hidden_states(
        self,
        lora: Adaptations,
        tokens_N: Tensor,
        grid: Grid,
        attention: Attention,
        *,
        recompute: bool = False,
    ) -> Tensor:
        """The final, normalised hidden state of every token, N x D, in the type of the base's
        weights.

        `recompute`: for the backward, each layer keeps its input alone and is computed once more
        there, to the same bits.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusedLayer(Layer):
    """Its attention is qkv and output, its MLP gate with up, and down. J = query and key heads;
    norms are fp32.
    """

    attention_norm_D: Tensor
    qk_norm_J1W: Tensor | None  # of queries and keys, head by head
    mlp_norm_D: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusedModel(BaseModel):
    """One of `FAMILIES`. P positions at most; the residual stream, norms and softmax are fp32."""

    norm_eps: float
    layers: tuple[FusedLayer, ...]
    final_norm_D: Tensor
    cos_PW: Tensor
    sin_PW: Tensor  # the sign of the rotation folded in: minus in the first half

    def hidden_states(
        self,
        lora: Adaptations,
        tokens_N: Tensor,
        grid: Grid,
        attention: Attention,
        *,
        recompute: bool = False,
    ) -> Tensor:
        """See `BaseModel`."""
        x_ND = self.embedding_VD.index_select(0, tokens_N).float()
        rotation = tuple(
            table[grid.positions_AT].unsqueeze(1) for table in (self.cos_PW, self.sin_PW)
        )

        def after(i: int, x_ND: Tensor) -> Tensor:
            layer, eps, dtype = self.layers[i], self.norm_eps, self.operands
            (qkv, out), (gate_up, down) = layer.attention, layer.mlp
            n_ND = rms_norm(x_ND, layer.attention_norm_D, eps, dtype)
            heads = _split_heads(self, layer, grid, rotation, project(n_ND, qkv, lora.get(qkv)))
            x_ND = _added(x_ND, project(attention(i, heads).to(dtype), out, lora.get(out)))
            n_ND = rms_norm(x_ND, layer.mlp_norm_D, eps, dtype)
            a_NF = gated(project(n_ND, gate_up, lora.get(gate_up)))
            return _added(x_ND, project(a_NF, down, lora.get(down)))

        for i in range(len(self.layers)):
            if recompute and torch.is_grad_enabled():
                x_ND = checkpoint(after, i, x_ND, use_reentrant=False, preserve_rng_state=False)
            else:
                x_ND = after(i, x_ND)
        return rms_norm(x_ND, self.final_norm_D, self.norm_eps, self.operands)


def understands(config: Any) -> bool:
    """Whether a model with this configuration of transformers is computed rightly here."""
    values = config.to_dict()
    rope = (values.get("rope_parameters") or {}).get("rope_type", "default")
    return (
        config.model_type in FAMILIES
        and set(values.get("layer_types") or ["full_attention"]) == {"full_attention"}
        and values.get("hidden_act") == "silu"
        and rope in ROPES
    )


def extract(model: Any, eos_tokens: tuple[int, ...]) -> FusedModel:
    """The frozen weights of a transformers model, and the tables of its rotary embedding."""
    config, body = model.config, model.model
    embedding = body.embed_tokens.weight.detach()
    context = config.max_position_embeddings
    positions = torch.arange(context, device=embedding.device)[None]
    cos, sin = body.rotary_emb(embedding[:1].float(), positions)
    width = cos.shape[-1]
    sign = torch.cat([-torch.ones(width // 2), torch.ones(width // 2)]).to(sin)
    return FusedModel(
        architecture=type(model).__name__,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_width=width,
        norm_eps=config.rms_norm_eps,
        context=context,
        vocabulary=embedding.shape[0],
        eos_tokens=eos_tokens,
        num_parameters=model.num_parameters(),
        embedding_VD=embedding,
        layers=tuple(
            _layer(f"model.layers.{i}", module, config) for i, module in enumerate(body.layers)
        ),
        final_norm_D=body.norm.weight.detach().float(),
        head=_fuse("", [("lm_head", model.lm_head)]),
        cos_PW=cos[0].contiguous(),
        sin_PW=(sin[0] * sign).contiguous(),
    )


def _layer(name: str, module: Any, config: Any) -> FusedLayer:
    attention, mlp = module.self_attn, module.mlp
    norms_W = [
        child.weight.detach()
        for n, child in attention.named_children()
        if n in ("q_norm", "k_norm")
    ]
    sizes = config.num_attention_heads, config.num_key_value_heads
    norms_JW = [norm_W.expand(size, -1) for norm_W, size in zip(norms_W, sizes, strict=False)]
    qkv = [(f"{n}_proj", attention.get_submodule(f"{n}_proj")) for n in "qkv"]
    gate_up = [("gate_proj", mlp.gate_proj), ("up_proj", mlp.up_proj)]
    own, others = f"{name}.self_attn.", f"{name}.mlp."
    return FusedLayer(
        attention=(_fuse(own, qkv), _fuse(own, [("o_proj", attention.o_proj)])),
        mlp=(_fuse(others, gate_up), _fuse(others, [("down_proj", mlp.down_proj)])),
        attention_norm_D=module.input_layernorm.weight.detach().float(),
        qk_norm_J1W=torch.cat(norms_JW).unsqueeze(1).float() if norms_JW else None,
        mlp_norm_D=module.post_attention_layernorm.weight.detach().float(),
    )


def _fuse(prefix: str, modules: list[tuple[str, nn.Linear]]) -> Projection:
    """One projection of several modules, whose own weights are let go of at once, so that no model
    is held twice; a single module keeps its own storage (a tied head stays tied).
    """
    parts, start = [], 0
    for name, module in modules:
        parts.append(Part(module=prefix + name, start=start, stop=start + module.out_features))
        start += module.out_features
    weights = [module.weight.detach() for _, module in modules]
    # torch's stub says that a bias is always there
    biases = [m.bias.detach() for _, m in modules if m.bias is not None]  # pyright: ignore[reportUnnecessaryComparison]
    fused = Projection(
        parts=tuple(parts),
        source=Weights(
            weights[0] if len(weights) == 1 else torch.cat(weights),
            torch.cat(biases) if biases else None,
        ),
    )
    if len(modules) > 1:
        for _, module in modules:
            del module.weight
    return fused


def _split_heads(
    base: FusedModel, layer: FusedLayer, grid: Grid, rotation: tuple[Tensor, ...], qkv_NE: Tensor
) -> Heads:
    """Queries and keys normalised (where the model does) and rotated by tables of A x 1 x T x W,
    values as they are.
    """
    outputs = _Split.apply(qkv_NE, base, layer.qk_norm_J1W, grid, *rotation)
    assert isinstance(outputs, tuple)  # noqa: S101 - for the type checker
    q_BHTW, k_BKTW, v_BKTW = outputs
    group, length, width = base.heads // base.kv_heads, grid.length, base.head_width
    return Heads(
        q_BHTW.view(-1, group, length, width),
        k_BKTW.view(-1, length, width),
        v_BKTW.view(-1, length, width),
    )


class _Split(Function):
    """Split, norm and rotation in one: separate functions would write every intermediate once more.

    J = query and key heads, which are normalised and rotated alike.
    """

    @staticmethod
    def views(qkv_NE: Tensor, base: FusedModel, grid: Grid) -> tuple[Tensor, Tensor]:
        """Queries with keys, and values, B x heads x T x W."""
        heads_BETW = qkv_NE.view(grid.rows, grid.length, -1, base.head_width).transpose(1, 2)
        rotated = base.heads + base.kv_heads
        return heads_BETW[:, :rotated], heads_BETW[:, rotated:]

    @staticmethod
    def forward(
        ctx: Any,
        qkv_NE: Tensor,
        base: FusedModel,
        weight_J1W: Tensor | None,
        grid: Grid,
        cos_A1TW: Tensor,
        sin_A1TW: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sizes = base.heads, base.kv_heads
        x_BJTW, v_BKTW = _Split.views(qkv_NE.float(), base, grid)
        scaled_BJTW = x_BJTW if weight_J1W is None else x_BJTW * weight_J1W
        y_BJTW, r_BJT1 = _swapped(scaled_BJTW).mul_(sin_A1TW).addcmul_(scaled_BJTW, cos_A1TW), None
        if weight_J1W is not None:
            square_BJT1 = torch.linalg.vector_norm(x_BJTW, dim=-1, keepdim=True).square_()
            r_BJT1 = square_BJT1.div_(x_BJTW.shape[-1]).add_(base.norm_eps).rsqrt_()
            q_BHTW, k_BKTW = map(torch.mul, y_BJTW.split(sizes, dim=1), r_BJT1.split(sizes, dim=1))
        else:
            q_BHTW, k_BKTW = (part.contiguous() for part in y_BJTW.split(sizes, dim=1))
        ctx.save_for_backward(qkv_NE, r_BJT1)
        ctx.base, ctx.grid, ctx.tables = base, grid, (weight_J1W, cos_A1TW, sin_A1TW)
        k_BKTW, v_BKTW = (
            x.to(base.cache_dtype).to(base.attention_dtype) for x in (k_BKTW, v_BKTW.contiguous())
        )
        return q_BHTW.to(base.attention_dtype), k_BKTW, v_BKTW

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (qkv_NE, r_BJT1), (weight_J1W, cos_A1TW, sin_A1TW) = ctx.saved_tensors, ctx.tables
        dqkv_NE = torch.empty_like(qkv_NE, dtype=torch.float32)
        (x_BJTW, _), (dx_BJTW, dv_BKTW) = (
            _Split.views(one, ctx.base, ctx.grid) for one in (qkv_NE, dqkv_NE)
        )
        dv_BKTW.copy_(grads[2])
        dy_BJTW = torch.cat(grads[:2], dim=1).float()
        g_BJTW = _swapped(dy_BJTW * sin_A1TW).addcmul_(dy_BJTW, cos_A1TW)
        if r_BJT1 is None:
            dx_BJTW.copy_(g_BJTW)
        else:
            g_BJTW.mul_(weight_J1W)
            x_BJTW = x_BJTW.float()
            c_BJT1 = torch.linalg.vecdot(g_BJTW, x_BJTW).unsqueeze(-1)
            c_BJT1.mul_(r_BJT1.pow(3)).div_(-x_BJTW.shape[-1])
            torch.mul(g_BJTW, r_BJT1, out=dx_BJTW)
            dx_BJTW.addcmul_(x_BJTW, c_BJT1)
        return dqkv_NE.to(qkv_NE.dtype), *(None,) * 5


def _swapped(x: Tensor) -> Tensor:
    """The halves of the last dimension exchanged; a contiguous copy."""
    half = x.shape[-1] // 2
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., :half].copy_(x[..., half:])
    out[..., half:].copy_(x[..., :half])
    return out


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, computed in x's type."""
    if x_ND.requires_grad:
        return _RmsNorm.apply(x_ND, weight_D, eps, dtype)  # pyright: ignore[reportReturnType]
    return F.rms_norm(x_ND, weight_D.shape, weight_D, eps).to(dtype)


class _RmsNorm(Function):
    """As `F.rms_norm`; autograd's backward has a gradient of the weight, too, and takes twice as
    long.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x_ND, weight_D)
        ctx.eps = eps
        return F.rms_norm(x_ND, weight_D.shape, weight_D, eps).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x_ND, weight_D = ctx.saved_tensors
        width = x_ND.shape[-1]
        r_N1 = (
            torch.linalg.vector_norm(x_ND, dim=-1, keepdim=True)
            .square_()
            .div_(width)
            .add_(ctx.eps)
            .rsqrt_()
        )
        g_ND = grads[0] * weight_D
        c_N1 = torch.linalg.vecdot(g_ND, x_ND).unsqueeze(-1).mul_(r_N1 * r_N1).div_(-width)
        return g_ND.addcmul_(x_ND, c_N1).mul_(r_N1), None, None, None


def _added(x_ND: Tensor, y_ND: Tensor) -> Tensor:
    """The residual stream x and what a layer adds, whose memory is used where its type is that of
    the sum.
    """
    return y_ND.add_(x_ND) if y_ND.dtype == x_ND.dtype else x_ND + y_ND


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
