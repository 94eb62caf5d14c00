"""A base model with an adapter merged in, as a folder in Hugging Face format.

A tensor becomes W + alpha / rank * B @ A in fp32, rounded to the type on disk unless everything is
written in fp32. Where the adapter trains an output matrix and the base shares it with the
embedding, it becomes one of its own. No more than one file of the base is in memory at once.

The files, and which tensor lies in which, are those of the base.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from halteres.engine.folders import size_of, written
from halteres.engine.protocol import MergedType, Saved
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.peft_checkpoint import read_checkpoint
from halteres.errors import InvalidData, NotFound
from halteres.files import UnreadableFile, read_json
from halteres.models.shape import EMBEDDING, HEAD, INDEX, weight_files
from halteres.tokenizer import TEMPLATES

COMPANIONS = (
    *(
        "generation_config.json",
        "tokenizer*",
        "vocab*",
        "merges.txt",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    *("chat_template*", f"{TEMPLATES}/*.jinja", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*"),
)
"""What goes with the weights, as it is."""

# rows of a matrix that are merged at once: fp32 copies of a large vocabulary's matrix stay small
ROWS = 16384


@dataclass(frozen=True, slots=True)
class Delta:
    """What an adapter adds to one matrix: scale * B @ A."""

    a_RD: Tensor
    b_ER: Tensor
    scale: float

    def added(self, weight_ED: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum, computed in fp32, in this type."""
        out_ED = torch.empty_like(weight_ED, dtype=dtype)
        for start in range(0, weight_ED.shape[0], ROWS):
            rows = slice(start, start + ROWS)
            out_ED[rows] = weight_ED[rows].float() + self.scale * (self.b_ER[rows] @ self.a_RD)
        return out_ED


def merge_into(
    into: Path, model: Path, adapter: Path, base: BaseModel, dtype: MergedType = "base"
) -> Saved:
    """Write `model` with the adapter in the folder `adapter` into the folder `into`, whole or not
    at all.
    """
    checkpoint = read_checkpoint(adapter, base, optimizer=False)
    named = checkpoint.layout.named(checkpoint.flat.detach().to("cpu", torch.float32))
    scale, deltas = checkpoint.layout.scale, dict[str, Delta]()
    for name, a_RD in named.items():
        if ".lora_A." in name:
            weight = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            deltas[weight] = Delta(a_RD, named[name.replace(".lora_A.", ".lora_B.")], scale)
    try:
        files = [file.name for file in weight_files(model)]
    except (OSError, ValueError) as error:
        kind = NotFound if isinstance(error, FileNotFoundError) else InvalidData
        next = "Convert its weights to safetensors first."
        raise kind(f"The model in {model} cannot be merged.", f"{error}.", next) from error
    try:
        with written(into) as place, torch.inference_mode():
            merged: dict[str, str] = {}
            for file in files:
                tensors = _merged(model / file, deltas, dtype)
                save_file(tensors, place / file, metadata={"format": "pt"})
                # as all files here: safetensors' own are private
                (place / file).chmod(place.stat().st_mode & 0o666)
                merged |= dict.fromkeys(tensors, file)
            if missing := sorted(deltas.keys() - merged.keys()):
                raise InvalidData(
                    f"The model in {model} cannot be merged.",
                    f"Its files do not hold {missing[0]}, which the adapter changes "
                    f"({len(missing)} such tensors).",
                    "Use a folder that transformers wrote with save_pretrained.",
                )
            _write_rest(model, place, merged, dtype, untied=HEAD in deltas)
    except SafetensorError as error:
        raise InvalidData(
            f"The model in {model} cannot be merged.", f"{error}.", "Download it again."
        ) from error
    return Saved(folder=str(into), size_bytes=size_of(into), version=checkpoint.version)


def _merged(file: Path, deltas: Mapping[str, Delta], dtype: MergedType) -> dict[str, Tensor]:
    """The tensors of one file; a head that was the embedding stands beside it."""
    with safe_open(file, framework="pt") as opened:  # pyright: ignore[reportUnknownVariableType]
        tensors: dict[str, Tensor] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    head_elsewhere = (file.parent / INDEX).is_file() and HEAD in _object(file.parent / INDEX)[
        "weight_map"
    ]
    if HEAD in deltas and EMBEDDING in tensors and HEAD not in tensors and not head_elsewhere:
        tensors[HEAD] = tensors[EMBEDDING]
    for name, tensor in tensors.items():
        to = torch.float32 if dtype == "float32" and tensor.is_floating_point() else tensor.dtype
        tensors[name] = deltas[name].added(tensor, to) if name in deltas else tensor.to(to)
    return tensors


def _write_rest(
    model: Path, place: Path, merged: Mapping[str, str], dtype: MergedType, *, untied: bool
) -> None:
    config = _object(model / "config.json")
    if untied:
        config["tie_word_embeddings"] = False
    if dtype != "base":
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    (place / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if (model / INDEX).is_file():
        size = sum((place / file).stat().st_size for file in set(merged.values()))
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(merged.items()))}
        (place / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    copy_companions(model, place)


def copy_companions(model: Path, place: Path) -> None:
    """Copy what goes with a model's weights into a folder; what stands there already stays."""
    for file in sorted(
        {file for pattern in COMPANIONS for file in model.glob(pattern) if file.is_file()}
    ):
        target = place / file.relative_to(model)
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def _object(file: Path) -> dict[str, Any]:
    try:
        return read_json(file, dict[str, Any])
    except UnreadableFile as error:
        raise InvalidData(
            f"{file} cannot be read.", f"{error}.", "Download the model again."
        ) from error
