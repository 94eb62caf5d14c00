"""The base model: frozen weights taken from a transformers model, projections of one input fused.

Owns: reading a model folder, the families that are understood, one copy of the weights.
Never: trains, samples, downloads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halteres.errors import InvalidConfig, NotFound, boundary

FAMILIES = ("qwen3", "qwen2", "llama")
"""`model_type`s whose decoder layers have the shape that `forward` computes."""

ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles do not depend on the length of the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One linear module inside a projection, by its transformers name, and the outputs that are its own."""

    module: str  # e.g. model.layers.0.self_attn.q_proj
    start: int
    stop: int

    @property
    def leaf(self) -> str:
        """The last part of the name: what PEFT calls a target module."""
        return self.module.rpartition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """Linear modules that read the same input, as one matmul: E outputs of D inputs."""

    parts: tuple[Part, ...]
    weight_ED: Tensor
    bias_E: Tensor | None

    @property
    def inputs(self) -> int:
        """D."""
        return self.weight_ED.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """Weights of the norms of queries and keys, head by head (J = query and key heads)."""

    weight_J1W: Tensor
    swapped_J1W: Tensor  # with the halves of W exchanged, for what the rotation brings over

    @classmethod
    def of(cls, q_W: Tensor, k_W: Tensor, heads: int, kv_heads: int) -> HeadNorm:
        """One weight for all query heads, one for all key heads."""
        weight_JW = torch.cat([q_W.expand(heads, -1), k_W.expand(kv_heads, -1)])
        return cls(weight_JW.unsqueeze(1), weight_JW.roll(q_W.shape[0] // 2, dims=1).unsqueeze(1))


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
    def projections(self) -> tuple[Projection, ...]:
        """All four, in the order of the computation."""
        return self.qkv, self.out, self.gate_up, self.down


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BaseModel:
    """A decoder-only model with frozen weights. P positions at most."""

    architecture: str
    heads: int
    kv_heads: int
    head_width: int
    norm_eps: float
    context: int
    vocabulary: int
    eos_tokens: tuple[int, ...]
    num_parameters: int
    embedding_VD: Tensor
    layers: tuple[Layer, ...]
    final_norm_D: Tensor
    head: Projection
    cos_PW: Tensor
    sin_PW: Tensor  # the sign of the rotation folded in: minus in the first half

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding_VD.device

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of one position, all layers."""
        return 2 * len(self.layers) * self.kv_heads * self.head_width * self.embedding_VD.element_size()


def load_base(folder: Path, dtype: torch.dtype, device: torch.device) -> BaseModel:
    """Read a model folder in Hugging Face format.

    Raises:
        NotFound: the folder is missing or holds no config.json.
        InvalidConfig: an architecture or a variant of it that is not understood.
    """
    if not (folder / "config.json").is_file():
        raise NotFound(
            f"There is no model in {folder}.",
            "config.json is missing." if folder.is_dir() else "The folder does not exist.",
            "Name a model folder in Hugging Face format, or 'halteres/tiny'.",
        )
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with boundary(InvalidConfig, f"Reading the model in {folder}"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        _check(config, folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return _extract(model.requires_grad_(False).to(device))  # pyright: ignore[reportArgumentType]


def _check(config: Any, folder: Path) -> None:
    """Refuse what `forward` would compute wrongly."""
    values = config.to_dict()
    kinds = set(values.get("layer_types") or ["full_attention"])
    rope = (values.get("rope_parameters") or {}).get("rope_type", "default")
    problems = {
        f"model_type '{config.model_type}'": config.model_type not in FAMILIES,
        f"layers {sorted(kinds)}": kinds != {"full_attention"},
        f"activation '{values.get('hidden_act')}'": values.get("hidden_act") != "silu",
        f"rotary embedding '{rope}'": rope not in ROPES,
    }
    found = [problem for problem, holds in problems.items() if holds]
    if found:
        raise InvalidConfig(
            f"The model in {folder} cannot be used.",
            f"Not understood: {', '.join(found)}.",
            f"Known families: {', '.join(FAMILIES)}, with full attention and silu.",
        )


def _extract(model: Any) -> BaseModel:
    config, body = model.config, model.model
    embedding = body.embed_tokens.weight.detach()
    context = config.max_position_embeddings
    positions = torch.arange(context, device=embedding.device)[None]
    cos, sin = body.rotary_emb(embedding, positions)
    width = cos.shape[-1]
    sign = torch.cat([-torch.ones(width // 2), torch.ones(width // 2)]).to(sin)
    eos = model.generation_config.eos_token_id
    eos = config.eos_token_id if eos is None else eos
    return BaseModel(
        architecture=type(model).__name__,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_width=width,
        norm_eps=config.rms_norm_eps,
        context=context,
        vocabulary=embedding.shape[0],
        eos_tokens=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        num_parameters=model.num_parameters(),
        embedding_VD=embedding,
        layers=tuple(_layer(f"model.layers.{i}", module, config) for i, module in enumerate(body.layers)),
        final_norm_D=body.norm.weight.detach(),
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
        attention_norm_D=module.input_layernorm.weight.detach(),
        qkv=_fuse(f"{name}.self_attn.", qkv),
        qk_norm=HeadNorm.of(norms[0], norms[1], heads, kv_heads) if norms else None,
        out=_fuse(f"{name}.self_attn.", [("o_proj", attention.o_proj)]),
        mlp_norm_D=module.post_attention_layernorm.weight.detach(),
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
