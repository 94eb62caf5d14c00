"""`halteres train --recipe gem`: the fields of GEM's example script, each with what becomes of it
here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halteres.cli import train as verb
from halteres.cli.main import app
from halteres.config.gem_ids import GEM
from halteres.config.resolution import resolve_settings
from halteres.config.settings import Settings
from halteres.errors import InvalidConfig
from halteres.runs.planning.plan import RunPlan

pytestmark = pytest.mark.runs

FIELDS = {
    *(
        "model_name",
        "batch_size",
        "learning_rate",
        "lora_rank",
        "max_tokens",
        "seed",
        "max_steps",
        "save_every",
    ),
    *(
        "env_id",
        "num_env",
        "env_wrappers",
        "template",
        "gamma",
        "use_rebn",
        "wandb_project",
        "wandb_name",
        "log_dir",
    ),
}


class Started(Exception):
    """Instead of a run."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Settings]:
    """The settings of runs that would have been started."""
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    settings: list[Settings] = []

    def start(asked: RunPlan, **options: Any) -> None:
        settings.append(asked.settings)
        raise Started

    monkeypatch.setattr("halteres.runs.start.start_run", start)
    assert verb
    return settings


def train(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["train", *arguments])


def test_the_recipe_has_the_seventeen_fields_of_the_script() -> None:
    assert {*GEM.fields} == FIELDS and len(FIELDS) == 17


def test_every_field_of_the_script_sets_what_it_means_here(asked: list[Settings]) -> None:
    given = {
        "batch_size": "12",
        "learning_rate": "0.002",
        "lora_rank": "4",
        "max_tokens": "77",
        "seed": "9",
        "max_steps": "7",
        "save_every": "3",
        "env_id": "game:Mastermind-v0-easy",
        "num_env": "5",
        "env_wrappers": "concat_chat",
        "template": "no",
        "gamma": "0.5",
        "use_rebn": "False",
        "wandb_name": "mine",
        "log_dir": "/nowhere",
    }
    told = train("--recipe", "gem", *(f"{name}={value}" for name, value in given.items()))
    assert isinstance(told.exception, Started), told.output
    (settings,) = asked
    run, env, trainer = settings.run, settings.env, settings.trainer
    assert (run.environment, run.seed, run.name) == ("game:Mastermind-v0-easy", 9, "mine")
    assert (env["batch_size"], env["group_size"], env["max_new_tokens"]) == (12, 1, 77)
    assert (env["max_num_workers"], env["env_wrappers"], env["template"]) == (
        5,
        "concat_chat",
        "no",
    )
    assert (trainer.learning_rate, trainer.lora_rank, trainer.total_steps) == (0.002, 4, 7)
    assert (trainer.checkpoint_every, trainer.gamma, trainer.advantage) == (3, 0.5, "reinforce")
    assert (
        "log_dir: has no effect" in told.stderr
        and "batch_size: counts whole episodes" in told.stderr
    )


def test_without_fields_the_recipe_is_the_scripts_defaults(asked: list[Settings]) -> None:
    assert isinstance(train("game:GuessTheNumber-v0-hard", "--recipe", "gem").exception, Started)
    (settings,) = asked
    assert settings.run.environment == "game:GuessTheNumber-v0-hard"
    assert (settings.trainer.learning_rate, settings.trainer.advantage, settings.trainer.gamma) == (
        4e-5,
        "rebn",
        0.9,
    )


def test_settings_behind_an_environment_are_read_as_edits(asked: list[Settings]) -> None:
    assert isinstance(
        train("arithmetic", "total_steps=3", "env.max_num_workers=2").exception, Started
    )
    assert (asked[0].trainer.total_steps, asked[0].env["max_num_workers"]) == (3, 2)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--recipe", "gam"], "Did you mean 'gem'?"),
        (["--recipe", "gem", "max_step=3"], "Did you mean 'max_steps'?"),
        (["--recipe", "gem", "game:Sudoku-v0-easy", "use_rebn"], "'use_rebn' is no setting"),
    ],
)
def test_what_a_recipe_does_not_know_is_refused_with_the_nearest_name(
    asked: list[Settings], arguments: list[str], told: str
) -> None:
    found = train(*arguments)
    assert found.exit_code != 0 and told in f"{found.output}{found.stderr}{found.exception}"
    assert not asked


def test_the_defaults_of_games_hold_without_a_recipe() -> None:
    settings = resolve_settings("game:GuessTheNumber-v0-easy", None, []).settings
    assert (settings.trainer.learning_rate, settings.trainer.gamma, settings.trainer.advantage) == (
        1.5e-3,
        0.9,
        "rebn",
    )
    assert (
        settings.env["group_size"],
        settings.env["batch_size"],
        settings.env["max_num_workers"],
    ) == (1, 48, 32)


@pytest.mark.parametrize(
    ("given", "estimator"), [("yes", "rebn"), ("False", "reinforce"), ("0", "reinforce")]
)
def test_use_rebn_is_true_or_false(given: str, estimator: str) -> None:
    assert f"trainer.advantage={estimator}" in GEM.edits([f"use_rebn={given}"])


def test_a_use_rebn_that_is_neither_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="neither true nor false"):
        GEM.edits(["use_rebn=maybe"])
