"""What is read off a model's folder without loading it, and which folders have no shape."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halteres.models.shape import (
    FAMILIES,
    NotWhole,
    own_tensors,
    read_config,
    read_shape,
    weight_files,
)

from .conftest import Change, change_weights, edit, prefixed, without

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a head of its own": {"tie_word_embeddings": False},
    "a tied head": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 24},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["CausalLM", "SequenceClassification"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_of_a_family_are_those_that_transformers_saves(
    family: str, kind: str, variant: str, tmp_path: Path
) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(family, **SMALL, **VARIANTS[variant], num_labels=1)
    maker: Any = getattr(transformers, f"AutoModelFor{kind}")
    model = maker.from_config(config)
    model.save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    expected = {name: tuple(one.shape) for name, one in model.state_dict().items()}
    if kind == "CausalLM" and config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert dict(own_tensors(shape, read_config(tmp_path))) == expected


def test_a_folder_saved_from_the_model_below_the_head_is_whole(own: Path) -> None:
    change_weights(
        own, lambda tensors: {name.removeprefix("model."): one for name, one in tensors.items()}
    )
    assert read_shape(own).layers == 4


INCOMPLETE: dict[str, tuple[Change, dict[str, Any], str]] = {
    "no head": (without("lm_head"), {"tie_word_embeddings": False}, "lm_head.weight"),
    "a prefix of a compiled model": (prefixed("_orig_mod."), {}, "model.embed_tokens.weight"),
    "a prefix of a wrapped model": (prefixed("module."), {}, "model.embed_tokens.weight"),
    "half of the layers": (without(".layers.3."), {}, "model.layers.3.input_layernorm.weight"),
    "one norm": (
        without("layers.1.self_attn.q_norm"),
        {},
        "model.layers.1.self_attn.q_norm.weight",
    ),
    "no final norm": (without("model.norm"), {}, "model.norm.weight"),
    "biases that config.json names": (
        without("none"),
        {"attention_bias": True},
        "self_attn.q_proj.bias",
    ),
    "more layers by config.json": (
        without("none"),
        {"num_hidden_layers": 10**9},
        "model.layers.4.",
    ),
    "another vocabulary": (
        without("none"),
        {"vocab_size": 700},
        r"\[672, 128\], and by config.json \[700, 128\]",
    ),
    "other heads": (without("none"), {"head_dim": 64}, "self_attn.q_proj.weight"),
    "fewer layers by config.json": (
        without("none"),
        {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
        r"have model\.layers\.2\.",
    ),
    "biases that config.json does not name": (
        lambda found: {**found, "model.layers.0.self_attn.q_proj.bias": np.zeros(128, np.float32)},
        {},
        "q_proj.bias",
    ),
    "whole numbers": (
        lambda found: {name: one.astype(np.int8) for name, one in found.items()},
        {},
        "of the type I8",
    ),
    "a text for a tied head": (
        without("none"),
        {"tie_word_embeddings": "false"},
        "tie_word_embeddings",
    ),
    "nothing": (lambda _: {}, {}, "model.embed_tokens.weight"),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_a_folder_that_lacks_weights_of_its_model_has_no_shape_and_the_first_are_named(
    own: Path, case: str
) -> None:
    change, config, says = INCOMPLETE[case]
    change_weights(own, change)
    edit(own / "config.json", **config)
    with pytest.raises(ValueError, match=says):
        read_shape(own)


def test_frequencies_that_older_models_have_in_each_layer_are_no_surplus(own: Path) -> None:
    frequencies = {
        f"model.layers.{n}.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32) for n in range(4)
    }
    change_weights(own, lambda found: {**found, **frequencies})
    assert read_shape(own).layers == 4


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"quantization_config": {"load_in_4bit": True}},
        {"compression_config": {"format": "pack-quantized"}},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
    ],
)
def test_quantised_weights_are_refused_by_the_field_that_says_so(
    own: Path, config: dict[str, Any]
) -> None:
    edit(own / "config.json", **config)
    with pytest.raises(NotWhole, match=r"(quantization|compression)_config"):
        read_shape(own)


@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "deep", "binary", "list", "mark"])
def test_a_config_that_cannot_be_read_is_a_sentence_that_names_it(own: Path, kind: str) -> None:
    file = own / "config.json"
    content = file.read_bytes()
    file.unlink()
    match kind:
        case "fifo":
            os.mkfifo(file)
        case "device":
            file.symlink_to("/dev/zero")
        case "directory":
            file.mkdir()
        case "deep":
            file.write_text('{"a":' * 5000 + "1" + "}" * 5000)
        case "mark":
            file.write_bytes(b"\xef\xbb\xbf" + content)
        case "binary":
            file.write_bytes(b"\xff\xfe\x00{")
        case _:
            file.write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json"):
        read_shape(own)


def test_one_file_of_weights_counts_before_an_index_as_in_transformers(own: Path) -> None:
    (own / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "absent.safetensors"}})
    )
    assert [file.name for file in weight_files(own)] == ["model.safetensors"]
    (own / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"absent\.safetensors"):
        weight_files(own)


@pytest.mark.parametrize(
    "names", ["../other/model.safetensors", "/etc/passwd", "sub/model.safetensors"]
)
def test_an_index_names_files_of_its_own_folder(own: Path, names: str) -> None:
    (own / "model.safetensors").unlink()
    (own / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": names}}))
    with pytest.raises(ValueError, match="no file of its folder"):
        weight_files(own)
