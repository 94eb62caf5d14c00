"""Our reward trainer beside TRL 1.16's: the same tokens, losses, gradients and first steps; folders
cross both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halteres.models import TINY, builtin_path
from halteres.rewards import RewardConfig, RewardModel, RewardTrainer
from halteres.rewards.model_folder import template_for
from halteres.rewards.preferences import read_preferences
from halteres.rewards.torch import trainer as trainer_module
from halteres.rewards.torch.losses import comparison_loss
from halteres.tokenizer import Tokenizer

from .test_reference_values import ran

pytestmark = pytest.mark.clients


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SUMS = [
    ("What is 2 + 3?", "It is 5.", "6"),
    ("And 4 + 4, please?", "8", "No idea at all."),
    ("7 + 1?", "8", "81"),
]

FORMATS: dict[str, list[dict[str, Any]]] = {
    "standard, implicit": [{"chosen": p + a, "rejected": p + b} for p, a, b in SUMS],
    "standard, explicit": [
        {"prompt": p, "chosen": a, "rejected": b + "<|im_end|>"} for p, a, b in SUMS
    ],
    "conversational, implicit": [
        {"chosen": [user(p), assistant(a)], "rejected": [user(p), assistant(b)]} for p, a, b in SUMS
    ],
    "conversational, explicit": [
        {
            "prompt": [{"role": "system", "content": "Add."}, user(p)],
            "chosen": [assistant(a)],
            "rejected": [assistant(b)],
        }
        for p, a, b in SUMS
    ],
    "pre-tokenised": [{"chosen_ids": [5, 6, 7, 2], "rejected_ids": [5, 6, 2]}],
}
CHATS = FORMATS["conversational, explicit"]
MARGINS = [{**row, "margin": margin} for row, margin in zip(CHATS, (0.5, 0.0, 1.5), strict=True)]
LOSSES: dict[str, tuple[list[dict[str, Any]], float | None]] = {
    "plain": (CHATS, None),
    "margin": (MARGINS, None),
    "centred": (CHATS, 0.05),
    "margin and centred": (MARGINS, 0.05),
}
STEPS = [
    {
        "prompt": [user(f"What is {a} + {b}?")],
        "chosen": [assistant(f"{a + b}")],
        "rejected": [assistant(f"{a * b + 1}")],
    }
    for a in range(2, 8)
    for b in range(2, 6)
]
TEXTS = ["What is 2 + 3? It is 5.", "No"]
SCORED = [[user("What is 2 + 3?"), assistant("5")], [user("And 4 + 4?"), assistant("No.")]]


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> RewardModel:
    """The built-in model with a head, saved: the same weights for both."""
    folder = tmp_path_factory.mktemp("model") / "reward"
    config = RewardConfig(
        output_dir=str(folder), max_steps=1, learning_rate=1e-12, disable_tqdm=True
    )
    RewardTrainer(TINY, config, train_dataset=CHATS).train()
    return RewardModel.load(folder)


@pytest.fixture(scope="module")
def trl(
    untrained: RewardModel,
    client_python: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    folder = tmp_path_factory.mktemp("trl")
    asked = {
        "model": str(untrained.folder),
        "scratch": str(folder),
        "trained": str(folder / "trained"),
        "formats": FORMATS,
        "losses": LOSSES,
        "steps": STEPS,
        "texts": TEXTS,
        "ids": [
            list(untrained.template.render(untrained.tokenizer, text).tokens) for text in SCORED
        ],
    }
    python = client_python("trl", "torch", "trl==1.16.*", "peft", "datasets")
    return {
        **ran(python, "trl_reward_values.py", folder, asked),
        "folder": folder,
        "ids": asked["ids"],
    }


@pytest.mark.parametrize("name", FORMATS)
def test_token_ids_are_trls(trl: Any, name: str) -> None:
    tokenizer = Tokenizer(builtin_path(TINY) or Path())
    template = template_for(tokenizer)
    ours = [
        [list(one.tokens) for one in template.render_comparison(tokenizer, comparison)]
        for comparison in read_preferences(FORMATS[name]).comparisons
    ]
    assert ours == trl["tokens"][name]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_trls(
    trl: Any, untrained: RewardModel, tmp_path: Path, name: str, share: bool
) -> None:
    rows, coefficient = LOSSES[name]
    config = RewardConfig(
        output_dir=str(tmp_path), center_rewards_coefficient=coefficient, share_prefixes=share
    )
    one = RewardTrainer(untrained.folder, config, train_dataset=rows)
    network, examples = one.model.network, one._train
    texts = [text for example in examples for text in example.texts]
    scores = network.outputs(texts, share=share).squeeze(-1)
    assert (network.num_computed_tokens < sum(map(len, texts))) == share
    loss = comparison_loss(scores, [example.comparison for example in examples], one.args) / len(
        examples
    )
    loss.backward()
    assert loss.item() == pytest.approx(trl["losses"][name], abs=1e-6)
    with np.load(trl["folder"] / f"{name}.npz") as theirs:
        norm = np.sqrt(sum(float((theirs[key] ** 2).sum()) for key in theirs.files))
        for key, parameter in network.trained().items():
            assert parameter.grad is not None
            assert np.linalg.norm(parameter.grad.numpy() - theirs[key]) <= 1e-5 * norm, key


def test_the_first_steps_are_trls(
    trl: Any, untrained: RewardModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW, its schedule and clipping, over rows in one order."""

    def in_order(lengths: Any, size: int, **_: Any) -> list[list[int]]:
        return [list(range(start, start + size)) for start in range(0, len(lengths), size)]

    monkeypatch.setattr(trainer_module, "epoch_batches", in_order)
    config = RewardConfig(
        output_dir=str(tmp_path / "ours"),
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        disable_tqdm=True,
    )
    result = RewardTrainer(untrained.folder, config, train_dataset=STEPS).train()
    assert [one["loss"] for one in result.history] == pytest.approx(trl["trajectory"], rel=2e-3)


def test_a_folder_that_trl_trained_is_scored_here_as_there(trl: Any) -> None:
    model = RewardModel.load(trl["folder"] / "trained")
    assert any("trained elsewhere" in note for note in model.notes)
    assert [one.value for one in model.score(SCORED)] == pytest.approx(
        trl["theirs"]["model"], abs=1e-5
    )


def test_our_folder_is_scored_there_as_here_and_the_pipeline_gives_raw_scores(
    trl: Any, untrained: RewardModel
) -> None:
    """The pipeline knows no scoring template: it reads the bare text, without an end token."""
    assert trl["ours"]["model"] == pytest.approx(
        [one.value for one in untrained.score(SCORED)], abs=1e-5
    )
    with torch.inference_mode():
        bare = [
            untrained.network.model(
                input_ids=torch.tensor([untrained.tokenizer.encode(text)])
            ).logits.item()
            for text in TEXTS
        ]
    assert trl["ours"]["pipeline"] == pytest.approx(bare, abs=1e-5)
