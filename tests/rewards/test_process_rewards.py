"""Process rewards: rows in steps train the score of every state, which is read out of one pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halteres.errors import InvalidData
from halteres.models import TINY
from halteres.rewards import RewardConfig, RewardModel, RewardTrainer, evaluation_report
from halteres.rewards.components import RewardSpec
from halteres.rewards.evaluation import evaluate
from halteres.rewards.functions import Sample
from halteres.rewards.preferences import Comparison, Preferences, read_preferences
from halteres.rewards.reward_list import RewardList
from halteres.rewards.scorer import LocalScorer
from halteres.rewards.torch.losses import comparison_loss
from rewards.scorers import Scripted

pytestmark = pytest.mark.runs

STEPS = {
    "prompt": "1 + 2 + 3?",
    "completions": ["1 + 2 = 3", "3 + 3 = 7", "So 7."],
    "labels": [True, False, False],
}


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def rows_in_steps(count: int, *, conversational: bool = False) -> Preferences:
    """Four steps, which are right until one of them says No."""
    rows: list[dict[str, Any]] = []
    for n in range(count):
        wrong = n % 5  # 4: none is
        steps = [f"{'No' if k == wrong else 'So'}: {n + k}." for k in range(4)]
        labels: list[bool | None] = [k < wrong for k in range(4)]
        if conversational:
            messages = [[said("assistant", step), said("user", "Go on.")] for step in steps]
            rows.append(
                {
                    "prompt": [said("user", f"Count from {n}.")],
                    "completions": [message for pair in messages for message in pair],
                    "labels": [label for one in labels for label in (one, None)],
                }
            )
        else:
            rows.append({"prompt": f"Count from {n}. ", "completions": steps, "labels": labels})
    return read_preferences(rows)


def trainer(folder: Path, data: Preferences, **settings: Any) -> RewardTrainer:
    asked = {
        "output_dir": str(folder),
        "max_steps": 24,
        "learning_rate": 3e-3,
        "disable_tqdm": True,
        **settings,
    }
    return RewardTrainer(TINY, RewardConfig(**asked), train_dataset=data, eval_dataset=data)


def refusal(*rows: Any) -> InvalidData:
    with pytest.raises(InvalidData) as raised:
        read_preferences(rows)
    return raised.value


def test_the_steps_of_a_row_are_read_as_the_states_after_them() -> None:
    (one,) = read_preferences([STEPS]).comparisons
    assert one.completions == ("1 + 2 = 3", "1 + 2 = 3\n3 + 3 = 7", "1 + 2 = 3\n3 + 3 = 7\nSo 7.")
    assert (one.labels, one.ranks, one.prompt) == ((True, False, False), (0, 0, 0), "1 + 2 + 3?")
    right, question, wrong = (
        said("assistant", "3"),
        said("user", "And 3 more?"),
        said("assistant", "7"),
    )
    chat = {"prompt": [said("user", "1 + 2?")], "labels": [True, None, False]}
    (one,) = read_preferences([{**chat, "completions": [right, question, wrong]}]).comparisons
    assert one.completions == ((right,), (right, question, wrong)) and one.labels == (True, False)
    (same,) = read_preferences(
        [{**chat, "completions": [right, [question, wrong]], "labels": [True, False]}]
    ).comparisons
    assert same.completions == one.completions


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({**STEPS, "labels": [True, False]}, "'labels' are not as many as 'completions'"),
        ({**STEPS, "labels": [True, False, 1]}, "a label is neither true, false nor null"),
        ({**STEPS, "labels": [None, None, None]}, "no step has a label"),
        ({**STEPS, "completions": []}, "'completions' is not a list of one or more"),
        ({**STEPS, "completions": ["a", " ", "b"]}, "'completions' is empty"),
        ({**STEPS, "completions": [[], [said("assistant", "b")], []]}, "'completions' is empty"),
        (
            {**STEPS, "completions": ["a", [said("assistant", "b")], "c"]},
            "standard and conversational",
        ),
        ({**STEPS, "margin": 1.0}, "'tie' and 'margin' are for two completions, not for steps"),
        (
            {"prompt": "?", "chosen": "a", "rejected": "b"},
            "holds ranked completions, while row 1 holds steps with labels",
        ),
        (
            {"chosen": [said("assistant", "a")], "rejected": [said("assistant", "b")]},
            "holds ranked completions, while row 1 holds steps with labels",
        ),
    ],
)
def test_rows_in_steps_that_cannot_be_used_are_told_by_their_numbers(
    row: Any, problem: str
) -> None:
    error = refusal(STEPS, STEPS, row)
    assert "row 3: " in error.why and problem in error.why
    assert '"labels": [true, false]' in error.next, "the example is of a row in steps"


def test_labels_that_are_all_alike_are_warned_of() -> None:
    (warning,) = read_preferences([{**STEPS, "labels": [True, None, True]}]).warnings
    assert warning == "data row 1: every step is right."
    assert not read_preferences([STEPS]).warnings


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_mean_cross_entropy_of_a_rows_states(smoothing: float) -> None:
    rows = [
        Comparison(completions=("",) * 3, ranks=(0, 0, 0), labels=(True, False, True), weight=2.0),
        Comparison(completions=("",) * 2, ranks=(0, 1)),
    ]
    scores = np.array([0.5, 2.0, -1.5, 1.0, 0.25])
    settings = RewardConfig(label_smoothing=smoothing, tie_policy="drop")
    chances = 1 / (1 + np.exp(-scores[:3]))
    targets = np.array([1.0, 0.0, 1.0]) * (1 - 2 * smoothing) + smoothing
    states = 2.0 * np.mean(-targets * np.log(chances) - (1 - targets) * np.log(1 - chances))
    lead = scores[3] - scores[4]
    pair = (1 - smoothing) * np.log1p(np.exp(-lead)) + smoothing * np.log1p(np.exp(lead))
    assert comparison_loss(torch.tensor(scores), rows, settings).item() == pytest.approx(
        states + pair, abs=1e-6
    )


@pytest.mark.parametrize("conversational", [False, True], ids=["strings", "messages"])
def test_all_states_of_a_row_are_computed_in_one_pass_and_score_as_if_each_were_alone(
    tmp_path: Path, conversational: bool
) -> None:
    data = rows_in_steps(8, conversational=conversational)
    together, apart = (trainer(tmp_path, data, share_prefixes=share) for share in (True, False))
    losses, computed = list[float](), list[int]()
    for one in (together, apart):
        before = one.model.network.num_computed_tokens
        losses.append(one.evaluate()["eval_loss"])
        computed.append(one.model.network.num_computed_tokens - before)
    template, tokenizer = together.model.template, together.model.tokenizer
    longest = max(
        len(template.render_comparison(tokenizer, one)[-1].tokens) for one in data.comparisons
    )
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    # a state that is a string ends with tokens of its own
    assert computed[0] <= 8 * (longest + 2 * 4) < computed[1]


async def test_it_learns_which_step_is_the_first_wrong_one(tmp_path: Path) -> None:
    data = rows_in_steps(40)
    result = trainer(tmp_path / "steps", data, max_steps=60).train()
    assert result.metrics["eval_accuracy"] > 0.95
    model = RewardModel.load(tmp_path / "steps")
    assert model.file is not None and model.file.data["in_steps"] is True
    found = await evaluate(LocalScorer(model, "raw"), data, probe=False)
    assert found.overall.accuracy.count == 160 and found.overall.accuracy.value > 0.95
    assert found.first_wrong_step is not None and found.first_wrong_step.count == 40
    assert found.first_wrong_step.value > 0.8
    assert (
        "first wrong step" in evaluation_report.page(found)
        and evaluation_report.as_json(found)["first_wrong_step"]["count"] == 40
    )


async def test_steps_and_the_first_wrong_one_are_counted() -> None:
    rows = [
        # told: right, wrong, wrong
        {"completions": ["a", "b", "c"], "labels": [True, True, False]},
        {"completions": ["d", "e"], "labels": [True, False]},  # ... right, wrong
        {"completions": ["f"], "labels": [True], "kind": "short"},  # ... right
    ]
    scorer = Scripted(lambda text: 1.0 if "\n" not in text else -2.0)
    found = await evaluate(scorer, read_preferences(rows), probe=False)
    assert (found.overall.accuracy.value, found.overall.accuracy.count) == (5 / 6, 6)
    assert found.first_wrong_step is not None
    assert (found.first_wrong_step.value, found.first_wrong_step.count) == (2 / 3, 3)
    assert [one.lead for one in found.mistakes] == [-2.0] and found.by_kind[
        "short"
    ].accuracy.value == 1.0
    page = evaluation_report.page(found)
    assert "the last step is right" in page and "first wrong step" in page


@pytest.mark.parametrize("when", ["turn", "difference"])
async def test_the_turns_of_an_episode_are_scored_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: Any
) -> None:
    """As many tokens are computed as the whole episode has; the scores are those of each state
    alone.
    """
    trainer(tmp_path / "reward", rows_in_steps(8, conversational=True), max_steps=2).train()
    passes: list[int] = []
    rewards = RewardList([RewardSpec(name="rm", model=str(tmp_path / "reward"), when=when)])
    model = RewardModel.load(tmp_path / "reward")
    forward = type(model.network).outputs

    def outputs(network: Any, texts: Sequence[Any], **how: Any) -> torch.Tensor:
        passes.append(len(texts))
        return forward(network, texts, **how)

    monkeypatch.setattr(type(model.network), "outputs", outputs)
    prompt = (said("user", "Count from 3."),)
    turns = tuple(
        message
        for n in range(5)
        for message in (said("assistant", f"So: {n}."), said("user", "Go on."))
    )
    samples = [
        Sample(prompt=prompt, completion=turns, answers=(0, 2, 4, 6, 8)),
        Sample(prompt=prompt, completion=turns[4:8], answers=(0, 2)),
    ]
    first, second = (await rewards.score({}, samples)).values["rm"]
    assert passes == [7]
    assert first is not None and second is not None
    alone = [model.score([[*prompt, *turns[: 2 * n + 1]]])[0].value for n in range(5)]
    if when == "difference":
        alone = [after - before for before, after in zip([0.0, *alone], alone, strict=False)]
    assert first.turns == pytest.approx(alone, abs=1e-4) and len(second.turns) == 2
