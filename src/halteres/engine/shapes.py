"""The shape of an adapter: which are allowed, and how it is read off a PEFT folder that somebody
else wrote, of a policy or of a reward model.

A foreign folder's modules are ours by name, with or without `base_model.model.`; `unembed_tokens`
is the Tinker API's name for `lm_head`. What the folder lacks of a family (attention, MLP,
unembedding) that it touches is zero: it adds nothing, and since A and B are both zero it never
learns, which is what the folder asked for.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec

from halteres.engine.protocol import LoraConfig, Target
from halteres.errors import InvalidData, NotFound
from halteres.files import UnreadableFile, read_json

# larger ones cost more than the full matrices of most models, and servers of PEFT adapters refuse
# them
MAX_RANK = 512
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# files of a checkpoint: PEFT's two, and ours beside them
STATE, OPTIMIZER = "state.json", "optimizer.safetensors"

Kind = Target

TARGETS_OF_ADAPTERS: tuple[Kind, ...] = ("attn", "mlp", "unembed")

_UNEMBED = ("model.unembed_tokens", "unembed_tokens")
_KEEPS_THE_BASE = ("true", "false", "none", "gaussian", "eva", "orthogonal")
"""Initialisations of A and B alone, in small letters. Others change the base weights, and such an
adapter fits those alone, or may do so: PEFT grows.
"""

_READ = (
    *(
        "r",
        "lora_alpha",
        "use_rslora",
        "peft_type",
        "bias",
        "modules_to_save",
        "rank_pattern",
        "alpha_pattern",
    ),
    *("init_lora_weights", "target_modules"),
)
_SAYS_NOTHING = (
    # What the adapter is for, and how it was made.
    *(
        "base_model_name_or_path",
        "revision",
        "task_type",
        "auto_mapping",
        "peft_version",
        "inference_mode",
    ),
    # Of training alone.
    *("lora_dropout", "eva_config"),
    # Which modules have one: the tensors say so, too.
    *("exclude_modules", "layers_to_transform", "layers_pattern"),
    # Options of what is refused where it is switched on, which PEFT always writes.
    *("megatron_core", "qalora_group_size"),
)
"""Fields of PEFT's LoraConfig that change nothing of what is computed from the tensors."""

NOT_ADAPTED = ("embed_tokens", "wte", "word_embeddings", "embed_in")
"""Embeddings, by the last part of their names: no engine adapts them."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """state.json: what PEFT's files cannot say of a checkpoint."""

    version: int
    lora: LoraConfig
    adam_steps: int = 0


def read_state(folder: Path) -> State | None:
    """What a checkpoint's state.json says; None of a folder that has none: no `save` wrote it.

    InvalidData where it cannot be read.
    """
    file = folder / STATE
    try:
        return read_json(file, State, linked=False) if os.path.lexists(file) else None
    except UnreadableFile as error:
        raise InvalidData(
            f"The checkpoint {folder} cannot be read.", f"{error}.", "Use another checkpoint."
        ) from error


def check_shape(config: LoraConfig) -> None:
    """Refuse an adapter that cannot be, before anything is allocated for it."""
    if not 1 <= config.rank <= MAX_RANK:
        raise InvalidData(
            f"The rank {config.rank} is out of range.",
            f"It must be 1 to {MAX_RANK}.",
            "Choose another.",
        )
    if not (config.alpha > 0 and math.isfinite(config.alpha)):
        raise InvalidData(
            f"The alpha {config.alpha} is out of range.", "It must be a finite number above 0."
        )
    if not (config.train_attn or config.train_mlp or config.train_unembed):
        raise InvalidData(
            "This adapter would have no weights.",
            "train_attn, train_mlp and train_unembed are all off.",
            "Switch one of them on.",
        )


def check_files(folder: Path, optimizer: bool) -> None:
    """NotFound if a file is missing that is read from a checkpoint, InvalidData where one of ours
    is a link: `save` writes none, so it leads to what was never saved there.
    """
    needed = (CONFIG, WEIGHTS, *((OPTIMIZER, STATE) if optimizer else ()))
    if missing := [name for name in needed if not (folder / name).is_file()]:
        raise NotFound(
            f"The folder {folder} is not the checkpoint that was asked for.",
            f"It lacks {', '.join(missing)}.",
            "Name a folder written by save, or a PEFT adapter; only one saved with the optimiser "
            "restores it.",
        )
    check_unlinked(folder)


def check_unlinked(folder: Path) -> None:
    """InvalidData where state.json or the optimiser is a symbolic link."""
    if linked := [name for name in (STATE, OPTIMIZER) if (folder / name).is_symlink()]:
        raise InvalidData(
            f"The checkpoint {folder} cannot be read.",
            f"Its {linked[0]} is a symbolic link; `save` writes none.",
            "Copy the folder with what its links lead to: `cp -rL FOLDER COPY`.",
        )


def foreign_shape(folder: Path, tensors: Iterable[str]) -> LoraConfig:
    """The shape of an adapter that was not written by `save`; `tensors` are the names in its
    weights.

    Raises:
        InvalidData: the configuration cannot be read, or asks for what this engine does not
            compute.
    """
    settings = read_adapter_config(folder)
    tensors = list(tensors)
    rank, alpha = settings["r"], float(settings["lora_alpha"])
    if settings.get("use_rslora"):  # alpha / sqrt(r) there, alpha / r here
        alpha *= math.sqrt(rank)
    kinds = {kind_of(module) for module in map(module_of, tensors) if module}
    if not kinds:
        raise _refused(folder, "It holds no LoRA tensors.")
    if others := sorted(name for name in tensors if not _is_computed(name)):
        raise _refused(folder, f"It has the tensor '{others[0]}', which no engine computes.")
    config = LoraConfig(
        rank=rank,
        alpha=alpha,
        train_attn="attn" in kinds,
        train_mlp="mlp" in kinds,
        train_unembed="unembed" in kinds,
    )
    check_shape(config)
    return config


def read_adapter_config(
    folder: Path, in_full: Collection[str] = (), max_rank: int = MAX_RANK
) -> dict[str, Any]:
    """PEFT's LoraConfig in a folder, of a plain LoRA adapter.

    Args:
        in_full: modules that may be trained in full beside it, and lie in the folder whole: a head.

    Raises:
        InvalidData: it cannot be read, or asks for what is not computed here.
    """
    try:
        settings = read_json(folder / CONFIG, dict[str, Any])
    except UnreadableFile as error:
        raise InvalidData(
            f"{CONFIG} in {folder} cannot be read.", f"{error}.", "Export the adapter again."
        ) from error
    _check_settings(settings, folder, in_full, max_rank)
    return settings


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

    >>> own = ("model.layers.0.self_attn.q_proj", "lm_head")
    >>> tuple(map(kind_of, ("gpt_neox.layers.1.mlp.dense_h_to_4h", *own)))
    ('mlp', 'attn', 'unembed')
    """
    if not any(part.isdigit() for part in module.split(".")):
        return "unembed"
    return "attn" if "attn" in module or "attention" in module else "mlp"


def canonical(tensor: str) -> str:
    """The name under which `save` writes this LoRA tensor; any other name stays as it is."""
    module = module_of(tensor)
    return f"base_model.model.{module}.{tensor[-len('lora_A.weight') :]}" if module else tensor


def _check_settings(
    settings: dict[str, Any], folder: Path, in_full: Collection[str], max_rank: int
) -> None:
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= max_rank:
        raise _refused(folder, f"'r' is {rank!r}; it must be a whole number, 1 to {max_rank}.")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < 1e9:
        raise _refused(folder, f"'lora_alpha' is {alpha!r}; it must be a number above 0.")
    known = (*_READ, *_SAYS_NOTHING)
    whole = settings.get("modules_to_save")
    moves_base = str(settings.get("init_lora_weights", True)).lower() not in _KEEPS_THE_BASE
    for name, refused in (
        *(
            (f"{name} {value!r}", name not in known and bool(value))
            for name, value in settings.items()
        ),
        *((f"an adapter of {name}", True) for name in _embeddings(settings.get("target_modules"))),
        (
            f"peft_type {settings.get('peft_type')!r}",
            settings.get("peft_type") not in (None, "LORA"),
        ),
        (f"bias {settings.get('bias')!r}", settings.get("bias") not in (None, "none")),
        (f"modules_to_save {whole}", not _are_among(whole, in_full)),
        ("ranks that differ (rank_pattern)", _varies(settings.get("rank_pattern"), rank)),
        ("alphas that differ (alpha_pattern)", _varies(settings.get("alpha_pattern"), alpha)),
        (
            f"init_lora_weights {settings.get('init_lora_weights')!r}, which may change the base",
            moves_base,
        ),
    ):
        if refused:
            raise _refused(folder, f"{CONFIG} asks for {name}.")


def _are_among(names: object, allowed: Collection[str]) -> bool:
    """Whether modules_to_save names none but these."""
    return not names or (isinstance(names, list) and all(name in allowed for name in names))


def _embeddings(targets: object) -> list[str]:
    """The embeddings among target_modules: names, or ends of names."""
    names = targets if isinstance(targets, list) else [targets]
    return [str(name) for name in names if str(name).rpartition(".")[2] in NOT_ADAPTED]


def _is_computed(tensor: str) -> bool:
    """Whether an engine knows what to do with a tensor: LoRA's A and B, or a copy of the base's,
    which it compares.
    """
    if module := module_of(tensor):
        return module.rpartition(".")[2] not in NOT_ADAPTED
    copied = tensor.removesuffix(".weight").removesuffix(".base_layer").rpartition(".")[2]
    return tensor.endswith(".weight") and copied in (*NOT_ADAPTED, "lm_head", "unembed_tokens")


def _varies(pattern: object, value: float) -> bool:
    return bool(pattern) and (
        not isinstance(pattern, dict) or any(other != value for other in pattern.values())
    )


def _refused(folder: Path, why: str) -> InvalidData:
    return InvalidData(
        f"The adapter in {folder} cannot be used.",
        why,
        "Use a plain LoRA adapter: one rank, one alpha, no bias, nothing trained in full. What "
        "is known to change"
        f" nothing may be taken out of {CONFIG}.",
    )
