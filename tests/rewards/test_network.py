"""The weights of reward models: what a folder lacks is never random, but for the head of a new
one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from halteres.errors import HalteresError, InvalidConfig, InvalidData
from halteres.rewards.model_folder import read_model_folder
from halteres.rewards.torch.network import open_network
from halteres.rewards.training_plan import LoraSettings

from .torch_fixtures import random_network, tiny

Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def without(part: str) -> Change:
    return lambda found: {name: one for name, one in found.items() if part not in name}


def change_weights(folder: Path, change: Change) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base model of the user's."""
    return Path(shutil.copytree(tiny(), tmp_path / "base"))


@pytest.fixture(params=["qwen3", "mistral"])
def reward(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A reward model's folder: of a family whose tensors are known, and of another."""
    random_network(request.param).save(tmp_path / "reward")
    return tmp_path / "reward"


def test_the_head_of_a_new_reward_model_is_drawn(base: Path) -> None:
    assert open_network(base, padding=0).num_parameters
    assert open_network(base, padding=0, lora_settings=LoraSettings(r=2)).trained()


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (without(".layers.3."), "model.layers.3.input_layernorm.weight"),
        (without("model.norm"), "model.norm.weight"),
        (
            lambda found: {f"_orig_mod.{name}": one for name, one in found.items()},
            "model.embed_tokens.weight",
        ),
    ],
)
def test_a_new_reward_model_is_not_put_on_random_weights(
    base: Path, change: Change, first: str
) -> None:
    change_weights(base, change)
    with pytest.raises(InvalidConfig) as refused:
        open_network(base, padding=0)
    assert first in refused.value.why


@pytest.mark.parametrize(
    ("part", "first"),
    [("score.", "score.weight"), (".layers.1.", "model.layers.1."), ("embed", "embed_tokens")],
)
def test_a_reward_model_that_lacks_weights_its_head_among_them_is_refused(
    reward: Path, part: str, first: str
) -> None:
    assert open_network(reward, padding=0).num_parameters
    change_weights(reward, without(part))
    with pytest.raises(HalteresError) as refused:
        open_network(reward, padding=0)
    assert first in refused.value.why


def test_a_reward_model_with_weights_that_are_not_finite_is_refused(reward: Path) -> None:
    def broken(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found["score.weight"][0, 0] = float("nan")
        return found

    change_weights(reward, broken)
    with pytest.raises(InvalidConfig) as refused:
        open_network(reward, padding=0)
    assert "score.weight" in refused.value.why


def test_a_reward_model_that_lacks_weights_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "reward"
    random_network("qwen3").save(folder)
    assert read_model_folder(folder).num_bytes
    change_weights(folder, without("score."))
    with pytest.raises(InvalidData, match=r"score\.weight"):
        read_model_folder(folder)


CONFIGS: Mapping[str, Callable[[Path], Any]] = {
    "a FIFO": lambda file: (file.unlink(), os.mkfifo(file)),
    "endless": lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
    "deep": lambda file: file.write_text("[" * 100_000),
    "a list": lambda file: file.write_text("[]"),
    "quantised": lambda file: file.write_text(
        json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "awq"}})
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_cannot_be_used_is_a_sentence(reward: Path, case: str) -> None:
    CONFIGS[case](reward / "config.json")
    with pytest.raises(HalteresError, match=r"config\.json"):
        open_network(reward, padding=0)
