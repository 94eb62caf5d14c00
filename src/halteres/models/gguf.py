"""A base model in a GGUF file, written out once as a folder in Hugging Face format, its tokenizer
included.

Weights are dequantised to fp32, in which the engine computes: 4 bytes each on disk, and no value is
rounded. Things are kept that transformers 5.23 drops from such a file: the head width of a Qwen3
model, the frequencies of the rotary embedding of Llama 3, that Llama 3 takes words which its
vocabulary holds whole before merges, that Qwen2 normalises text (NFC).

Source: the GGUF specification, version 3; tensors and keys are named as llama.cpp's converter names
them; the splitting rules are those of the models' own tokenizer.json.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halteres.errors import InvalidData, UserError, boundary
from halteres.files import open_regular
from halteres.models.shape import FAMILIES

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader, ReaderTensor
    from tokenizers import Tokenizer

_SHARD_BYTES = 4 << 30  # of one weight file: as much is held in memory while it is made

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

_LLAMA_3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Of every Llama 3.1 and 3.2; their factor differs (8 and 32)."""


def read_gguf(file: Path) -> GgufModel:
    """The model in a GGUF file; of its weights only names and shapes are read. UserError where it
    cannot be converted here, InvalidData where it is no GGUF file, is cut off, or does not say what
    it must.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(
            "GGUF files need the package `gguf`.", f"{error}.", "pip install 'halteres[gguf]'"
        ) from error
    if not file.is_file():
        raise UserError(f"There is no file {file}.", next="Check the path.")
    with _reading(file):
        _check_counts(file)
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
        """Write config.json, the tokenizer and the weights into an empty folder; InvalidData for a
        tensor that is not finite, or quantised in a way that the package `gguf` cannot undo.
        """
        from safetensors.numpy import save_file

        _write_json(folder / "config.json", self.config)
        ends = {name: value for name, value in self.config.items() if name.endswith("_token_id")}
        _write_json(
            folder / "generation_config.json", {**ends, "eos_token_id": self.tokenizer.ends}
        )
        self.tokenizer.write(folder, context=self.config["max_position_embeddings"])
        shards, size = [list[str]()], 0
        for name, tensor in self.tensors.items():
            num_bytes = 4 * int(tensor.n_elements)
            if shards[-1] and size + num_bytes > _SHARD_BYTES:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += num_bytes
        file_of: dict[str, str] = {}
        for number, names in enumerate(shards, start=1):
            shard = f"model-{number:05}-of-{len(shards):05}.safetensors"
            save_file(
                {name: self._weights(name) for name in names},
                folder / shard,
                metadata={"format": "pt"},
            )
            file_of |= dict.fromkeys(names, shard)
        index = {"metadata": {"total_size": 4 * self.parameters}, "weight_map": file_of}
        _write_json(folder / "model.safetensors.index.json", index)

    def _weights(self, name: str) -> np.ndarray:
        """fp32; queries and keys of a Llama in Hugging Face's order."""
        import numpy as np
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        with _reading(self.file):
            weights = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if not np.isfinite(weights).all():
            raise _refused(
                self.file, f"Its tensor '{tensor.name}' holds values that are not finite"
            )
        # llama.cpp keeps the two halves of a rotated head interleaved; Hugging Face keeps one after
        # the other.
        if self.family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            pairs = weights.reshape(-1, self.config["head_dim"] // 2, 2, weights.shape[1])
            weights = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weights.shape)
        return weights


_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Types of a header's values that have one size: their numbers, and bytes."""

_STRING, _ARRAY = 8, 9
_MOST_VALUES = 10_000_000
"""Of a header's lists together; the package makes Python objects of each. A vocabulary of 262,144
has a million.
"""


def _check_counts(file: Path) -> None:
    """Raise ValueError where a count in the header goes beyond the file. The package follows a
    list's count wherever it leads, and its loop has no end where numbers have no bytes.
    """
    num_bytes, num_values = file.stat().st_size, 0
    with open_regular(file) as stream:
        first = stream.read(8)
        order = "<" if int.from_bytes(first[4:6], "little") else ">"

        def number(form: str) -> int:
            packed = struct.Struct(order + form)
            (value,) = packed.unpack(stream.read(packed.size))
            return value

        def skip(count: int, size: int = 1) -> None:
            if count * size > num_bytes - stream.tell():
                raise ValueError(
                    f"a count of {count} at byte {stream.tell()} goes beyond its {num_bytes} bytes"
                )
            stream.seek(count * size, os.SEEK_CUR)

        number("Q")  # tensors
        for _ in range(number("Q")):
            skip(number("Q"))
            kind, count = number("I"), 1
            if kind == _ARRAY:
                kind = number("I")
                count = number("Q")
            num_values += count
            if num_values > _MOST_VALUES:
                raise ValueError(f"its header has more than {_MOST_VALUES} values")
            if kind in _SCALARS:
                skip(count, _SCALARS[kind])
            elif kind == _STRING:
                for _ in range(count):
                    skip(number("Q"))
            else:
                raise ValueError(f"its header has a value of the type {kind}")


def _model(file: Path, reader: GGUFReader) -> GgufModel:
    values = {key: value.contents() for key, value in reader.fields.items()}
    family = values["general.architecture"]
    if family not in FAMILIES:
        raise _refused(
            file, f"Its architecture is '{family}'; the engine computes {', '.join(FAMILIES)}"
        )
    own = {
        key.removeprefix(f"{family}."): value
        for key, value in values.items()
        if key.startswith(f"{family}.")
    }
    found = {tensor.name: tensor for tensor in reader.tensors}
    factors = found.pop(_ROPE_FACTORS, None)
    names = {_EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    names |= {_HEAD: "lm_head.weight"} if _HEAD in found else {}
    if own["block_count"] > len(found):
        raise _refused(
            file, f"It has {own['block_count']} layers by its header, and {len(found)} tensors"
        )
    for layer in range(own["block_count"]):
        for ours, theirs in {**_LAYER, **_FURTHER[family]}.items():
            names[f"blk.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
    if odd := sorted(found.keys() ^ names.keys()):
        how = "lacks" if odd[0] in names else "has"
        raise _refused(
            file, f"It {how} the tensor '{odd[0]}', unlike every model of the family {family}"
        )
    tokenizer = GgufTokenizer(file, values)
    width = (
        own.get("attention.key_length") or own["embedding_length"] // own["attention.head_count"]
    )
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
        **{
            f"{name}_token_id": number
            for name, number in tokenizer.specials.items()
            if name != "unk"
        },
    }
    tensors = {names[name]: tensor for name, tensor in found.items()}
    return GgufModel(file=file, family=family, config=config, tensors=tensors, tokenizer=tokenizer)


def _rope(
    file: Path, own: Mapping[str, Any], factors: ReaderTensor | None, width: int
) -> dict[str, Any]:
    """The rotary embedding. Llama 3 stretches its slow frequencies; such a file has the divisor of
    each of them.
    """
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
    if 2 * factors.data.size != width:
        raise _refused(file, "The frequencies of its rotary embedding are not Llama 3's")
    low, high, context = _LLAMA_3_ROPE.values()
    wavelengths = 2 * np.pi * theta ** (np.arange(0, width, 2) / width)
    # 1: left as it is, 0: stretched
    fast = np.clip((context / wavelengths - low) / (high - low), 0, 1)
    factor = round(float(divisors.max()), 3)
    if not np.allclose(divisors, 1 / ((1 - fast) / factor + fast), rtol=1e-3):
        raise _refused(file, "The frequencies of its rotary embedding are not Llama 3's")
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA_3_ROPE}


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
    next = "Take the model's folder in Hugging Face format, or another model."
    return UserError(f"The model in {file} cannot be converted.", f"{why}.", next)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of `tokenizer.ggml.token_type`

_DIGITS = {
    "llama-bpe": r"\p{N}{1,3}",
    "llama3": r"\p{N}{1,3}",
    "llama-v3": r"\p{N}{1,3}",
    "qwen2": r"\p{N}",
    "deepseek-r1-qwen": r"\p{N}",
}
"""Splitting rules (`tokenizer.ggml.pre`) that differ in nothing but how many digits stay
together.
"""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT_2, _SMOLLM = "gpt-2", "smollm"
_SPACE = "▁"  # SentencePiece's


class GgufTokenizer:
    """A vocabulary and what belongs to it; UserError for a kind or splitting rule that is not
    known.
    """

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        own = {key.removeprefix("tokenizer.ggml."): value for key, value in values.items()}
        self.kind: str = own["model"]  # 'gpt2': byte-level BPE; 'llama': SentencePiece's BPE
        self.splits: str = own.get("pre", "default")  # the name of the splitting rule
        known = (*_DIGITS, _GPT_2, _SMOLLM)
        if self.kind != "llama" and (self.kind != "gpt2" or self.splits not in known):
            what = (
                f"split as '{self.splits}'" if self.kind == "gpt2" else f"of the kind '{self.kind}'"
            )
            raise UserError(
                f"The tokenizer in {file} cannot be converted.",
                f"Its text is {what}; understood are SentencePiece's and byte-level BPE split as "
                f"{', '.join(known)}.",
                "Take a newer GGUF file of the model, or its folder in Hugging Face format.",
            )
        self.tokens: Sequence[str] = own["tokens"]
        self.vocabulary = {token: number for number, token in enumerate(self.tokens)}
        self.types: Sequence[int] = own.get("token_type", [1] * len(self.tokens))
        self.merges: Sequence[str] = own.get("merges", ())  # empty in a file of SentencePiece's
        self.scores: Sequence[float] = own.get("scores", ())
        names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
        ids = {ours: own.get(f"{ggml}_token_id") for ours, ggml in names.items()}
        self.specials: Mapping[str, int] = {
            name: number for name, number in ids.items() if number is not None
        }
        self._check(file)
        # Tokens that end an answer.
        self.ends = list(
            dict.fromkeys(own[key] for key in ("eos_token_id", "eot_token_id") if key in own)
        )
        adds_bos = own.get("add_bos_token", self.kind == "llama" or self.splits.startswith("llama"))
        self.adds_bos: bool = adds_bos and "bos" in self.specials
        self.adds_space: bool = own.get("add_space_prefix", True)
        self.chat_template: str | None = values.get("tokenizer.chat_template")

    def _check(self, file: Path) -> None:
        """UserError where what belongs together is of different lengths, or an id is none of a
        token.
        """
        lengths = {"token_type": len(self.types)}
        if self.kind == "llama":
            lengths["scores"] = len(self.scores)
        for name, length in lengths.items():
            if length != len(self.tokens):
                raise _refused(
                    file,
                    f"Its tokenizer has {len(self.tokens)} tokens and {length} of "
                    f"tokenizer.ggml.{name}",
                )
        for name, number in self.specials.items():
            if not 0 <= number < len(self.tokens):
                raise _refused(file, f"Its {name} token is {number}, of {len(self.tokens)} tokens")

    def write(self, folder: Path, *, context: int) -> None:
        """Write tokenizer.json and tokenizer_config.json; `context` is the model's, in tokens."""
        from tokenizers import AddedToken, processors

        tokenizer = self._byte_level() if self.kind == "gpt2" else self._sentencepiece()
        added = list(zip(self.tokens, self.types, strict=True))
        tokenizer.add_special_tokens(
            [AddedToken(text, normalized=False) for text, kind in added if kind == _CONTROL]
        )
        tokenizer.add_tokens(
            [AddedToken(text, normalized=False) for text, kind in added if kind == _USER_DEFINED]
        )
        if self.adds_bos:
            bos = self.tokens[self.specials["bos"]]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A",
                pair=f"{bos} $A {bos}:1 $B:1",
                special_tokens=[(bos, self.specials["bos"])],
            )
        tokenizer.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            **{f"{name}_token": self.tokens[number] for name, number in self.specials.items()},
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        _write_json(folder / "tokenizer_config.json", config)

    def _byte_level(self) -> Tokenizer:
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        merges = [
            (left, right) for left, _, right in (merge.partition(" ") for merge in self.merges)
        ]
        is_llama_3 = self.splits.startswith("llama")
        built = Tokenizer(
            models.BPE(vocab=self.vocabulary, merges=merges, ignore_merges=is_llama_3)
        )
        if self.splits == "qwen2":
            built.normalizer = normalizers.NFC()
        has_rule = self.splits in _DIGITS
        steps: list[Any] = [
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not has_rule)
        ]
        if has_rule:
            words = Regex(_WORDS.replace("DIGITS", _DIGITS[self.splits]))
            steps.insert(0, pre_tokenizers.Split(words, behavior="isolated"))
        elif self.splits == _SMOLLM:
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
        built.pre_tokenizer = pre_tokenizers.Sequence(steps)
        built.decoder = decoders.ByteLevel()
        return built

    def _sentencepiece(self) -> Tokenizer:
        from tokenizers import Tokenizer, decoders, models, normalizers

        # SentencePiece merges whichever pair makes the token of the highest score: best scores
        # first.
        known, fixed = self.vocabulary, (_UNKNOWN, _CONTROL, _USER_DEFINED)
        merges = [
            (token[:cut], token[cut:])
            for token, number in sorted(known.items(), key=lambda one: -self.scores[one[1]])
            if self.types[number] not in fixed
            for cut in range(1, len(token))
            if token[:cut] in known and token[cut:] in known
        ]
        unknown = self.tokens[self.specials["unk"]] if "unk" in self.specials else None
        built = Tokenizer(
            models.BPE(
                vocab=known, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
            )
        )
        first = [normalizers.Prepend(_SPACE)] if self.adds_space else []
        built.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
        last = [decoders.Strip(" ", left=1)] if self.adds_space else []
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
        built.decoder = decoders.Sequence(steps)
        return built
