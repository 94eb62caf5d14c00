"""Decoders of the families whose layers are computed here: projections that read the same input are one matmul.

Owns: which models these are; their weights, taken from a transformers model, one copy.
Never: trains, samples, downloads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halteres.engine.torch.model import BaseModel, Part, Projection, eos_tokens

FAMILIES = ("qwen3", "qwen2", "llama")
"""`model_type`s whose decoder layers have the shape that `forward` computes."""

ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles do not depend on the length of the sequence."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """Weights of the norms of queries and keys, head by head (J = query and key heads)."""

    weight_J1W: Tensor  # fp32, as all norms

    @classmethod
    def of(cls, q_W: Tensor, k_W: Tensor, heads: int, kv_heads: int) -> HeadNorm:
        """One weight for all query heads, one for all key heads."""
        return cls(torch.cat([q_W.expand(heads, -1), k_W.expand(kv_heads, -1)]).unsqueeze(1).float())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """One decoder layer."""

    attention_norm_D: Tensor
    qkv: Projection
    qk_norm: HeadNorm | None
    out: Projection
    mlp_norm_D: Tensor
    gate_up: Projection
    down: Projection

    @property
    def attention(self) -> tuple[Projection, ...]:
        """See `LayerProjections`."""
        return self.qkv, self.out

    @property
    def mlp(self) -> tuple[Projection, ...]:
        """See `LayerProjections`."""
        return self.gate_up, self.down


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusedModel(BaseModel):
    """One of `FAMILIES`. P positions at most."""

    norm_eps: float
    layers: tuple[Layer, ...]
    final_norm_D: Tensor
    cos_PW: Tensor
    sin_PW: Tensor  # the sign of the rotation folded in: minus in the first half


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


def extract(model: Any) -> FusedModel:
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
        eos_tokens=eos_tokens(model),
        num_parameters=model.num_parameters(),
        embedding_VD=embedding,
        layers=tuple(_layer(f"model.layers.{i}", module, config) for i, module in enumerate(body.layers)),
        final_norm_D=body.norm.weight.detach().float(),
        head=_fuse("", [("lm_head", model.lm_head)]),
        cos_PW=cos[0].contiguous(),
        sin_PW=(sin[0] * sign).contiguous(),
    )


def _layer(name: str, module: Any, config: Any) -> Layer:
    attention, mlp = module.self_attn, module.mlp
    norms = [child.weight.detach() for n, child in attention.named_children() if n in ("q_norm", "k_norm")]
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    qkv = [(f"{n}_proj", attention.get_submodule(f"{n}_proj")) for n in "qkv"]
    return Layer(
        attention_norm_D=module.input_layernorm.weight.detach().float(),
        qkv=_fuse(f"{name}.self_attn.", qkv),
        qk_norm=HeadNorm.of(norms[0], norms[1], heads, kv_heads) if norms else None,
        out=_fuse(f"{name}.self_attn.", [("o_proj", attention.o_proj)]),
        mlp_norm_D=module.post_attention_layernorm.weight.detach().float(),
        gate_up=_fuse(f"{name}.mlp.", [("gate_proj", mlp.gate_proj), ("up_proj", mlp.up_proj)]),
        down=_fuse(f"{name}.mlp.", [("down_proj", mlp.down_proj)]),
    )


def _fuse(prefix: str, modules: list[tuple[str, nn.Linear]]) -> Projection:
    """One projection of several modules, whose own weights are let go of at once, so that no model is held twice; a
    single module keeps its own storage (a tied head stays tied)."""
    parts, start = [], 0
    for name, module in modules:
        parts.append(Part(module=prefix + name, start=start, stop=start + module.out_features))
        start += module.out_features
    weights = [module.weight.detach() for _, module in modules]
    # torch's stub says that a bias is always there
    biases = [m.bias.detach() for _, m in modules if m.bias is not None]  # pyright: ignore[reportUnnecessaryComparison]
    fused = Projection(
        parts=tuple(parts),
        weight_ED=weights[0] if len(weights) == 1 else torch.cat(weights),
        bias_E=torch.cat(biases) if biases else None,
    )
    if len(modules) > 1:
        for _, module in modules:
            del module.weight
    return fused
