"""Decoders of any family that transformers computes, with our attention and adapters inside.

transformers' attention interface is the place where queries meet keys; adapters are on every plain
linear module but routers. At load a model has to agree with transformers' own logits. A window of
attention is none of ours: sequences end where the smallest window of a layer does.

Slower than `FusedModel`, which joins projections of one input and knows its backward.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halteres.engine.shapes import kind_of
from halteres.engine.torch.attention import Causal
from halteres.engine.torch.model import Attention, BaseModel, Grid, Heads, Layer
from halteres.engine.torch.projections import (
    Adaptations,
    Linear,
    Part,
    Projection,
    Weights,
    operand_type,
    project,
)
from halteres.errors import InvalidConfig

ATTENTION = "halteres"  # the name of our attention in transformers' register
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Linear modules that choose experts: PEFT leaves them alone, too, unless they are named."""

TRIAL_SHAPE = 2, 24
STRETCHED = ("dynamic", "longrope")
"""Rotary embeddings whose angles change once some row of a batch is longer than the model was first
made for.
"""

UNBOUNDED = 1 << 17  # positions of a model that names no bound
AGREES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""The largest difference of two logits, relative to the largest logit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransformersModel(BaseModel):
    """A decoder as transformers holds it."""

    body: Any  # from tokens to the final hidden state

    def hidden_states(
        self,
        lora: Adaptations,
        tokens_N: Tensor,
        grid: Grid,
        attention: Attention,
        *,
        recompute: bool = False,
    ) -> Tensor:
        """See `BaseModel`; the residual stream has the type of the weights."""
        shape, token = (grid.rows, grid.length), _pass.set(_Pass(lora, attention, recompute))
        try:
            output = self.body(
                input_ids=tokens_N.view(shape),
                position_ids=grid.positions_AT.expand(shape),
                use_cache=False,
            )
        finally:
            _pass.reset(token)
        return output.last_hidden_state.view(tokens_N.shape[0], -1).to(self.operands)


@dataclass(frozen=True, slots=True)
class _Pass:
    lora: Adaptations
    attention: Attention
    recompute: bool  # layers are computed once more in the backward


_pass: ContextVar[_Pass] = ContextVar("pass")
"""What the modules of a pass in progress need to know."""


class UnsupportedAttention(Exception):
    """Attention that ours is not."""


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **how: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface, with the attention of the pass."""
    return attend(_pass.get().attention, module, query, key, value, **how), None


def attend(
    attention: Attention,
    module: Any,
    query: Tensor,  # B x query heads x T x W
    key: Tensor,  # B x key heads x T x W
    value: Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> Tensor:
    """What transformers' attention interface returns, by an attention of ours; B x T x query heads
    x W. UnsupportedAttention where the module asks for what ours is not.
    """
    if key.shape != value.shape:
        raise UnsupportedAttention(f"keys are {key.shape[-1]} wide, values {value.shape[-1]}")
    if softcap is not None or s_aux is not None:
        raise UnsupportedAttention(
            "attention scores are capped" if softcap is not None else "attention has sinks"
        )
    batch, heads, length, width = query.shape
    key_heads = key.shape[1]
    factor = 1.0 if scaling is None else scaling * math.sqrt(width)
    if not math.isclose(factor, 1.0):
        query = query * factor
    rows = (batch * key_heads, length, width)
    cached = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32
    attended = cached if query.device.type != "cpu" else torch.float32
    found = Heads(
        query.reshape(rows[0], -1, length, width).to(attended),
        *(part.reshape(rows).to(cached).to(attended) for part in (key, value)),
    )
    return attention(module.layer_idx, found).view(batch, length, heads, width).to(query.dtype)


def _projected(projection: Projection, x: Tensor) -> Tensor:
    """A linear module's forward, with the adapter of the pass."""
    lora = _pass.get().lora
    x_ND = x.reshape(-1, x.shape[-1]).to(operand_type(projection.weight_ED))
    return project(x_ND, projection, lora.get(projection)).to(x.dtype).view(*x.shape[:-1], -1)


def wrap(
    model: Any, eos_tokens: tuple[int, ...], shard_on: torch.device | None = None
) -> TransformersModel:
    """A causal language model of transformers, its weights frozen.

    Args:
        shard_on: of several ranks, the device of each, on which it has its part of every layer.

    Raises:
        InvalidConfig: what it computes with our attention inside is not what transformers computes;
            or it cannot be sharded.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)
    model.eval()
    config, name = model.config.get_text_config(), type(model).__name__
    decoder, linear = _decoder_layers(model, config), _own_weights
    if shard_on is not None:
        linear = _shard(model, decoder, config, shard_on)
    embedding, head = model.get_input_embeddings().weight.detach(), model.get_output_embeddings()
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(embedding.shape[0], TRIAL_SHAPE, generator=generator).to(
        embedding.device
    )
    # not in inference mode: sharded weights count the versions of tensors
    with torch.no_grad():
        expected_BTV = model(input_ids=tokens_BT, use_cache=False).logits
    model.set_attn_implementation(ATTENTION)
    for layer in decoder or ():
        layer.forward = partial(_layer_forward, layer.forward)
    head_name = next(n for n, module in model.named_modules() if module is head)
    wrapped = TransformersModel(
        architecture=name,
        heads=0,
        kv_heads=0,
        head_width=0,
        context=_context(config),
        vocabulary=embedding.shape[0],
        eos_tokens=eos_tokens,
        num_parameters=model.num_parameters(),
        embedding_VD=embedding,
        layers=_layers(model, head, linear),
        head=_projection(head_name, head, _own_weights),
        body=model.base_model,
    )
    return _agreed(wrapped, tokens_BT, expected_BTV)


def _agreed(model: TransformersModel, tokens_BT: Tensor, expected_BTV: Tensor) -> TransformersModel:
    """The model, with the shapes that its attention has shown."""
    grid = Grid.padded(model, *tokens_BT.shape)
    seen: dict[int, tuple[int, int, int]] = {}  # layer: query heads, key heads, width
    causal = Causal(grid)

    def attention(layer: int, heads: Heads) -> Tensor:
        key_heads = heads.k_XTW.shape[0] // grid.rows
        seen[layer] = key_heads * heads.q_XGTW.shape[1], key_heads, heads.k_XTW.shape[2]
        return causal(layer, heads)

    try:
        with torch.no_grad():
            hidden_ND = model.hidden_states({}, tokens_BT.view(-1), grid, attention)
            found_BTV = project(hidden_ND, model.head, None).view_as(expected_BTV)
    except UnsupportedAttention as unsupported:
        raise _refused(model, f"In it, {unsupported}.") from None
    if sorted(seen) != list(range(len(model.layers))) or len(set(seen.values())) != 1:
        raise _refused(
            model, "Not all of its layers have attention of one shape that can be replaced."
        )
    if not any(layer.attention or layer.mlp for layer in model.layers):
        raise _refused(
            model, "Its layers have no plain linear modules, which an adapter could change."
        )
    apart = float((found_BTV - expected_BTV).abs().max() / expected_BTV.abs().max())
    if not apart <= AGREES[model.dtype]:
        raise _refused(
            model, f"Its logits are {apart:.1%} of the largest apart from transformers' own."
        )
    heads, kv_heads, width = seen[0]
    return replace(model, heads=heads, kv_heads=kv_heads, head_width=width)


def _refused(model: TransformersModel, why: str) -> InvalidConfig:
    return InvalidConfig(
        f"{model.architecture} cannot be computed here.",
        why,
        "Use a decoder with full attention and plain output logits, such as Qwen3, Llama, Mistral "
        "or Phi-3.",
    )


def _context(config: Any) -> int:
    """Positions, up to the smallest window that a layer's attention has, and to where its rotary
    embedding changes.
    """
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    window = getattr(config, "sliding_window", None) if "sliding_attention" in kinds else None
    if not getattr(config, "use_sliding_window", True):
        window = None
    most = _positions(config)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in STRETCHED:
            first = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            most = min(most, first or most)
    return min(most, window or most)


def _positions(config: Any) -> int:
    """That the model was made for."""
    return getattr(config, "max_position_embeddings", None) or UNBOUNDED


def _decoder_layers(model: Any, config: Any) -> nn.ModuleList | None:
    """The list of all layers; None where there is none."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
            return module
    return None


def _shard(
    model: Any, decoder: nn.ModuleList | None, config: Any, device: torch.device
) -> Callable[[nn.Linear], Linear]:
    """Shard it; how a projection then reads a module's weights."""
    from halteres.engine.torch.sharding import ShardedLinear, shard

    name = type(model).__name__
    if decoder is None:
        raise InvalidConfig(
            f"{name} cannot be sharded.",
            "Its layers are no single list.",
            "Train a model that fits, without inference.shard.",
        )
    if _context(config) < _positions(config):
        raise InvalidConfig(
            f"{name} cannot be sharded.",
            f"Its attention is exact up to {_context(config)} of {_positions(config)} positions.",
            "Without inference.shard, sequences up to that length are computed.",
        )
    shard(model, decoder, device)
    return ShardedLinear.of


def _layer_forward(inner: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """A layer's forward, of which the backward keeps the input alone, if the pass wants that. The
    second computation runs where the pass is over, and on a GPU on another thread: it brings the
    pass along.
    """
    taken = _pass.get()
    if not (taken.recompute and torch.is_grad_enabled()):
        return inner(*args, **named)

    def compute(*args: Any, **named: Any) -> Any:
        token = _pass.set(taken)
        try:
            return inner(*args, **named)
        finally:
            _pass.reset(token)

    return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, **named)


def _layers(
    model: Any, head: nn.Module, linear: Callable[[nn.Linear], Linear]
) -> tuple[Layer, ...]:
    """Plain linear modules by layer, which is the first number in their names."""
    kinds: defaultdict[int, tuple[list[Projection], list[Projection]]] = defaultdict(
        lambda: ([], [])
    )
    for name, module in model.named_modules():
        number = re.search(r"\.(\d+)\.", name)
        if (
            type(module) is not nn.Linear
            or module is head
            or number is None
            or name.rpartition(".")[2] in ROUTERS
        ):
            continue
        projection = _projection(name, module, linear)
        module.forward = partial(_projected, projection)  # pyright: ignore[reportAttributeAccessIssue]
        kinds[int(number[1])][kind_of(name) == "mlp"].append(projection)
    count = model.config.get_text_config().num_hidden_layers
    return tuple(Layer(attention=tuple(kinds[i][0]), mlp=tuple(kinds[i][1])) for i in range(count))


def _projection(name: str, module: nn.Linear, linear: Callable[[nn.Linear], Linear]) -> Projection:
    parts = (Part(module=name, start=0, stop=module.out_features),)
    return Projection(parts=parts, source=linear(module))


def _own_weights(module: nn.Linear) -> Linear:
    bias_E: Any = module.bias
    if bias_E is not None:
        bias_E = bias_E.detach()
    return Weights(module.weight.detach(), bias_E)
