"""A base model's size, read off its folder without loading it.

Owns: the figures of config.json that decide memory and speed; counting parameters in safetensors headers; the size of
an adapter.
Never: reads a weight, imports torch, judges what fits (`runs.starting.machine`).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("qwen3", "qwen2", "llama")
"""`model_type`s that the engine computes by itself, not through transformers; a test holds them equal to its own."""

_MAX_HEADER = 100 << 20
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What decides a decoder-only model's memory and speed."""

    family: str  # config.json's model_type
    architecture: str = ""  # ... and the first of its architectures
    layers: int
    width: int
    feed: int  # width inside the MLP
    vocabulary: int
    heads: int
    kv_heads: int
    head_width: int
    context: int  # tokens
    tied: bool  # the head is the embedding
    parameters: int = 0  # a tied head counted once; 0: count them from the shape
    size_bytes: int = 0  # of the weights on disk

    @property
    def is_decoder(self) -> bool:
        """It may be computed here; what its layers really need is seen when it is loaded."""
        return self.family in FAMILIES or self.architecture.endswith("ForCausalLM")

    def __post_init__(self) -> None:
        if not self.parameters:
            object.__setattr__(self, "parameters", self._count())

    @property
    def qkv(self) -> int:
        """Outputs of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_width

    def _count(self) -> int:
        attention = self.width * (self.qkv + self.heads * self.head_width)
        norms = 2 * self.width + (2 * self.head_width if self.family == "qwen3" else 0)
        biases = self.qkv if self.family == "qwen2" else 0
        layer = attention + 3 * self.width * self.feed + norms + biases
        embeddings = self.vocabulary * self.width * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.width


def adapter_numbers(shape: ModelShape, rank: int) -> int:
    """Numbers of an adapter on every projection."""
    heads = shape.heads * shape.head_width
    ins = shape.layers * (3 * shape.width + heads + 2 * shape.width + shape.feed) + shape.width
    outs = shape.layers * (shape.qkv + shape.width + 2 * shape.feed + shape.width) + shape.vocabulary
    return rank * (ins + outs)


def diagonal_numbers(shape: ModelShape, rank: int) -> int:
    """Numbers of an adapter's B's once more, as block-diagonal matrices: what the engine computes with."""
    outs = shape.layers * (3 * shape.qkv + shape.width + 4 * shape.feed + shape.width) + shape.vocabulary
    return rank * outs


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in a folder in Hugging Face format.

    Raises:
        OSError, ValueError: a file is missing, incomplete, or not what its name says; the text names it.
    """
    config = _object(folder / "config.json")
    heads = _number(config, "num_attention_heads")
    width = _number(config, "hidden_size")
    tied = bool(config.get("tie_word_embeddings", False))
    files = weight_files(folder)
    return ModelShape(
        family=str(config.get("model_type")),
        architecture=str((config.get("architectures") or [""])[0]),
        layers=_number(config, "num_hidden_layers"),
        width=width,
        feed=_number(config, "intermediate_size"),
        vocabulary=_number(config, "vocab_size"),
        heads=heads,
        kv_heads=_number(config, "num_key_value_heads", heads),
        head_width=_number(config, "head_dim", width // heads),
        context=_number(config, "max_position_embeddings"),
        tied=tied,
        parameters=sum(_parameters(file, tied) for file in files),
        size_bytes=sum(file.stat().st_size for file in files),
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model; with an index, those that it names.

    Raises:
        OSError, ValueError: there are none, or one is missing.
    """
    index = folder / _INDEX
    if index.is_file():
        names = sorted({str(name) for name in dict(_object(index).get("weight_map") or {}).values()})
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise ValueError(f"{len(absent)} of its {len(names)} weight files are missing, the first is {absent[0]}")
        return [folder / name for name in names]
    if found := sorted(folder.glob("*.safetensors")):
        return found
    raise ValueError(f"{folder} holds no *.safetensors")


def _parameters(file: Path, tied: bool) -> int:
    tensors = _header(file)
    return sum(math.prod(shape) for name, shape in tensors if not (tied and name == "lm_head.weight"))


def _header(file: Path) -> list[tuple[str, list[int]]]:
    """Names and shapes of the tensors in a file: eight bytes of length, then JSON."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8).ljust(8, b"\xff"))
        if length > _MAX_HEADER:
            raise ValueError(f"{file} is no safetensors file")
        header = _parsed(file, stream.read(length))
    try:
        tensors = [(n, e["shape"], e["data_offsets"][1]) for n, e in header.items() if n != "__metadata__"]
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{file} is no safetensors file") from error
    end = 8 + length + max((stop for _, _, stop in tensors), default=0)
    if file.stat().st_size < end:
        raise ValueError(f"{file} is cut off: {file.stat().st_size} of {end} bytes")
    return [(name, shape) for name, shape, _ in tensors]


def _object(file: Path) -> Mapping[str, Any]:
    told = _parsed(file, file.read_bytes())
    if not isinstance(told, dict):
        raise ValueError(f"{file} holds no JSON object")
    return told


def _parsed(file: Path, text: bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{file} is nested too deeply") from error


def _number(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json says {name}: {value!r}")
    return value
