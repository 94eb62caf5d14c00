"""Names of the tensors in safetensors files.

Owns: reading them, and writing a file again under other names; the data is copied as it is, whatever its type.
Never: reads a tensor.
Source: the format's description, https://huggingface.co/docs/safetensors: 8 bytes with the header's length (little
endian), a JSON header padded with spaces, the data that the header's offsets count from.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from halteres.errors import InvalidData

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
