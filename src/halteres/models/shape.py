"""A base model's size, read off its folder without loading it: config.json and the headers of its
weight files.

What transformers does not find in a folder it draws at random, anew at each start, and goes on. So
a folder whose files lack a tensor of its model has no shape; of the families that are computed here
the tensors are known without loading anything.
"""

from __future__ import annotations

import math
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from halteres.files import open_regular, read_json

FAMILIES = ("qwen3", "qwen2", "llama")
"""`model_type`s that the engine computes by itself, not through transformers; a test holds them
equal to its own.
"""

QUANTISED = ("quantization_config", "compression_config")
"""Fields of a config.json whose weights are packed numbers."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD, SCORE = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
FEW = 3  # missing tensors that an error names

Sizes = tuple[int, ...]  # of a tensor's dimensions
PLAIN = ("F64", "F32", "F16", "BF16")
"""Types of weights, as safetensors writes them."""

BUFFER = ".rotary_emb.inv_freq"
"""What older models have in each layer and compute anew: nothing that a folder may not have."""

LAYERS = "model.layers."


class Header(NamedTuple):
    """What a weight file says of a tensor."""

    sizes: Sizes
    dtype: str  # safetensors' word


class NotWhole(ValueError):
    """A folder whose weights are not those of its model: some are missing, of another shape, or
    quantised.
    """


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
    outs = (
        shape.layers * (shape.qkv + shape.width + 2 * shape.feed + shape.width) + shape.vocabulary
    )
    return rank * (ins + outs)


def diagonal_numbers(shape: ModelShape, rank: int) -> int:
    """Numbers of an adapter's B's once more, as block-diagonal matrices: what the engine computes
    with.
    """
    outs = (
        shape.layers * (3 * shape.qkv + shape.width + 4 * shape.feed + shape.width)
        + shape.vocabulary
    )
    return rank * outs


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in a folder in Hugging Face format.

    Raises:
        OSError, ValueError: a file is missing, incomplete, or not what its name says; weights are
            missing or quantised; the text names it.
    """
    config = read_config(folder)

    def number(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"config.json says {name}: {value!r}")
        return value

    check_unquantised(config)
    heads, width = number("num_attention_heads"), number("hidden_size")
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool | None):
        raise ValueError(f"config.json says tie_word_embeddings: {tied!r}")
    files = weight_files(folder)
    tensors: dict[str, Header] = {}
    for file in files:
        tensors |= tensor_headers(file)
    shape = ModelShape(
        family=str(config.get("model_type")),
        architecture=_architecture(config),
        layers=number("num_hidden_layers"),
        width=width,
        feed=number("intermediate_size"),
        vocabulary=number("vocab_size"),
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_width=number("head_dim", width // heads),
        context=number("max_position_embeddings"),
        tied=bool(tied),
        parameters=sum(
            math.prod(one.sizes) for name, one in tensors.items() if not (tied and name == HEAD)
        ),
        size_bytes=sum(file.stat().st_size for file in files),
    )
    if shape.family in FAMILIES:
        _check_tensors(shape, config, tensors)
    return shape


def read_config(folder: Path) -> Mapping[str, Any]:
    """The config.json of a model's folder. ValueError where it cannot be read, also by
    transformers.
    """
    file = folder / "config.json"
    config = read_json(file, dict[str, Any])
    with open_regular(file) as stream:
        if stream.read(len(BOM_UTF8)) == BOM_UTF8:
            raise ValueError(
                f"{file} begins with a byte order mark, which transformers refuses: save it without"
            )
    return config


def check_unquantised(config: Mapping[str, Any]) -> None:
    """NotWhole for the config.json of a model whose weights are quantised, its language model's
    part included.
    """
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        for name in QUANTISED:
            if found := part.get(name):
                kind = found.get("quant_method") if isinstance(found, dict) else None
                method = f" ({kind})" if kind else ""
                why = "its weights are quantised, and only plain ones are read"
                raise NotWhole(f"config.json has {name}{method}: {why}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, as transformers chooses them: one file, or those that the
    index names.

    Raises:
        OSError, ValueError: there are none, or one is missing.
    """
    if (single := folder / SINGLE).is_file():
        return [single]
    index = folder / INDEX
    if index.is_file():
        file_of = read_json(index, dict[str, Any]).get("weight_map")
        if not isinstance(file_of, dict):
            raise ValueError(f"{index} has no weight_map")
        names = sorted({str(name) for name in file_of.values()})
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{index} names '{outside[0]}', which is no file of its folder")
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise ValueError(
                f"{len(absent)} of its {len(names)} weight files are missing, the first is "
                f"{absent[0]}"
            )
        return [folder / name for name in names]
    raise FileNotFoundError(f"{folder} holds neither {SINGLE} nor {INDEX}")


def tensor_headers(file: Path) -> dict[str, Header]:
    """The tensors in a safetensors file, by its header. ValueError where it is cut off, or none."""
    try:
        with safe_open(file, "numpy") as weights:
            slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
            return {
                name: Header(tuple(one.get_shape()), one.get_dtype())
                for name, one in slices.items()
            }
    except SafetensorError as error:
        raise ValueError(f"{file} is cut off, or no safetensors file: {error}") from error


def own_tensors(shape: ModelShape, config: Mapping[str, Any]) -> Iterator[tuple[str, Sizes]]:
    """Every tensor of a model of `FAMILIES`, with its sizes; a head that is tied to the embedding
    is left out.

    A test holds it equal to what transformers makes of the same config.json.
    """
    width, feed, vocabulary = shape.width, shape.feed, shape.vocabulary
    queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    linear = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (feed, width),
        "mlp.up_proj": (feed, width),
        "mlp.down_proj": (width, feed),
    }
    biased: set[str] = set()
    if shape.family == "qwen2":
        biased |= {f"self_attn.{one}_proj" for one in "qkv"}
    elif config.get("attention_bias"):
        biased |= {f"self_attn.{one}_proj" for one in "qkvo"}
    if shape.family == "llama" and config.get("mlp_bias"):
        biased |= {f"mlp.{one}_proj" for one in ("gate", "up", "down")}
    layer: dict[str, Sizes] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    for module, (rows, columns) in linear.items():
        layer[f"{module}.weight"] = (rows, columns)
        if module in biased:
            layer[f"{module}.bias"] = (rows,)
    if shape.family == "qwen3":
        layer |= {f"self_attn.{one}_norm.weight": (shape.head_width,) for one in "qk"}
    yield EMBEDDING, (vocabulary, width)
    for number in range(shape.layers):
        for name, sizes in layer.items():
            yield f"model.layers.{number}.{name}", sizes
    yield "model.norm.weight", (width,)
    if is_classifier(config):
        yield SCORE, (num_outputs_of(config), width)
    elif not shape.tied:
        yield HEAD, (vocabulary, width)


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether config.json names a model that classifies sequences, as reward models do."""
    kinds = config.get("architectures")
    return isinstance(kinds, list) and any(
        str(kind).endswith("ForSequenceClassification") for kind in kinds
    )


def num_outputs_of(config: Mapping[str, Any]) -> int:
    """Outputs of a classifier, by its config.json."""
    labels = config.get("id2label")
    if isinstance(labels, dict) and labels:
        return len(labels)
    return config.get("num_labels", 2)  # transformers' default


def _check_tensors(
    shape: ModelShape, config: Mapping[str, Any], found: Mapping[str, Header]
) -> None:
    """NotWhole with the first tensors that the files lack, or that are not what config.json
    says.
    """
    # A folder saved from the model below the head has no `model.` before its names.
    prefix = "" if any(name.startswith("model.") for name in found) else "model."
    there = {name if name in (HEAD, SCORE) else prefix + name: one for name, one in found.items()}
    if shape.tied and HEAD in there:
        there.setdefault(EMBEDDING, there[HEAD])
    # As many as config.json likes: they are followed only as far as is needed.
    missing = list(
        islice((name for name, _ in own_tensors(shape, config) if name not in there), FEW)
    )
    if missing:
        example = f", '{next(iter(found))}' for example" if found else ""
        raise NotWhole(
            f"its weight files lack {', '.join(missing)} (they hold {len(found)} tensors{example})"
        )
    expected = dict(own_tensors(shape, config))
    for name, sizes in expected.items():
        if there[name].sizes != sizes:
            own = list(there[name].sizes)
            raise NotWhole(f"its tensor {name} is {own}, and by config.json {list(sizes)}")
        if there[name].dtype not in PLAIN:
            raise NotWhole(
                f"its tensor {name} is of the type {there[name].dtype}, which is none of "
                f"{', '.join(PLAIN)}"
            )
    surplus = (name for name in there if name.startswith(LAYERS) and not name.endswith(BUFFER))
    if other := next((name for name in surplus if name not in expected), None):
        raise NotWhole(f"its weight files have {other}, and the model of config.json has none")


def _architecture(config: Mapping[str, Any]) -> str:
    found = config.get("architectures")
    return str(found[0]) if isinstance(found, list) and found else ""
