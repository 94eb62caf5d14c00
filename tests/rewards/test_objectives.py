"""Several objectives: an output for each, trained by its own rows; a score is their weighted sum,
and tells them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from halteres.cli.main import app
from halteres.clients.rewards import RewardClient
from halteres.errors import InvalidConfig, InvalidData
from halteres.models import TINY
from halteres.rewards import RewardConfig, RewardModel, RewardTrainer, evaluation_report
from halteres.rewards.components import RewardSpec
from halteres.rewards.evaluation import evaluate
from halteres.rewards.functions import Sample
from halteres.rewards.model_folder import (
    Calibration,
    read_model_folder,
    read_reward_file,
    write_reward_file,
)
from halteres.rewards.preferences import Preferences, read_preferences
from halteres.rewards.reward_list import RewardList
from halteres.rewards.scorer import LocalScorer
from halteres.rewards.server import create_app
from halteres.scores import Scorable

from .standin_model import listening
from .torch_fixtures import sums

pytestmark = pytest.mark.runs

CHAT = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "Gladly: 5"},
]
WEIGHTS = {"helpful": 0.75, "safe": 0.25}


def objectives(count: int = 24, seed: int = 0) -> Preferences:
    """Polite answers are the helpful ones, and the others the safe ones; every third row is of
    both.
    """
    rows = sums(count, seed).comparisons
    polite = [one for one in rows if one.kind == "polite"]
    found = [replace(one, objective="helpful") for one in polite]
    found += [replace(one, objective="safe", ranks=(1, 0)) for one in polite]
    found += [one for one in rows if one.kind == "correct"]
    return Preferences(comparisons=tuple(found), source="objectives", digest=f"o{count}:{seed}")


def of(objective: str | None) -> Preferences:
    rows = objectives()
    return replace(
        rows, comparisons=tuple(one for one in rows.comparisons if one.objective == objective)
    )


def trainer(
    folder: Path, data: Preferences, model: str | Path = TINY, **settings: Any
) -> RewardTrainer:
    asked = {
        "output_dir": str(folder),
        "max_steps": 4,
        "logging_steps": 1,
        "disable_tqdm": True,
        **settings,
    }
    return RewardTrainer(str(model), RewardConfig(**asked), train_dataset=data, eval_dataset=data)


@pytest.fixture(scope="module", params=[None, {"r": 4}], ids=["whole", "lora"])
def trained(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> RewardTrainer:
    folder = tmp_path_factory.mktemp("objectives") / "reward"
    one = trainer(
        folder, objectives(), objective_weights=WEIGHTS, lora=request.param, learning_rate=3e-3
    )
    one.train()
    one.model.folder = folder
    return one


def folder_of(trained: RewardTrainer) -> Path:
    assert trained.model.folder is not None
    return trained.model.folder


def test_an_objectives_rows_train_its_output_with_the_bits_that_a_model_of_one_output_would_have(
    tmp_path: Path,
) -> None:
    first = trainer(tmp_path / "first", objectives(), max_steps=1)
    first.train()
    RewardModel.load(tmp_path / "first").save_merged(
        tmp_path / "folded", {"helpful": 1.0, "safe": 0.0}
    )
    plain = replace(
        of("helpful"),
        comparisons=tuple(replace(one, objective=None) for one in of("helpful").comparisons),
    )
    several = trainer(tmp_path / "several", of("helpful"), tmp_path / "first", max_grad_norm=0)
    single = trainer(tmp_path / "single", plain, tmp_path / "folded", max_grad_norm=0)
    ours, theirs = several.train(), single.train()
    assert [row["loss"] for row in ours.history] == [row["loss"] for row in theirs.history]
    assert ours.metrics["eval_loss"] == theirs.metrics["eval_loss"]
    assert ours.metrics["accuracy/objective/helpful"] == theirs.metrics["accuracy"]
    expected = single.model.network.trained()
    for name, value in several.model.network.trained().items():
        assert torch.equal(value[:1] if name == "score.weight" else value, expected[name]), name


def test_a_score_is_the_weighted_sum_of_its_parts_in_memory_and_reloaded(
    trained: RewardTrainer,
) -> None:
    loaded = RewardModel.load(folder_of(trained))
    (here,), (there,) = trained.model.score([CHAT]), loaded.score([CHAT])
    assert here == there and set(here.parts) == {"helpful", "safe"}
    assert here.value == pytest.approx(
        0.75 * here.parts["helpful"] + 0.25 * here.parts["safe"], abs=1e-6
    )
    stored = read_reward_file(folder_of(trained))
    assert stored is not None and stored.objective_weights == WEIGHTS
    assert read_model_folder(folder_of(trained)).facts["objective_weights"] == WEIGHTS


def test_rows_without_an_objective_train_the_weighted_sum(
    tmp_path: Path, trained: RewardTrainer
) -> None:
    one = trainer(tmp_path / "sum", of(None), folder_of(trained), max_steps=6)
    before = one.evaluate()["eval_loss"]
    assert one.train().metrics["eval_loss"] < before
    assert one.model.network.objective_weights == WEIGHTS


def test_weights_asked_for_go_before_those_of_a_loaded_model(
    tmp_path: Path, trained: RewardTrainer
) -> None:
    config = RewardConfig(output_dir=str(tmp_path), objective_weights={"helpful": 1.0, "safe": 3.0})
    other = RewardTrainer(
        RewardModel.load(folder_of(trained)), config, folder_of(trained), objectives()
    )
    assert other.model.network.objective_weights == {"helpful": 1.0, "safe": 3.0}


@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["whole", "lora"])
def test_stopped_and_resumed_is_as_if_never_stopped(tmp_path: Path, lora: Any) -> None:
    straight = trainer(tmp_path / "straight", objectives(), lora=lora)
    straight.train()
    broken = trainer(tmp_path / "broken", objectives(), lora=lora)
    steps = iter(range(1, 9))
    broken.should_stop = lambda: next(steps) == 2
    assert broken.train().stop_reason == "stopped"
    resumed = trainer(tmp_path / "broken", objectives(), lora=lora)
    resumed.train(resume_from_checkpoint=True)
    expected = straight.model.network.trained()
    assert all(
        torch.equal(value, expected[name])
        for name, value in resumed.model.network.trained().items()
    )


async def test_objectives_that_contradict_each_other_are_both_learnt_and_told_apart(
    tmp_path: Path,
) -> None:
    rows = replace(objectives(48), comparisons=of("helpful").comparisons + of("safe").comparisons)
    result = trainer(tmp_path / "both", rows, max_steps=24, learning_rate=3e-3).train()
    accuracies = {
        name: result.metrics[f"eval_accuracy/{name}"]
        for name in ("objective/helpful", "objective/safe")
    }
    assert set(accuracies.values()) == {1.0} and "eval_accuracy/polite" in result.metrics, (
        "kinds beside objectives"
    )
    found = await evaluate(
        LocalScorer(RewardModel.load(tmp_path / "both"), "raw"), rows, probe=False
    )
    assert {name: figures.accuracy.value for name, figures in found.by_objective.items()} == {
        "helpful": 1,
        "safe": 1,
    }
    assert evaluation_report.as_json(found)["by_objective"]["safe"]["accuracy"]["value"] == 1.0
    assert "objective safe" in evaluation_report.page(found)


def test_the_exported_folder_has_one_output_that_is_the_weighted_sum(
    trained: RewardTrainer, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    folder, other = folder_of(trained), {"helpful": 0.5, "safe": -2.0}
    (score,) = RewardModel.load(folder).score([CHAT])
    for name, flags, weights in (
        ("own", [], WEIGHTS),
        ("other", ["--objective-weights", "helpful=0.5,safe=-2"], other),
    ):
        done = CliRunner().invoke(
            app, ["reward", "export", str(folder), str(tmp_path / name), *flags]
        )
        assert done.exit_code == 0, done.output
        expected = sum(weights[part] * value for part, value in score.parts.items())
        exported = RewardModel.load(tmp_path / name)
        (one,) = exported.score([CHAT])
        assert (one.value, one.parts) == (pytest.approx(expected, abs=1e-5), {})
        theirs: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / name)
        tokens = torch.tensor([exported.template.render(exported.tokenizer, CHAT).tokens])
        assert theirs.config.num_labels == 1 and json.loads(
            (tmp_path / name / "config.json").read_text()
        )
        assert theirs(tokens).logits.item() == pytest.approx(expected, abs=1e-5)


def test_an_export_with_other_weights_leaves_the_calibration_out(
    trained: RewardTrainer, tmp_path: Path
) -> None:
    model = RewardModel.load(folder_of(trained))
    model.save(tmp_path / "calibrated")
    file = read_reward_file(tmp_path / "calibrated")
    assert file is not None
    write_reward_file(
        tmp_path / "calibrated", file.model_copy(update={"calibration": Calibration(scale=2.0)})
    )
    for weights, kept in ((None, True), ({"helpful": 1.0, "safe": 1.0}, False)):
        RewardModel.load(tmp_path / "calibrated").save_merged(tmp_path / f"{kept}", weights)
        assert (RewardModel.load(tmp_path / f"{kept}").calibration is not None) == kept


async def test_the_parts_reach_a_components_metrics_from_here_and_from_a_server(
    trained: RewardTrainer,
) -> None:
    model = RewardModel.load(folder_of(trained))
    (expected,) = await LocalScorer(model).score([Scorable(prompt=CHAT[:1], completion=CHAT[1:])])
    assert expected is not None
    sample = Sample(prompt=CHAT[:1], completion=CHAT[1:])
    async with listening(create_app({"m": model})) as url:
        for place in (url, str(folder_of(trained))):
            rewards = RewardList([RewardSpec(name="rm", model=place)])
            (value,) = (await rewards.score({}, [sample])).values["rm"]
            await rewards.close()
            assert value is not None and value.parts == pytest.approx(
                dict(expected.parts), abs=1e-5
            )
        async with RewardClient(url) as client:
            (score,) = await client.score([Scorable(completion=CHAT)])
        assert score is not None and set(score.parts) == {"helpful", "safe"}


def test_one_pair_judged_by_two_objectives_is_no_repeated_row() -> None:
    pair = {"prompt": "?", "chosen": "a", "rejected": "b"}
    assert (
        read_preferences([{**pair, "objective": "safe"}, {**pair, "objective": "helpful"}]).warnings
        == ()
    )
    assert read_preferences([{**pair, "objective": "safe"}] * 2).warnings
    assert read_preferences([pair]).objectives == ()


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({"helpfull": 1.0, "safe": 1.0}, "no objective 'helpfull'.*Did you mean 'helpful'"),
        ({"helpful": 1.0}, "has none for 'safe'"),
        ({"helpful": 0.0, "safe": 0.0}, "Every weight of objective_weights is 0"),
    ],
)
def test_weights_that_do_not_fit_the_objectives_are_refused(
    tmp_path: Path, weights: dict[str, float], sentence: str
) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        trainer(tmp_path, objectives(), objective_weights=weights)


def test_a_row_of_an_objective_that_the_model_has_not_is_refused_by_its_number(
    trained: RewardTrainer, tmp_path: Path
) -> None:
    odd = replace(
        of("safe"),
        comparisons=tuple(replace(one, objective="saef") for one in of("safe").comparisons),
    )
    with pytest.raises(
        InvalidData, match=r"Row 1 of objectives has the objective 'saef'.*Did you mean 'safe'"
    ):
        trainer(tmp_path, odd, folder_of(trained))
    with pytest.raises(InvalidConfig, match="weight"):
        RewardModel.load(folder_of(trained)).save_merged(tmp_path / "out", {"helpful": 1.0})
