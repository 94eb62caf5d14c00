"""Adapters on disk: PEFT folders, with optimiser state beside them.

Owns: the files of a checkpoint and what is checked when one is read.
Never: leaves half a folder (`folders.written`); keeps a gradient: an accumulated one is not part of a checkpoint.

    adapter_config.json          PEFT's LoraConfig
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight, lora_B
    state.json                   version, adapter shape, steps of the optimiser
    optimizer.safetensors        first and second moments by the same names (weights for resuming only)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from halteres.engine.folders import size_of, written
from halteres.engine.protocol import LoraConfig, Saved
from halteres.engine.shapes import CONFIG
from halteres.engine.torch.adapter import AdamState, Checkpoint
from halteres.engine.torch.foreign import read_foreign
from halteres.engine.torch.lora import Layout
from halteres.engine.torch.model import BaseModel
from halteres.errors import InvalidData, NotFound

WEIGHTS, STATE, OPTIMIZER = "adapter_model.safetensors", "state.json", "optimizer.safetensors"


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What PEFT's files cannot say."""

    version: int
    lora: LoraConfig
    adam_steps: int = 0


def write_checkpoint(folder: Path, base_name: str, checkpoint: Checkpoint) -> Saved:
    """Write a folder, whole or not at all.

    Raises:
        ServerError: the disk is full or the place cannot be written.
    """
    layout, adam = checkpoint.layout, checkpoint.adam
    state = State(version=checkpoint.version, lora=layout.config, adam_steps=adam.steps if adam else 0)
    with written(folder) as place:
        (place / CONFIG).write_text(json.dumps(_peft_config(layout, base_name), indent=2))
        (place / STATE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))
        _save(layout.named(checkpoint.flat), place / WEIGHTS)
        if adam is not None:
            moments = {"first": adam.first, "second": adam.second}
            named = {kind: layout.named(moment) for kind, moment in moments.items()}
            _save({f"{kind}.{n}": t for kind, found in named.items() for n, t in found.items()}, place / OPTIMIZER)
    return Saved(folder=str(folder), size_bytes=size_of(folder), version=checkpoint.version)


def read_checkpoint(folder: Path, base: BaseModel, *, optimizer: bool) -> Checkpoint:
    """Read a folder: one of ours, or (without the optimiser) any plain PEFT adapter that fits; that one has version 0.

    Raises:
        NotFound: a file that is needed is missing.
        InvalidData: unreadable, made for another base model, or asking for what this engine does not compute.
    """
    own = (folder / STATE).is_file()
    needed = (CONFIG, WEIGHTS, *((OPTIMIZER, STATE) if optimizer else ()))
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise NotFound(
            f"The folder {folder} is not the checkpoint that was asked for.",
            f"It lacks {', '.join(missing)}.",
            "Name a folder written by save, or a PEFT adapter; only those saved with the optimiser can restore one.",
        )
    tensors = _load(folder / WEIGHTS)
    if not own:
        return read_foreign(folder, tensors, base)
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=State)
    except (msgspec.MsgspecError, OSError) as error:
        raise _unreadable(folder, error) from error
    layout = Layout.of(base, state.lora)
    moments = _load(folder / OPTIMIZER) if optimizer else {}
    return Checkpoint(
        layout=layout,
        flat=_flat(layout, tensors, base, folder),
        version=state.version,
        adam=_adam(layout, moments, state.adam_steps, base, folder) if optimizer else None,
    )


def _load(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise _unreadable(file.parent, error) from error


def _unreadable(folder: Path, error: Exception) -> InvalidData:
    return InvalidData(f"The checkpoint {folder} cannot be read.", f"{error}.", "Use another checkpoint.")


def _adam(layout: Layout, moments: Mapping[str, Tensor], steps: int, base: BaseModel, folder: Path) -> AdamState:
    def moment(kind: str) -> Tensor:
        own = {name.removeprefix(f"{kind}."): t for name, t in moments.items() if name.startswith(f"{kind}.")}
        return _flat(layout, own, base, folder)

    return AdamState(moment("first"), moment("second"), steps)


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    """safetensors raises errors of its own for what the disk refuses; they become OSError like all others."""
    try:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, file)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _flat(layout: Layout, tensors: Mapping[str, Tensor], base: BaseModel, folder: Path) -> Tensor:
    flat = torch.zeros(layout.size)
    views = layout.named(flat)
    wrong = sorted(name for name, view in views.items() if name not in tensors or tensors[name].shape != view.shape)
    if wrong or len(tensors) != len(views):
        raise InvalidData(
            f"The checkpoint {folder} does not fit this base model.",
            f"{len(wrong)} of {len(views)} tensors are missing or of another shape, {wrong[0]} first."
            if wrong
            else f"It holds {len(tensors)} tensors, its configuration asks for {len(views)}.",
            "Load it with the base model it was trained on.",
        )
    for name, view in views.items():
        view.copy_(tensors[name])
    if not all(math.isfinite(float(end)) for end in flat.aminmax()):
        raise InvalidData(
            f"The checkpoint {folder} cannot be used.", "It holds a NaN or infinite value.", "Use an earlier one."
        )
    return flat.to(base.device)


def _peft_config(layout: Layout, base_name: str) -> dict[str, object]:
    """PEFT's LoraConfig; alpha as an integer where it is one, as other readers expect."""
    config = layout.config
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({part.leaf for projection in layout.projections for part in projection.parts}),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
    }
