"""Models in GGUF files: what is registered computes, reads and writes as its file says; what cannot
be is refused.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from typer.testing import CliRunner

from halteres.cli.main import app
from halteres.errors import Conflict, InvalidData, ServerError, UserError
from halteres.models import TINY, builtin_path, model_folder, stored_models
from halteres.models.gguf import read_gguf
from halteres.models.model_store import HubCache, ModelStore
from halteres.tokenizer import load_tokenizer

TEXTS = (
    "What is 12345 + 67?",
    "It's  two\n\n spaces ",
    "<|im_start|>user\nhi<|im_end|>",
    "e\u0301 is not \u00e9 🎲",
)
CHAT = [{"role": "user", "content": "What is 1 + 1?"}]
SHAPE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 672,
}
# of every published Qwen3: what transformers assumes, whatever the file says
WIDE = {"head_dim": 128}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tiny_tokenizer() -> Mapping[str, Any]:
    folder = builtin_path(TINY)
    assert folder is not None
    tokens = json.loads((folder / "tokenizer.json").read_text())
    texts = sorted(tokens["model"]["vocab"], key=tokens["model"]["vocab"].__getitem__)
    special = {token["content"]: 3 if token["special"] else 4 for token in tokens["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [special.get(text, 1) for text in texts],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokens["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }


@dataclass
class Written:
    """A GGUF file, and the random model in it."""

    file: Path
    model: Any
    values: dict[str, Any] = field(default_factory=dict[str, Any])


def put(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


def name_of(name: str) -> str:
    """GGUF's name of a tensor of Hugging Face's."""
    module, _, leaf = name.rpartition(".")
    if module in OUTER:
        return f"{OUTER[module]}.{leaf}"
    layer, _, rest = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER[rest]}.{leaf}"


def interleaved(weights: np.ndarray, heads: int) -> np.ndarray:
    """The halves of each head, row by row in turns: how llama.cpp keeps queries and keys of a
    Llama.
    """
    halves = weights.reshape(heads, 2, -1, weights.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weights.shape)


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Written]:
    """Writes a GGUF file with random weights, as llama.cpp's converter names them."""

    def write(
        family: str,
        *,
        kinds: Sequence[Kind] = (Kind.F32,),
        tensors: Mapping[str, np.ndarray] | None = None,
        values: Mapping[str, Any] | None = None,
        **shape: Any,
    ) -> Written:
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(
            family, **{**SHAPE, "tie_word_embeddings": True, **shape}
        )
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        told = {
            f"{family}.block_count": config.num_hidden_layers,
            f"{family}.context_length": config.max_position_embeddings,
            f"{family}.embedding_length": config.hidden_size,
            f"{family}.feed_forward_length": config.intermediate_size,
            f"{family}.attention.head_count": config.num_attention_heads,
            f"{family}.attention.head_count_kv": config.num_key_value_heads,
            f"{family}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            f"{family}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
            **tiny_tokenizer(),
            **(values or {}),
        }
        if (width := getattr(config, "head_dim", None)) is not None:
            told |= {
                f"{family}.attention.key_length": width,
                f"{family}.rope.dimension_count": width,
            }
        file = tmp_path / f"{family}.gguf"
        writer = gguf.GGUFWriter(file, family)
        for key, value in told.items():
            if value is not None:
                put(writer, key, value)
        weights = {
            name_of(name): value.numpy()
            for name, value in model.state_dict().items()
            if name != "lm_head.weight"
        }
        if not config.tie_word_embeddings:
            weights["output.weight"] = model.lm_head.weight.detach().numpy()
        heads = {
            "attn_q.weight": config.num_attention_heads,
            "attn_k.weight": config.num_key_value_heads,
        }
        for number, (name, value) in enumerate({**weights, **(tensors or {})}.items()):
            if family == "llama" and (count := heads.get(name.partition(".")[2].partition(".")[2])):
                value = interleaved(value, count)
            kind = kinds[number % len(kinds)] if value.ndim == 2 else Kind.F32
            writer.add_tensor(name, quantize(value, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Written(file, model, told)

    return write


@pytest.fixture
def models_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return ModelStore(tmp_path / "home" / "models", HubCache(tmp_path / "hub"))


def added(file: Path) -> Path:
    """The folder that `halteres models add FILE --as mine` makes."""
    result = CliRunner().invoke(
        app, ["models", "add", str(file), "--as", "mine", "--json"], catch_exceptions=False
    )
    return Path(json.loads(result.stdout)["folder"])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(0, 600, 7)[None]).logits


@pytest.mark.parametrize(
    ("family", "shape"), [("llama", {}), ("qwen2", {"tie_word_embeddings": False}), ("qwen3", WIDE)]
)
def test_a_quantised_model_computes_what_transformers_computes_from_its_file(
    models_home: ModelStore, written: Callable[..., Written], family: str, shape: Mapping[str, Any]
) -> None:
    made = written(family, kinds=(Kind.Q4_1, Kind.Q8_0, Kind.BF16, Kind.F16), **shape)
    folder = added(made.file)
    assert model_folder("mine", models_home.folder) == folder
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        made.file.parent, gguf_file=made.file.name, dtype=torch.float32
    )
    ours = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert ours.dtype == torch.float32 and getattr(ours.config, "quantization_config", None) is None
    assert torch.equal(logits(ours), logits(theirs))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_an_unquantised_model_is_the_one_that_was_written(
    models_home: ModelStore, written: Callable[..., Written], family: str
) -> None:
    """Also where a head is wider than its share of the width (Qwen3)."""
    made = written(family, **({"head_dim": 32} if family == "qwen3" else {}))
    ours = transformers.AutoModelForCausalLM.from_pretrained(added(made.file))
    assert torch.equal(logits(ours), logits(made.model))


def test_the_stretched_frequencies_of_llama_3_are_kept(
    models_home: ModelStore, written: Callable[..., Written]
) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    stretched = transformers.AutoConfig.for_model(
        "llama", **SHAPE, head_dim=64, rope_parameters=rope
    )
    plain = transformers.AutoConfig.for_model(
        "llama", **SHAPE, head_dim=64, rope_parameters={**rope, "rope_type": "default"}
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    factors = (rotary(plain).inv_freq / rotary(stretched).inv_freq).numpy()
    made = written(
        "llama", head_dim=64, rope_parameters=rope, tensors={"rope_freqs.weight": factors}
    )
    ours = transformers.AutoModelForCausalLM.from_pretrained(added(made.file))
    assert ours.config.rope_parameters == rope
    assert torch.equal(logits(ours), logits(made.model))


def test_a_large_model_is_written_in_several_files(
    written: Callable[..., Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halteres.models.gguf._SHARD_BYTES", 100_000)
    made = written("llama")
    (tmp_path / "folder").mkdir()
    read_gguf(made.file).write(tmp_path / "folder")
    assert len(list((tmp_path / "folder").glob("*.safetensors"))) > 2
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert torch.equal(logits(ours), logits(made.model))


def test_the_tokenizer_and_the_chat_template_are_the_files(
    models_home: ModelStore, written: Callable[..., Written]
) -> None:
    made = written("qwen3", **WIDE)
    folder = added(made.file)
    ours, original = load_tokenizer(str(folder)), load_tokenizer(str(builtin_path(TINY)))
    theirs = transformers.AutoTokenizer.from_pretrained(made.file.parent, gguf_file=made.file.name)
    by_transformers = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS[:3]:
        assert (
            ours.encode(text)
            == original.encode(text)
            == theirs.encode(text)
            == by_transformers.encode(text)
        )
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    assert ours.encode("e\u0301") == original.encode("\u00e9"), "Qwen's text is normalised"
    assert by_transformers.chat_template == made.values["tokenizer.chat_template"]
    assert ours.apply_chat_template(CHAT) == original.apply_chat_template(CHAT)
    assert (ours.eos_token_ids, ours.pad_token_id, ours.specials) == ((2,), 0, original.specials)


def test_a_smollm_reads_every_digit_alone(
    models_home: ModelStore, written: Callable[..., Written]
) -> None:
    tokenizer = load_tokenizer(
        str(added(written("llama", values={"tokenizer.ggml.pre": "smollm"}).file))
    )
    assert [tokenizer.token(number) for number in tokenizer.encode("  12")[-2:]] == ["1", "2"]
    assert tokenizer.encode("  12")[:-2] == tokenizer.encode("  ")


def test_a_llama_3_begins_a_text_with_its_own_token_and_ends_an_answer_with_either(
    models_home: ModelStore, written: Callable[..., Written]
) -> None:
    values = {
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 3,
    }
    tokenizer = load_tokenizer(str(added(written("llama", values=values).file)))
    assert tokenizer.encode("1", add_special_tokens=True) == [1, *tokenizer.encode("1")]
    assert tokenizer.eos_token_ids == (2, 3)


def sentencepiece() -> Mapping[str, Any]:
    """A vocabulary of SentencePiece's kind: bytes, letters and a few words, each the better the
    earlier it stands.
    """
    letters = [chr(code) for code in range(33, 127)]
    words = [
        "▁t",
        "he",
        "▁the",
        "in",
        "er",
        "▁a",
        "▁w",
        "▁wh",
        "at",
        "▁what",
        "is",
        "▁is",
        "▁▁",
        "th",
    ]
    texts = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *words,
        "▁",
        *letters,
    ]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(texts) - 259)]
    return {
        "vocab_size": None,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(texts) - 259)],
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": None,
    }


def test_a_sentencepiece_vocabulary_reads_as_in_transformers(
    models_home: ModelStore, written: Callable[..., Written]
) -> None:
    values = sentencepiece()
    made = written("llama", vocab_size=len(values["tokenizer.ggml.tokens"]), values=values)
    ours = load_tokenizer(str(added(made.file)))
    theirs = transformers.AutoTokenizer.from_pretrained(made.file.parent, gguf_file=made.file.name)
    for text in ("what is the winter", "Inner  éther🎲", "a\n\nb"):
        assert ours.encode(text, add_special_tokens=True) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.decode(ours.encode(" a")) == " a", (
        "SentencePiece's own space stands before the text's"
    )


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"values": {"general.architecture": "gemma3"}},
            "architecture is 'gemma3'; the engine computes qwen3",
        ),
        ({"values": {"llama.rope.scaling.type": "yarn"}}, r"scaled \('yarn'\)"),
        ({"values": {"tokenizer.ggml.pre": "tekken"}}, "split as 'tekken'"),
        ({"values": {"tokenizer.ggml.model": "bert"}}, "of the kind 'bert'"),
        ({"values": {"llama.block_count": 3}}, "lacks the tensor 'blk.2.attn_k.weight'"),
        (
            {"tensors": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}},
            "has the tensor 'blk.0.attn_q.bias'",
        ),
        ({"tensors": {"rope_freqs.weight": np.full(8, 3, np.float32)}}, "not Llama 3's"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused_with_the_reason(
    written: Callable[..., Written], changed: Mapping[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match="cannot be converted") as refused:
        read_gguf(written("llama", **changed).file)
    assert refused.match(reason)


def test_a_file_that_is_cut_off_or_of_another_kind_is_refused_in_one_sentence(
    models_home: ModelStore, written: Callable[..., Written]
) -> None:
    file = written("llama").file
    whole = file.read_bytes()
    for content in (whole[: len(whole) - 9000], whole[:5000], whole[:20], b"", b"PK" + bytes(500)):
        file.write_bytes(content)
        with pytest.raises(InvalidData, match="cannot be read as a GGUF file") as refused:
            added(file)
        assert "cut off or broken" in refused.value.why and refused.value.next
    with pytest.raises(UserError, match="There is no file"):
        added(file.with_name("none.gguf"))
    assert not list(models_home.folder.rglob("*"))


def with_header(
    values: Mapping[str, tuple[int, bytes]], tensors: int = 0, keys: int | None = None
) -> bytes:
    """A file of a header alone: each value as its type's number and its bytes."""
    num_keys = len(values) if keys is None else keys
    content = struct.pack("<4sIQQ", b"GGUF", 3, tensors, num_keys)
    for key, (kind, value) in values.items():
        content += struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value
    return content


ARRAY, STRING, UINT8 = 9, 8, 0


@pytest.mark.parametrize(
    "content",
    [
        with_header({"a": (ARRAY, struct.pack("<IQ", UINT8, 2**60))}),
        with_header({"a": (ARRAY, struct.pack("<IQ", UINT8, 2**63 + 1) + bytes(64))}),
        with_header({"a": (ARRAY, struct.pack("<IQ", STRING, 2**60) + bytes(800))}),
        with_header({"a": (ARRAY, struct.pack("<IQ", UINT8, 20_000_000) + bytes(20_000_000))}),
        with_header(
            {"a": (ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ", UINT8, 2**60))}
        ),
        with_header({"a": (STRING, struct.pack("<Q", 2**62))}),
        with_header({}, keys=2**63),
        with_header({}, tensors=2**62),
        with_header({"a": (77, b"")}),
        struct.pack(">4sIQQ", b"GGUF", 3, 0, 1)
        + struct.pack(">Q", 1)
        + b"a"
        + struct.pack(">IIQ", ARRAY, UINT8, 2**50),
    ],
)
def test_a_count_beyond_the_file_is_refused_before_anybody_follows_it(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(content)
    with pytest.raises(InvalidData, match="cannot be read as a GGUF file"):
        read_gguf(file)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"llama.block_count": 2**31}, "layers by its header"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos token is 1000000"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 of tokenizer.ggml.token_type"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused_by_name(
    written: Callable[..., Written], values: Mapping[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        read_gguf(written("llama", values=values).file)


def test_weights_that_are_not_finite_are_refused_and_nothing_stays(
    models_home: ModelStore, written: Callable[..., Written]
) -> None:
    bad = np.full((64,), np.nan, np.float32)
    with pytest.raises(UserError, match=r"'output_norm\.weight' holds values that are not finite"):
        added(written("llama", tensors={"output_norm.weight": bad}).file)
    assert not [path for path in models_home.folder.rglob("*") if path.is_file()]


def test_without_the_package_the_command_that_installs_it_is_named(
    written: Callable[..., Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written("llama").file
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install 'halteres\[gguf\]'"):
        read_gguf(file)


@pytest.mark.parametrize("broken", [KeyboardInterrupt(), OSError("No space left on device")])
def test_a_conversion_that_is_broken_off_leaves_nothing(
    models_home: ModelStore, broken: BaseException
) -> None:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        assert list(stored_models(models_home.folder)) == [], (
            "what is being written is no model yet"
        )
        raise broken

    with pytest.raises((KeyboardInterrupt, ServerError)):
        models_home.add_written(write, "org/mine")
    assert not [path for path in models_home.folder.rglob("*") if path.is_file()]
    assert models_home.registered() == {}


def test_a_converted_model_is_listed_cannot_be_overwritten_and_can_be_removed(
    models_home: ModelStore, written: Callable[..., Written]
) -> None:
    file = written("llama").file
    folder = added(file)
    assert models_home.registered() == {"mine": ("mine",)}
    with pytest.raises(Conflict, match="The name 'mine' is taken"):
        added(file)
    models_home.remove("mine")
    assert not folder.exists() and models_home.registered() == {}
