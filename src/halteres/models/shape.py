"""A base model's size, read off its folder without loading it: config.json and the headers of its weight files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

FAMILIES = ("qwen3", "qwen2", "llama")
"""`model_type`s that the engine computes by itself, not through transformers; a test holds them equal to its own."""


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

    def __post_init__(self) -> None:
        if not self.parameters:
            attention = self.width * (self.qkv + self.heads * self.head_width)
            norms = 2 * self.width + (2 * self.head_width if self.family == "qwen3" else 0)
            biases = self.qkv if self.family == "qwen2" else 0
            layer = attention + 3 * self.width * self.feed + norms + biases
            embeddings = self.vocabulary * self.width * (1 if self.tied else 2)
            object.__setattr__(self, "parameters", embeddings + self.layers * layer + self.width)

    @property
    def is_decoder(self) -> bool:
        """It may be computed here; what its layers really need is seen when it is loaded."""
        return self.family in FAMILIES or self.architecture.endswith("ForCausalLM")

    @property
    def qkv(self) -> int:
        """Outputs of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_width


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

    def number(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"config.json says {name}: {value!r}")
        return value

    heads, width = number("num_attention_heads"), number("hidden_size")
    tied = bool(config.get("tie_word_embeddings", False))
    files = weight_files(folder)
    return ModelShape(
        family=str(config.get("model_type")),
        architecture=str((config.get("architectures") or [""])[0]),
        layers=number("num_hidden_layers"),
        width=width,
        feed=number("intermediate_size"),
        vocabulary=number("vocab_size"),
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_width=number("head_dim", width // heads),
        context=number("max_position_embeddings"),
        tied=tied,
        parameters=sum(_parameters(file, tied) for file in files),
        size_bytes=sum(file.stat().st_size for file in files),
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model; with an index, those that it names.

    Raises:
        OSError, ValueError: there are none, or one is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted({str(name) for name in dict(_object(index).get("weight_map") or {}).values()})
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise ValueError(f"{len(absent)} of its {len(names)} weight files are missing, the first is {absent[0]}")
        return [folder / name for name in names]
    if found := sorted(folder.glob("*.safetensors")):
        return found
    raise ValueError(f"{folder} holds no *.safetensors")


def _parameters(file: Path, tied: bool) -> int:
    """Numbers in a file, by its header; a tied head is not counted again."""
    try:
        with safe_open(file, "numpy") as weights:
            names = [name for name in weights.keys() if not (tied and name == "lm_head.weight")]  # noqa: SIM118
            return sum(math.prod(weights.get_slice(name).get_shape()) for name in names)
    except SafetensorError as error:
        raise ValueError(f"{file} is cut off, or no safetensors file: {error}") from error


def _object(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except RecursionError:
        raise ValueError(f"{file} is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object")
    return content
