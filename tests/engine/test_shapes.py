"""Which adapters of others are taken, by their adapter_config.json and the names of their
tensors.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest

from halteres.engine.protocol import LoraConfig
from halteres.engine.shapes import foreign_shape
from halteres.errors import InvalidData

PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj"],
}
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
PAIR = (f"{MODULE}.lora_A.weight", f"{MODULE}.lora_B.weight")
EMBEDDING = "base_model.model.model.embed_tokens"

HARMLESS: dict[str, Any] = {
    "auto_mapping": {"base_model_class": "Qwen3ForCausalLM"},
    "base_model_name_or_path": "Qwen/Qwen3-0.6B",
    "eva_config": {"rho": 2.0},
    "exclude_modules": ["k_proj"],
    "inference_mode": True,
    "layers_pattern": "layers",
    "layers_to_transform": [0],
    "lora_dropout": 0.1,
    "megatron_core": "megatron.core",
    "peft_version": "0.21.2",
    "qalora_group_size": 32,
    "revision": "main",
    "task_type": "CAUSAL_LM",
}
"""Fields of PEFT's that change nothing of what is computed from the tensors, each with a value that
switches it on.
"""

READ = {
    *(
        "peft_type",
        "r",
        "lora_alpha",
        "bias",
        "use_rslora",
        "modules_to_save",
        "rank_pattern",
        "alpha_pattern",
    ),
    *("init_lora_weights", "target_modules"),
}
"""Fields that are understood: other tests try their values."""


def shape_of(folder: Path, tensors: Sequence[str] = PAIR, **settings: Any) -> LoraConfig:
    (folder / "adapter_config.json").write_text(json.dumps({**PLAIN, **settings}))
    return foreign_shape(folder, tensors)


def fields_of_peft() -> list[str]:
    """Of the installed version: a newer one may have more."""
    return sorted(
        {field.name for field in dataclasses.fields(peft.LoraConfig)} - {"runtime_config"}
    )


def test_what_peft_writes_for_a_plain_adapter_is_taken(tmp_path: Path) -> None:
    peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"]).save_pretrained(str(tmp_path))
    assert foreign_shape(tmp_path, PAIR) == LoraConfig(
        rank=8, alpha=16, train_mlp=False, train_unembed=False
    )


@pytest.mark.parametrize(
    "name", sorted({*fields_of_peft(), "use_dora", "of_a_later_version"} - READ)
)
def test_a_field_of_peft_that_is_set_is_known_or_refused_by_its_name(
    tmp_path: Path, name: str
) -> None:
    if name in HARMLESS:
        assert shape_of(tmp_path, **{name: HARMLESS[name]}) == shape_of(tmp_path)
        return
    for value in (True, {"a": 1}, [600, 601], "x"):
        with pytest.raises(InvalidData, match=name) as refused:
            shape_of(tmp_path, **{name: value})
        assert "adapter_config.json" in str(refused.value.next)
    for unset in (None, False, [], {}, ""):
        assert shape_of(tmp_path, **{name: unset}) == shape_of(tmp_path)


def test_tokens_that_switch_an_adapter_on_are_refused(tmp_path: Path) -> None:
    """As activated LoRA has them: from these tokens on alone its adapter counts."""
    with pytest.raises(InvalidData, match="alora_invocation_tokens"):
        shape_of(tmp_path, task_type="CAUSAL_LM", bias="none", alora_invocation_tokens=[600, 601])


@pytest.mark.parametrize(
    "value", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "mica", "newer"]
)
def test_an_initialisation_that_may_have_moved_the_base_is_refused(
    tmp_path: Path, value: str
) -> None:
    with pytest.raises(InvalidData, match=value):
        shape_of(tmp_path, init_lora_weights=value)


@pytest.mark.parametrize("value", [True, False, None, "gaussian", "Gaussian", "eva", "orthogonal"])
def test_an_initialisation_of_the_adapter_alone_is_taken(tmp_path: Path, value: Any) -> None:
    assert shape_of(tmp_path, init_lora_weights=value).rank == 8


@pytest.mark.parametrize(
    "targets",
    [
        ["q_proj", "embed_tokens"],
        ["model.embed_tokens"],
        "embed_tokens",
        ["wte"],
        "model.embed_tokens",
    ],
)
def test_an_adapter_of_the_embedding_is_refused_by_the_name_of_its_target(
    tmp_path: Path, targets: Any
) -> None:
    with pytest.raises(InvalidData, match=r"embed_tokens|wte"):
        shape_of(tmp_path, target_modules=targets)


@pytest.mark.parametrize(
    "tensor",
    [
        f"{EMBEDDING}.lora_embedding_A",
        f"{EMBEDDING}.lora_A.weight",
        f"{MODULE}.lora_magnitude_vector.weight",
        f"{MODULE}.lora_B.bias",
        f"{MODULE}.lora_A.default.weight",
        f"{MODULE}.bias",
        "base_model.model.score.weight",
        "base_model.model.model.layers.0.input_layernorm.weight",
    ],
)
def test_a_tensor_that_no_engine_computes_is_refused_by_its_name(
    tmp_path: Path, tensor: str
) -> None:
    with pytest.raises(InvalidData, match="no engine computes") as refused:
        shape_of(tmp_path, (*PAIR, tensor))
    assert tensor in refused.value.why


def test_copies_of_the_base_are_left_to_the_engine_which_compares_them(tmp_path: Path) -> None:
    copies = (f"{EMBEDDING}.weight", "base_model.model.lm_head.base_layer.weight")
    assert shape_of(tmp_path, (*PAIR, *copies)) == shape_of(tmp_path)
