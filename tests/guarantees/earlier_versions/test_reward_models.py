"""Reward models written by version 0.1.0, before adapters were PEFT's modules, load and score as they
did then; a training goes on from its checkpoint, or says why not.

`reward_models` was written by that version. `checkpoint-2` is of a training of the built-in
model on `sums(16)`, LoRA of rank 1 on `v_proj`: its adapter, halteres_reward.json and trainer.pt.
The tokenizer's files, as they are in the base model, are left out, and the base's path is BASE.
`whole` is a model of two layers, whose weights are `weights_of_whole`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rewards.torch_fixtures import sums, tiny
from safetensors.torch import save_file

from halteres.errors import InvalidData
from halteres.models import TINY
from halteres.rewards import RewardConfig, RewardModel, RewardTrainer
from halteres.rewards.torch.model import TRAINER_STATE
from halteres.rewards.training_plan import LoraSettings

DATA = Path(__file__).parent / "reward_models"
CHATS = [
    [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": text}]
    for text in ("5", "6", "Gladly: 5")
]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# What the earlier version gave these chats.
CHECKPOINT = [0.14709098637104034, 0.34031644463539124, 0.3559826910495758]
FINISHED = [0.09533947706222534, 0.28750866651535034, 0.627463161945343]
WHOLE = [-0.11881739646196365, -0.12599711120128632, -0.09230135381221771]


def scores(folder: Path) -> list[float]:
    return [one.value for one in RewardModel.load(folder).score(CHATS)]


def weights_of_whole() -> dict[str, torch.Tensor]:
    layer = {
        "input_layernorm": (8,),
        "post_attention_layernorm": (8,),
        "mlp.down_proj": (8, 12),
        "mlp.gate_proj": (12, 8),
        "mlp.up_proj": (12, 8),
        "self_attn.k_norm": (4,),
        "self_attn.q_norm": (4,),
        "self_attn.k_proj": (4, 8),
        "self_attn.v_proj": (4, 8),
        "self_attn.o_proj": (8, 8),
        "self_attn.q_proj": (8, 8),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (672, 8), "model.norm": (8,)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    shapes["score"] = (1, 8)
    found: dict[str, torch.Tensor] = {}
    for i, name in enumerate(sorted(f"{module}.weight" for module in shapes)):
        shape = shapes[name.removesuffix(".weight")]
        wave = np.sin(np.arange(np.prod(shape)) * (0.7 + 0.1 * i)).astype(np.float32) * 0.5
        found[name] = torch.from_numpy(wave + (1 if "norm" in name else 0)).view(shape)
    return found


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """The folder of a training that was stopped."""
    folder = tmp_path / "reward" / "checkpoint-2"
    shutil.copytree(DATA / "checkpoint-2", folder)
    for name in TOKENIZER:
        shutil.copy(tiny() / name, folder / name)
    file = folder / "adapter_config.json"
    file.write_text(file.read_text().replace("BASE", str(tiny())))
    return folder.parent


def settings(folder: Path, **changes: Any) -> RewardConfig:
    own: dict[str, Any] = {
        "lora": LoraSettings(r=1, lora_alpha=3, target_modules=("v_proj",)),
        "max_steps": 4,
        "learning_rate": 1e-2,
        "save_steps": 2,
        "logging_steps": 2,
        "per_device_train_batch_size": 4,
        "train_sampling_strategy": "random",
        "disable_tqdm": True,
    }
    return RewardConfig(output_dir=str(folder), **{**own, **changes})


def test_an_adapter_scores_as_it_did(training: Path) -> None:
    assert scores(training / "checkpoint-2") == pytest.approx(CHECKPOINT, abs=1e-5)


def test_a_whole_model_scores_as_it_did(tmp_path: Path) -> None:
    shutil.copytree(DATA / "whole", tmp_path / "whole")
    for name in TOKENIZER:
        shutil.copy(tiny() / name, tmp_path / "whole" / name)
    save_file(
        weights_of_whole(), tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"}
    )
    assert scores(tmp_path / "whole") == pytest.approx(WHOLE, abs=1e-5)


def test_a_training_goes_on_from_its_checkpoint(training: Path) -> None:
    trainer = RewardTrainer(TINY, settings(training), train_dataset=sums(16))
    result = trainer.train(resume_from_checkpoint=True)
    assert result.num_steps == 4
    assert scores(training) == pytest.approx(FINISHED, abs=1e-4)


def test_a_checkpoint_whose_batches_had_another_order_says_how_to_go_on(
    training: Path, tmp_path: Path
) -> None:
    """By length, rows are sorted by their longest text now."""
    folder = training / "checkpoint-2"
    state = torch.load(folder / TRAINER_STATE, weights_only=True)
    state["order"]["train_sampling_strategy"] = "group_by_length"
    torch.save(state, folder / TRAINER_STATE)
    by_length = settings(training, train_sampling_strategy="group_by_length")
    with pytest.raises(InvalidData) as refused:
        RewardTrainer(TINY, by_length, train_dataset=sums(16)).train(resume_from_checkpoint=True)
    assert f"--model {folder}" in refused.value.next
    more = settings(tmp_path / "more", lora=None, max_steps=1)
    result = RewardTrainer(folder, more, train_dataset=sums(16)).train()
    assert result.stop_reason == "finished"
