"""PEFT folders for others.

Owns: which files of a checkpoint are the adapter, and under which name the unembedding's tensors are known outside.
Never: writes an adapter's values (the engine does), encrypts.

An engine names the unembedding's tensors `base_model.model.lm_head…`, as PEFT, vLLM and SGLang do. tinker-cookbook
0.6.1 finds the weight to merge into by the base model's files: `lm_head` where there is a weight of that name; where
it is tied to the embedding there is none, and only the Tinker API's own name, `base_model.model.model.unembed_tokens…`,
is merged (into the embedding). So that is the name in an export from a tied model; PEFT reads it with
`key_mapping={"model.unembed_tokens": "lm_head"}`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from halteres.errors import InvalidData, NotFound
from halteres.service.exports.tensor_names import rename_tensors, tensor_names

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

FILES = (CONFIG, WEIGHTS)
"""An adapter as PEFT knows it."""

_HEAD, _TINKER_HEAD = "base_model.model.lm_head.", "base_model.model.model.unembed_tokens."


def copy_adapter(source: Path, target: Path) -> None:
    """Copy the adapter's two files into a folder that exists, named for PEFT, vLLM and SGLang."""
    _copy(source, target, _TINKER_HEAD, _HEAD)


def copy_for_tinker(source: Path, target: Path, base: Path) -> None:
    """The same, named so that tinker-cookbook finds each weight in the files of the base model in `base`."""
    if has_own_head(base):
        copy_adapter(source, target)
    else:
        _copy(source, target, _HEAD, _TINKER_HEAD)


def has_own_head(base: Path) -> bool:
    """Whether the files of a base model hold a weight of the unembedding, or it is tied to the embedding."""
    index = base / "model.safetensors.index.json"
    if index.is_file():
        return "lm_head.weight" in json.loads(index.read_bytes())["weight_map"]
    return any("lm_head.weight" in tensor_names(file) for file in base.glob("*.safetensors"))


def check_adapter(folder: Path) -> None:
    """Raise NotFound unless the folder holds an adapter's two files."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if not missing:
        return
    if (folder / "adapter_model.bin").is_file():
        raise InvalidData(
            f"The adapter in {folder} is a pickle.",
            "adapter_model.bin may run code when it is read.",
            "Save it again with safe_serialization=True.",
        )
    raise NotFound(f"{folder} is no PEFT folder.", f"It lacks {', '.join(missing)}.", "Name a folder that has both.")


def _copy(source: Path, target: Path, old: str, new: str) -> None:
    check_adapter(source)
    shutil.copyfile(source / CONFIG, target / CONFIG)
    rename_tensors(
        source / WEIGHTS, target / WEIGHTS, lambda name: new + name.removeprefix(old) if name.startswith(old) else name
    )
