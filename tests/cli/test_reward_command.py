"""`halteres reward` as a person calls it, with the built-in model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from halteres.cli.main import app
from halteres.environments.cage import cage_missing
from halteres.errors import HalteresError, InvalidConfig, InvalidData, NotFound
from halteres.models import builtin_path
from halteres.rewards.forecast import forecast
from halteres.rewards.training_plan import TrainingRun, read_plan
from halteres.runs.start import RewardPlan

HELD_OUT = "halteres/arithmetic-pairs:held_out"


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["reward", *map(str, arguments)], catch_exceptions=False)


def told(*arguments: object) -> Any:
    return json.loads(command(*arguments, "--json").stdout)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small set of pairs and a reward model that two steps were taken with."""
    place = tmp_path_factory.mktemp("reward")
    command("data", place, "--pairs", 24, "--held-out", 12, "--seed", 3)
    settings = {
        "model": "halteres/tiny",
        "data": str(place / "train.jsonl"),
        "max_steps": 2,
        "disable_tqdm": True,
    }
    (place / "train.yaml").write_text(yaml.safe_dump(settings))
    trained = command("train", "--config", place / "train.yaml", "--eval-data", place / "held_out.jsonl",
                      "--out", place / "model")  # fmt: skip
    assert trained.exit_code == 0, trained.output
    assert (
        "2 of 2 steps, finished" in trained.output
        and "Next: halteres reward eval" in trained.output
    )
    yield place


def test_the_accuracy_is_a_gate(place: Path) -> None:
    arguments = ("eval", place / "model", place / "held_out.jsonl", "--no-probes")
    found = command(*arguments, "--min-accuracy", 0)
    assert found.exit_code == 0
    assert all(kind in found.output for kind in ("correct", "polite", "complete", "Brier score"))
    refused = command(*arguments, "--min-accuracy", 1)
    assert refused.exit_code == 1 and "is below 100.0%" in refused.stderr


@pytest.mark.runs
def test_an_evaluation_is_json_a_picture_and_a_page(place: Path, tmp_path: Path) -> None:
    picture, page = tmp_path / "a.png", tmp_path / "a.html"
    found = told(
        "eval", place / "model", place / "held_out.jsonl", "--plot", picture, "--page", page
    )
    assert found["overall"]["accuracy"]["count"] == 12 and set(found["by_kind"]) == {
        "correct",
        "polite",
        "complete",
    }
    assert {probe["name"] for probe in found["probes"]} == {
        "alone",
        "beside_longer",
        "without_template",
    }
    assert all(
        probe["largest_difference"] < 1e-4 for probe in found["probes"] if probe["must_be_same"]
    )
    assert picture.stat().st_size > 0 and "Worst mistakes" in page.read_text()


@pytest.mark.runs
def test_a_calibration_is_stored_and_used(place: Path) -> None:
    made = told("calibrate", place / "model", place / "held_out.jsonl")
    stored = json.loads((place / "model" / "halteres_reward.json").read_text())["calibration"]
    assert stored == made and made["num_pairs"] == 12 and "12 pairs are few" in made["warnings"][0]
    found = told("eval", place / "model", place / "held_out.jsonl", "--no-probes")
    assert found["calibration"]["temperature"] == made["temperature"]


@pytest.mark.runs
def test_answers_are_ranked_and_a_merged_folder_ranks_the_same(place: Path, tmp_path: Path) -> None:
    answers = ("What is 3 + 4?", "So the answer is \\boxed{7}.", "So what?")
    ranked = told("rank", place / "model", *answers)
    assert sorted(ranked["order"]) == [0, 1]
    assert command("export", place / "model", tmp_path / "whole").exit_code == 0
    assert told("rank", tmp_path / "whole", *answers)["scores"] == pytest.approx(
        ranked["scores"], abs=1e-4
    )
    with pytest.raises(HalteresError, match="is not empty"):
        command("export", place / "model", tmp_path / "whole")


def test_several_models_are_one_ensemble(place: Path) -> None:
    both = f"{place / 'model'},{place / 'model'}"
    found = told(
        "eval", both, place / "held_out.jsonl", "--no-probes", "--combination", "mean_minus_std"
    )
    assert found["scorer"].startswith("mean_minus_std(")


def test_a_dry_run_forecasts_and_loads_nothing(tmp_path: Path) -> None:
    found = told("train", "--model", "halteres/tiny", "--data", HELD_OUT, "--hold-out", 0.1, "--out", tmp_path / "no",
                 "--set", "lora.r=4", "--dry-run")  # fmt: skip
    assert found["num_parameters"] == 873_856
    assert (found["num_rows"] + found["num_held_out"], found["batch_size"]) == (300, 8)
    assert found["total_steps"] == -(-found["num_rows"] // 8)
    assert 40 < found["lengths"]["0.5"] < 150 and 0.5 < found["memory_gb"] < 1
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("arguments", "kind", "sentence"),
    [
        (("train", "--data", HELD_OUT), InvalidConfig, "'model' is missing"),
        (
            ("train", "--model", "halteres/tiny", "--data", HELD_OUT, "--set", "max_stepps=2"),
            InvalidConfig,
            "max_steps",
        ),
        (
            ("train", "--model", "nobody/nothing", "--data", HELD_OUT),
            NotFound,
            "no model 'nobody/nothing'",
        ),
        (
            ("eval", "nowhere", HELD_OUT),
            NotFound,
            "no reward model in .*nowhere. There is no such folder",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_loaded(
    arguments: tuple[str, ...], kind: type[HalteresError], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        command(*arguments)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("truncation=error", "max_length=40"), "longer than max_length = 40"),
        (("truncation=drop", "max_length=5"), "No row of .* is left"),
    ],
)
def test_a_dry_run_refuses_what_the_training_would(
    settings: tuple[str, ...], sentence: str
) -> None:
    flags = [part for setting in settings for part in ("--set", setting)]
    with pytest.raises(InvalidData, match=sentence):
        command("train", "--model", "halteres/tiny", "--data", HELD_OUT, "--dry-run", *flags)


def test_a_dry_run_of_an_incomplete_model_forecasts_without_its_shape(tmp_path: Path) -> None:
    source = builtin_path("halteres/tiny")
    assert source is not None
    for file in source.glob("*"):
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    found = told("train", "--model", tmp_path, "--data", HELD_OUT, "--dry-run")
    assert (found["num_parameters"], found["num_rows"]) == (None, 300)


def test_a_run_is_gone_on_with_under_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be combined is refused; a name is taken; a dry run begins nothing."""
    with pytest.raises(InvalidConfig, match=r"--out, --set cannot be given with --resume-run"):
        command("train", "--resume-run", "r1", "--set", "seed=1", "--out", "there")
    with pytest.raises(InvalidConfig, match="--name is of a run"):
        command("train", "--model", "halteres/tiny", "--data", HELD_OUT, "--name", "mine")
    plan = read_plan(None, {"model": "halteres/tiny", "data": HELD_OUT})
    names: list[Any] = []

    def planned(run: str, name: str | None = None) -> RewardPlan:
        names.append((run, name))
        folder = builtin_path("halteres/tiny")
        assert folder is not None
        return RewardPlan(
            training=TrainingRun(plan=plan),
            forecast=forecast(plan, folder),
            base_model=plan.model,
            name=name,
        )

    monkeypatch.setattr("halteres.runs.directory.find_run", str)
    monkeypatch.setattr("halteres.runs.planning.reward_plan.plan_resumed_training", planned)
    monkeypatch.delattr("halteres.runs.start.start_reward_training")
    assert told("train", "--resume-run", "r1", "--name", "mine", "--dry-run")["num_rows"] == 300
    assert names == [("r1", "mine")]


def test_wrong_rows_are_told_with_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"chosen": "a", "rejected": "b"}\n{"chosen": "a"}\n')
    with pytest.raises(InvalidData, match="row 2: 'rejected' is missing"):
        command("train", "--model", "halteres/tiny", "--data", tmp_path / "a.jsonl", "--dry-run")


@pytest.mark.runs
def test_rubrics_functions_and_environments_are_checked(tmp_path: Path) -> None:
    (tmp_path / "rubric.yaml").write_text(
        'criteria:\n  - {name: good, text: "Is it right and kind?"}\n'
    )
    found = command("check", tmp_path / "rubric.yaml")
    assert found.exit_code == 1 and "compound_criterion" in found.output
    (tmp_path / "paid.py").write_text(
        "def paid(completions, **_):\n    return [1.0 for _ in completions]\n"
    )
    codes = {
        finding["code"] for finding in told("check", f"{tmp_path / 'paid.py'}:paid")["findings"]
    }
    assert codes == {"pays_for_nothing", "pays_for_prompt"}
    clean = command("check", "arithmetic")
    assert (clean.exit_code, clean.output) == (0, "nothing found\n")


@pytest.mark.runs
def test_an_unsafe_function_is_checked_in_a_cage(tmp_path: Path) -> None:
    if cage_missing():
        pytest.skip(str(cage_missing()))
    marker = tmp_path / "marker"
    (tmp_path / "paid.py").write_text(
        "unsafe_scorer = True\ndef paid(completions, **_):\n"
        f"    try:\n        open({str(marker)!r}, 'w')\n    except OSError:\n        pass\n"
        "    return [1.0 for _ in completions]\n"
    )
    codes = {
        finding["code"] for finding in told("check", f"{tmp_path / 'paid.py'}:paid")["findings"]
    }
    assert codes == {"pays_for_nothing", "pays_for_prompt"}
    assert not marker.exists()


@pytest.mark.parametrize("weights", ["helpful=high", "helpful=.inf", "helpful=.nan"])
def test_weights_of_objectives_that_are_no_numbers_are_refused(
    weights: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match="objective_weights"):
        command("export", tmp_path, tmp_path / "out", "--objective-weights", weights)
    assert not (tmp_path / "out").exists()
