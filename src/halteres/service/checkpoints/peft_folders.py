"""PEFT folders, and the names of tensors in safetensors files.

Source: the format's description, https://huggingface.co/docs/safetensors: 8 bytes with the header's length (little
endian), a JSON header padded with spaces, the data that the header's offsets count from.

An engine names the unembedding's tensors `base_model.model.lm_head…`, as PEFT, vLLM and SGLang do. tinker-cookbook
0.6.1 finds the weight to merge into by the base model's files: `lm_head` where there is a weight of that name; where
it is tied to the embedding there is none, and only the Tinker API's own name, `base_model.model.model.unembed_tokens…`,
is merged (into the embedding). So that is the name in an export from a tied model; PEFT reads it with
`key_mapping={"model.unembed_tokens": "lm_head"}`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from halteres.errors import InvalidData, NotFound

MAX_HEADER_BYTES = 100_000_000
"""As the safetensors library has it."""


def tensor_names(file: Path) -> set[str]:
    """The names in a file.

    Raises:
        InvalidData: it is no safetensors file.
    """
    with file.open("rb") as stream:
        return set(_header(stream, file)) - {"__metadata__"}


def rename_tensors(source: Path, target: Path, renamed: Callable[[str], str]) -> None:
    """Copy a file with every tensor under its new name.

    Raises:
        InvalidData: `source` is no safetensors file.
    """
    with source.open("rb") as reading, target.open("wb") as writing:
        header = _header(reading, source)
        names = {name: name if name == "__metadata__" else renamed(name) for name in header}
        text = json.dumps({names[name]: facts for name, facts in header.items()}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        writing.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(reading, writing, 2**20)


def _header(stream: BinaryIO, file: Path) -> dict[str, Any]:
    """The header; the stream is then at the data."""
    length = int.from_bytes(stream.read(8), "little")
    try:
        header = json.loads(stream.read(length)) if 2 <= length <= MAX_HEADER_BYTES else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise InvalidData(f"{file} is no safetensors file.", "Its header cannot be read.", "Export it again.")
    return header


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
