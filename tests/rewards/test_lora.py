"""An adapter and its head survive saving: in memory, reloaded by us, by PEFT, and merged, the
scores are the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from halteres.errors import InvalidConfig, InvalidData
from halteres.models import TINY
from halteres.rewards import RewardConfig, RewardModel, RewardTrainer
from halteres.rewards.model_folder import read_model_folder
from halteres.rewards.training_plan import LoraSettings

from .torch_fixtures import sums, tiny

CHATS = [
    [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": text}]
    for text in "56"
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RewardModel:
    folder = tmp_path_factory.mktemp("lora") / "reward"
    config = RewardConfig(
        output_dir=str(folder),
        lora=LoraSettings(r=4, lora_alpha=8),
        max_steps=4,
        learning_rate=1e-2,
        disable_tqdm=True,
    )
    trainer = RewardTrainer(TINY, config, train_dataset=sums(32))
    trainer.train()
    trainer.model.network.model.eval()
    trainer.model.folder = folder
    return trainer.model


def scores(model: RewardModel) -> list[float]:
    return [one.value for one in model.score(CHATS)]


def test_adapter_and_head_are_trained_and_nothing_else(trained: RewardModel) -> None:
    names = set(trained.network.trained())
    head = "score.modules_to_save.default.weight"
    assert head in names
    assert all(name == head or ".lora_" in name for name in names)
    assert not any(name.startswith("score.lora") for name in names)


def test_scores_survive_a_reload(trained: RewardModel) -> None:
    assert trained.folder is not None
    assert scores(RewardModel.load(trained.folder)) == scores(trained)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft_scores_the_folder_as_we_do(trained: RewardModel) -> None:
    from peft import AutoPeftModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    theirs: Any = AutoPeftModelForSequenceClassification.from_pretrained(
        trained.folder, num_labels=1, dtype=torch.float32
    )
    theirs.eval()
    with torch.inference_mode():
        found = [
            theirs(
                input_ids=torch.tensor([trained.template.render(trained.tokenizer, chat).tokens])
            ).logits.item()
            for chat in CHATS
        ]
    assert found == pytest.approx(scores(trained), abs=1e-5)


def test_a_merged_folder_scores_the_same_without_an_adapter(
    trained: RewardModel, tmp_path: Path
) -> None:
    assert trained.folder is not None
    model = RewardModel.load(trained.folder)
    model.save_merged(tmp_path / "merged")
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    assert scores(RewardModel.load(tmp_path / "merged")) == pytest.approx(scores(trained), abs=1e-5)


def test_an_adapter_without_its_head_is_refused(trained: RewardModel, tmp_path: Path) -> None:
    """PEFT without `task_type` leaves the head out, and a random one would score."""
    trained.save(tmp_path / "headless")
    file = tmp_path / "headless" / "adapter_model.safetensors"
    save_file({name: one for name, one in load_file(file).items() if "score" not in name}, file)
    with pytest.raises(InvalidData, match=r"score\.weight is missing"):
        RewardModel.load(tmp_path / "headless")


def test_what_is_not_computed_here_is_refused_by_its_name_before_it_is_loaded(
    trained: RewardModel, tmp_path: Path
) -> None:
    trained.save(tmp_path / "odd")
    file = tmp_path / "odd" / "adapter_config.json"
    written = json.loads(file.read_text())
    for name, value in (
        ("use_dora", True),
        ("of_a_later_version", True),
        ("bias", "all"),
        ("init_lora_weights", "pissa"),
        ("modules_to_save", ["score", "embed_tokens"]),
    ):
        file.write_text(json.dumps({**written, name: value}))
        for look in (RewardModel.load, read_model_folder):
            with pytest.raises(InvalidData) as refused:
                look(tmp_path / "odd")
            assert name in refused.value.why
    file.write_text(json.dumps({**written, "of_a_later_version": None}))
    assert scores(RewardModel.load(tmp_path / "odd")) == scores(trained)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_that_peft_wrote_scores_here_as_there(tmp_path: Path) -> None:
    """Rank-stabilised, on some layers: what PEFT computes of it is computed here, too."""
    import peft
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    base: Any = AutoModelForSequenceClassification.from_pretrained(
        tiny(), num_labels=1, dtype=torch.float32
    )
    how: dict[str, Any] = {"r": 4, "use_rslora": True, "layers_to_transform": [1, 3]}
    config = peft.LoraConfig(
        task_type="SEQ_CLS", target_modules=["q_proj"], init_lora_weights=False, **how
    )
    theirs: Any = peft.get_peft_model(base, config).eval()
    theirs.save_pretrained(tmp_path)
    ours = RewardModel.load(tmp_path)
    with torch.inference_mode():
        found = [
            theirs(
                input_ids=torch.tensor([ours.template.render(ours.tokenizer, chat).tokens])
            ).logits.item()
            for chat in CHATS
        ]
    assert scores(ours) == pytest.approx(found, abs=1e-5)


def test_training_goes_on_from_an_adapters_folder(trained: RewardModel, tmp_path: Path) -> None:
    config = RewardConfig(
        output_dir=str(tmp_path / "more"), max_steps=1, learning_rate=1e-9, disable_tqdm=True
    )
    result = RewardTrainer(trained.folder, config, train_dataset=sums(8)).train()
    assert json.loads((result.folder / "adapter_config.json").read_text())["r"] == 4
    assert scores(RewardModel.load(result.folder)) == pytest.approx(scores(trained), abs=1e-4)


def test_modules_that_the_model_has_not_are_refused(tmp_path: Path) -> None:
    config = RewardConfig(output_dir=str(tmp_path), lora=LoraSettings(target_modules=("query",)))
    with pytest.raises(InvalidConfig, match="No layer"):
        RewardTrainer(TINY, config, train_dataset=sums(4))
