"""The base model, whoever computes it: frozen weights, and what of them an adapter may change.

Owns: what its two implementations have in common. `fused`: three families, computed here; `transformers_model`: other
decoders, computed by transformers with our attention and adapters inside.
Never: computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from halteres.engine.torch.matmul import operand_type


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


class LayerProjections(Protocol):
    """The projections of one decoder layer, each kind in the order of the computation."""

    @property
    def attention(self) -> tuple[Projection, ...]:
        """Of queries, keys, values, and of what attention gives."""
        ...

    @property
    def mlp(self) -> tuple[Projection, ...]:
        """All others."""
        ...


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
    layers: Sequence[LayerProjections]
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
        """Of queries, keys and values as attention reads them: fp32; on a GPU bfloat16 where the weights are."""
        return self.dtype if self.device.type != "cpu" else torch.float32

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values that are kept. Training rounds to it, too: both see the same numbers."""
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of one position, all layers."""
        return 2 * len(self.layers) * self.kv_heads * self.head_width * self.cache_dtype.itemsize


def eos_tokens(model: Any) -> tuple[int, ...]:
    """The tokens that end a text, by its generation settings or else its configuration."""
    eos = model.generation_config.eos_token_id
    eos = model.config.get_text_config().eos_token_id if eos is None else eos
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
