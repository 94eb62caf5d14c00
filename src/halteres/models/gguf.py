"""A base model in a GGUF file, written out once as a folder in Hugging Face format.

Owns: which files can be converted, the names and the layout of their tensors, config.json and its companions.
Never: computes with a model, imports torch, chooses where the folder lies (`models.model_store`).

Weights are dequantised to fp32, in which the engine computes: 4 bytes each on disk, and no value is rounded. Two things
are kept that transformers 5.23 drops from such a file: the head width of a Qwen3 model, and the frequencies of the
rotary embedding of Llama 3.

Source: the GGUF specification, version 3; tensors and keys are named as llama.cpp's converter names them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halteres.errors import InvalidData, UserError, boundary
from halteres.models.gguf_tokenizer import GgufTokenizer
from halteres.models.shape import FAMILIES

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader, ReaderTensor

_SHARD_BYTES = 4 << 30
"""Of one weight file: as much is held in memory while it is made."""

_EMBEDDING, _HEAD, _ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"

_LAYER: Mapping[str, str] = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
"""A layer's tensors: their names in GGUF, and Hugging Face's."""

_FURTHER: Mapping[str, Mapping[str, str]] = {
    "llama": {},
    "qwen2": {f"attn_{one}.bias": f"self_attn.{one}_proj.bias" for one in "qkv"},
    "qwen3": {f"attn_{one}_norm.weight": f"self_attn.{one}_norm.weight" for one in "qk"},
}
"""Those that only one family has."""

_LLAMA_3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of every Llama 3.1 and 3.2; their factor differs (8 and 32)."""


def read_gguf(file: Path) -> GgufModel:
    """The model in a GGUF file; of its weights only names and shapes are read.

    Raises:
        UserError: there is no such file, the package `gguf` is missing, or the model cannot be converted.
        InvalidData: it is no GGUF file, is cut off, or does not say what it must.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError("GGUF files need the package `gguf`.", f"{error}.", "pip install 'halteres[gguf]'") from error
    if not file.is_file():
        raise UserError(f"There is no file {file}.", next="Check the path.")
    with _reading(file):
        return _model(file, GGUFReader(file))


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """A model that can be converted."""

    file: Path
    family: str  # one of models.shape.FAMILIES
    config: Mapping[str, Any]  # what config.json will say
    tensors: Mapping[str, ReaderTensor]  # by their names in Hugging Face's format
    tokenizer: GgufTokenizer

    @property
    def parameters(self) -> int:
        """Their number."""
        return sum(int(tensor.n_elements) for tensor in self.tensors.values())

    def write(self, folder: Path) -> None:
        """Write config.json, the tokenizer and the weights into an empty folder.

        Raises:
            InvalidData: a tensor is quantised in a way that the package `gguf` cannot undo, or is not finite.
            OSError: the folder cannot be written.
        """
        _put(folder / "config.json", self.config)
        ends = {name: value for name, value in self.config.items() if name.endswith("_token_id")}
        _put(folder / "generation_config.json", {**ends, "eos_token_id": self.tokenizer.ends})
        self.tokenizer.write(folder, context=self.config["max_position_embeddings"])
        self._write_weights(folder)

    def _write_weights(self, folder: Path) -> None:
        from safetensors.numpy import save_file

        shards = list(_shards(self.tensors))
        where: dict[str, str] = {}
        for number, names in enumerate(shards, start=1):
            shard = f"model-{number:05}-of-{len(shards):05}.safetensors"
            save_file({name: self._weights(name) for name in names}, folder / shard, metadata={"format": "pt"})
            where |= dict.fromkeys(names, shard)
        size = 4 * self.parameters
        _put(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where})

    def _weights(self, name: str) -> np.ndarray:
        """fp32; queries and keys of a Llama in Hugging Face's order."""
        import numpy as np
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        with _reading(self.file):
            weights = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if not np.isfinite(weights).all():
            raise _refused(self.file, f"Its tensor '{tensor.name}' holds values that are not finite")
        # llama.cpp keeps the two halves of a rotated head interleaved; Hugging Face keeps one after the other.
        if self.family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            pairs = weights.reshape(-1, self.config["head_dim"] // 2, 2, weights.shape[1])
            weights = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weights.shape)
        return weights


def _model(file: Path, reader: GGUFReader) -> GgufModel:
    values = {key: value.contents() for key, value in reader.fields.items()}
    family = values["general.architecture"]
    if family not in FAMILIES:
        raise _refused(file, f"Its architecture is '{family}'; the engine computes {', '.join(FAMILIES)}")
    own = {key.removeprefix(f"{family}."): value for key, value in values.items() if key.startswith(f"{family}.")}
    found = {tensor.name: tensor for tensor in reader.tensors}
    factors = found.pop(_ROPE_FACTORS, None)
    names = _names(family, own["block_count"], has_head=_HEAD in found)
    if odd := sorted(found.keys() ^ names.keys()):
        how = "lacks" if odd[0] in names else "has"
        raise _refused(file, f"It {how} the tensor '{odd[0]}', unlike every model of the family {family}")
    tokenizer = GgufTokenizer.of(file, values)
    width = own.get("attention.key_length") or own["embedding_length"] // own["attention.head_count"]
    config = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": own["attention.head_count"],
        "num_key_value_heads": own.get("attention.head_count_kv", own["attention.head_count"]),
        "head_dim": width,
        "hidden_act": "silu",
        "max_position_embeddings": own["context_length"],
        "rms_norm_eps": own["attention.layer_norm_rms_epsilon"],
        "rope_parameters": _rope(file, own, factors, width),
        "tie_word_embeddings": _HEAD not in found,
        "vocab_size": int(found[_EMBEDDING].shape[-1]),
        "dtype": "float32",
        **tokenizer.numbers,
    }
    tensors = {names[name]: tensor for name, tensor in found.items()}
    return GgufModel(file=file, family=family, config=config, tensors=tensors, tokenizer=tokenizer)


def _names(family: str, layers: int, *, has_head: bool) -> dict[str, str]:
    """Every tensor that a model of this family has: its name in GGUF, and Hugging Face's."""
    named = {_EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if has_head:
        named[_HEAD] = "lm_head.weight"
    for layer in range(layers):
        for ours, theirs in {**_LAYER, **_FURTHER[family]}.items():
            named[f"blk.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
    return named


def _rope(file: Path, own: Mapping[str, Any], factors: ReaderTensor | None, width: int) -> dict[str, Any]:
    """The rotary embedding. Llama 3 stretches its slow frequencies; such a file has the divisor of each of them."""
    import numpy as np

    if own.get("rope.dimension_count", width) != width:
        raise _refused(file, "Its rotary embedding turns a part of each head alone")
    if own.get("attention.sliding_window"):
        raise _refused(file, "Its attention reaches back over a window alone")
    theta = own.get("rope.freq_base", 10000.0)
    if (kind := own.get("rope.scaling.type", "none")) != "none":
        raise _refused(file, f"Its rotary embedding is scaled ('{kind}')")
    if factors is None:
        return {"rope_type": "default", "rope_theta": theta}
    divisors = np.asarray(factors.data, dtype=np.float64)
    low, high, context = _LLAMA_3_ROPE.values()
    wavelengths = 2 * np.pi * theta ** (np.arange(0, width, 2) / width)
    fast = np.clip((context / wavelengths - low) / (high - low), 0, 1)  # 1: left as it is, 0: stretched
    factor = round(float(divisors.max()), 3)
    if divisors.shape != fast.shape or not np.allclose(divisors, 1 / ((1 - fast) / factor + fast), rtol=1e-3):
        raise _refused(file, "The frequencies of its rotary embedding are not Llama 3's")
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA_3_ROPE}


def _shards(tensors: Mapping[str, ReaderTensor]) -> Iterator[list[str]]:
    """Names of the tensors of each weight file."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        bytes_here = 4 * int(tensor.n_elements)
        if names and size + bytes_here > _SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += bytes_here
    yield names


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Whatever the package raises in here is the file's fault."""
    try:
        with boundary(InvalidData, "gguf"):
            yield
    except InvalidData as failure:
        raise InvalidData(
            f"{file} cannot be read as a GGUF file.",
            f"It is of another kind, cut off or broken: {failure.what}",
            "Fetch it again, and compare its size with the original's.",
        ) from failure


def _refused(file: Path, why: str) -> UserError:
    return UserError(
        f"The model in {file} cannot be converted.",
        f"{why}.",
        "Take the model's folder in Hugging Face format, or another model.",
    )


def _put(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
