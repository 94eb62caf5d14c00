"""The shape of an adapter: which are allowed, and how it is read off a PEFT folder that somebody else wrote.

A foreign folder's modules are ours by name, with or without `base_model.model.`; `unembed_tokens` is the Tinker API's
name for `lm_head`. What the folder lacks of a family (attention, MLP, unembedding) that it touches is zero: it adds
nothing, and since A and B are both zero it never learns, which is what the folder asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from halteres.engine.protocol import LoraConfig
from halteres.errors import InvalidData, NotFound

MAX_RANK = 512  # larger ones cost more than the full matrices of most models, and servers of PEFT adapters refuse them
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
STATE, OPTIMIZER = "state.json", "optimizer.safetensors"  # files of a checkpoint: PEFT's two, and ours beside them

Kind = Literal["attn", "mlp", "unembed"]

TARGETS_OF_ADAPTERS: tuple[Kind, ...] = ("attn", "mlp", "unembed")

_UNEMBED = ("model.unembed_tokens", "unembed_tokens")
_MOVES_THE_BASE = ("pissa", "olora", "corda", "loftq")
"""Initialisations that change the base weights: such an adapter fits those alone."""
_UNSUPPORTED = [
    "use_dora",
    "fan_in_fan_out",
    "lora_bias",
    "target_parameters",
    "layer_replication",
    "trainable_token_indices",
]


def check_shape(config: LoraConfig) -> None:
    """Refuse an adapter that cannot be, before anything is allocated for it."""
    if not 1 <= config.rank <= MAX_RANK:
        raise InvalidData(f"The rank {config.rank} is out of range.", f"It must be 1 to {MAX_RANK}.", "Choose another.")
    if not (config.alpha > 0 and math.isfinite(config.alpha)):
        raise InvalidData(f"The alpha {config.alpha} is out of range.", "It must be a finite number above 0.")
    if not (config.train_attn or config.train_mlp or config.train_unembed):
        raise InvalidData(
            "This adapter would have no weights.",
            "train_attn, train_mlp and train_unembed are all off.",
            "Switch one of them on.",
        )


def check_files(folder: Path, optimizer: bool) -> None:
    """NotFound if a file is missing that is read from a checkpoint."""
    needed = (CONFIG, WEIGHTS, *((OPTIMIZER, STATE) if optimizer else ()))
    if missing := [name for name in needed if not (folder / name).is_file()]:
        raise NotFound(
            f"The folder {folder} is not the checkpoint that was asked for.",
            f"It lacks {', '.join(missing)}.",
            "Name a folder written by save, or a PEFT adapter; only one saved with the optimiser restores it.",
        )


def foreign_shape(folder: Path, tensors: Iterable[str]) -> LoraConfig:
    """The shape of an adapter that was not written by `save`; `tensors` are the names in its weights.

    Raises:
        InvalidData: the configuration cannot be read, or asks for what this engine does not compute.
    """
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidData(f"{CONFIG} in {folder} cannot be read.", f"{error}.", "Export the adapter again.") from error
    if not isinstance(settings, dict):
        raise _refused(folder, f"{CONFIG} holds no object.")
    _check_settings(settings, folder)
    rank, alpha = settings["r"], float(settings["lora_alpha"])
    if settings.get("use_rslora"):  # alpha / sqrt(r) there, alpha / r here
        alpha *= math.sqrt(rank)
    kinds = {kind_of(module) for module in map(module_of, tensors) if module}
    if not kinds:
        raise _refused(folder, "It holds no LoRA tensors.")
    config = LoraConfig(
        rank=rank, alpha=alpha, train_attn="attn" in kinds, train_mlp="mlp" in kinds, train_unembed="unembed" in kinds
    )
    check_shape(config)
    return config


def module_of(tensor: str) -> str:
    """The module that a LoRA tensor belongs to, by its transformers name; "" for any other tensor.

    >>> module_of("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight")
    'model.layers.0.mlp.up_proj'
    >>> module_of("base_model.model.model.unembed_tokens.lora_B.weight")
    'lm_head'
    """
    for end in (".lora_A.weight", ".lora_B.weight"):
        if tensor.endswith(end):
            module = tensor.removesuffix(end).removeprefix("base_model.model.")
            return "lm_head" if module in _UNEMBED else module
    return ""


def kind_of(module: str) -> Kind:
    """Which switch of an adapter's configuration a module stands under, by its transformers name.

    >>> kind_of("model.layers.0.self_attn.q_proj"), kind_of("gpt_neox.layers.1.mlp.dense_h_to_4h"), kind_of("lm_head")
    ('attn', 'mlp', 'unembed')
    """
    if not any(part.isdigit() for part in module.split(".")):
        return "unembed"
    return "attn" if "attn" in module or "attention" in module else "mlp"


def canonical(tensor: str) -> str:
    """The name under which `save` writes this LoRA tensor; any other name stays as it is."""
    module = module_of(tensor)
    return f"base_model.model.{module}.{tensor[-len('lora_A.weight') :]}" if module else tensor


def _check_settings(settings: dict[str, Any], folder: Path) -> None:
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise _refused(folder, f"'r' is {rank!r}; it must be a whole number, 1 to {MAX_RANK}.")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < 1e9:
        raise _refused(folder, f"'lora_alpha' is {alpha!r}; it must be a number above 0.")
    moves_base = str(settings.get("init_lora_weights")).lower().startswith(_MOVES_THE_BASE)
    for name, refused in (
        *((name, bool(settings.get(name))) for name in _UNSUPPORTED),
        (f"peft_type {settings.get('peft_type')!r}", settings.get("peft_type") not in (None, "LORA")),
        (f"bias {settings.get('bias')!r}", settings.get("bias") not in (None, "none")),
        (f"modules_to_save {settings.get('modules_to_save')}", bool(settings.get("modules_to_save"))),
        ("ranks that differ (rank_pattern)", _varies(settings.get("rank_pattern"), rank)),
        ("alphas that differ (alpha_pattern)", _varies(settings.get("alpha_pattern"), alpha)),
        ("an initialisation that changes the base", moves_base),
    ):
        if refused:
            raise _refused(folder, f"{CONFIG} asks for {name}.")


def _varies(pattern: object, value: float) -> bool:
    return bool(pattern) and (not isinstance(pattern, dict) or any(other != value for other in pattern.values()))


def _refused(folder: Path, why: str) -> InvalidData:
    return InvalidData(
        f"The adapter in {folder} cannot be used.",
        why,
        "Use a plain LoRA adapter: one rank, one alpha, no bias, nothing trained in full.",
    )
