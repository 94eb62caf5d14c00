"""The seeds' config format, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from halteres.config.files import Addresses, from_seed_format, to_seed_format
from halteres.config.problem import Problem
from halteres.config.resolution import resolve_settings
from halteres.config.settings import Settings
from halteres.errors import InvalidConfig

ENVIRONMENT = str(Path(__file__).parents[1] / "runs" / "standin_env.py")
ADDRESSES = Addresses(
    run_id="3fa9c1d2",
    run_dir="/runs/3fa9c1d2",
    service_url="http://127.0.0.1:8001/",
    api_url="http://127.0.0.1:8000",
    tokenizer="/models/tiny",
)
SEED: dict[str, Any] = {
    "env": {
        "group_size": 2,
        "batch_size": 8,
        "tokenizer_name": "halteres/tiny",
        "use_wandb": True,
        "rollout_server_url": "http://localhost:8000",
        "wandb_name": "mine",
        "total_steps": 50,
        "steps_per_eval": 100,
    },
    "openai": [
        {
            "model_name": "halteres/tiny",
            "base_url": "http://localhost:8001/v1",
            "api_key": "x",
            "weight": 1.0,
        }
    ],
    "tinker": {
        "lora_rank": 32,
        "learning_rate": 4e-5,
        "max_token_trainer_length": 2048,
        "checkpoint_dir": "./temp/",
        "save_checkpoint_interval": 25,
        "wandb_project": "atropos-tinker",
        "tool_call_parser": "hermes",
    },
    "slurm": False,
    "testing": False,
}


def test_a_file_of_the_seeds_trains_here(tmp_path: Path) -> None:
    file = tmp_path / "seed.yaml"
    file.write_text(yaml.safe_dump(SEED))
    settings = resolve_settings(ENVIRONMENT, file, []).settings
    trainer = settings.trainer
    assert (trainer.lora_rank, trainer.learning_rate, trainer.checkpoint_every) == (32, 4e-5, 25)
    assert (trainer.total_steps, trainer.eval_every, settings.inference.model) == (
        50,
        100,
        "halteres/tiny",
    )
    assert settings.env["batch_size"] == 8
    assert "rollout_server_url" not in settings.env, "wiring is written afresh"


def test_one_setting_says_what_counts_as_success_and_its_default_is_the_environments_own(
    tmp_path: Path,
) -> None:
    file = tmp_path / "strict_env.py"
    text = (
        Path(ENVIRONMENT)
        .read_text()
        .replace('"difficulty": 1,', '"difficulty": 1, "success_threshold": 0.5,')
    )
    file.write_text(text)
    assert resolve_settings(ENVIRONMENT, None, []).settings.run.success_threshold == 0.0
    assert resolve_settings(str(file), None, []).settings.run.success_threshold == 0.5
    edited = resolve_settings(str(file), None, ["success_threshold=0.75"]).settings
    assert edited.run.success_threshold == 0.75
    assert to_seed_format(edited, ADDRESSES)["env"]["success_threshold"] == 0.75
    with pytest.raises(InvalidConfig, match=r"set run\.success_threshold"):
        resolve_settings(str(file), None, ["env.success_threshold=0.75"])


def test_what_cannot_be_placed_is_told() -> None:
    problems: list[Problem] = []
    from_seed_format(
        {"tinker": {"lora_rnk": 8}, "env": [1], "halteres": {"x": {}}, "more": 1}, problems
    )
    assert {(problem.field, problem.did_you_mean) for problem in problems} == {
        ("tinker.lora_rnk", "tinker.lora_rank"),
        ("env", None),
        ("halteres.x", None),
        ("more", None),
    }


def test_a_run_writes_the_addresses_of_its_own_parts() -> None:
    written = to_seed_format(Settings(env={"group_size": 4}), ADDRESSES)
    assert written["env"]["rollout_server_url"] == "http://127.0.0.1:8000"
    assert written["openai"][0]["base_url"] == "http://127.0.0.1:8001/runs/3fa9c1d2/v1"
    assert (written["env"]["tokenizer_name"], written["env"]["group_size"]) == ("/models/tiny", 4)
    assert written["env"]["wandb_name"] == "arithmetic-3fa9c1d2"


def test_there_and_back_nothing_is_lost() -> None:
    edits = [
        "beta1=0.5",
        "max_staleness=2",
        "loss=ppo",
        "total_steps=7",
        "eval_every=3",
        "seed=5",
        "difficulty=2",
        "max_minutes=2",
    ]
    settings = resolve_settings(ENVIRONMENT, None, edits).settings
    problems: list[Problem] = []
    back = from_seed_format(to_seed_format(settings, ADDRESSES), problems)
    assert not problems
    assert Settings.model_validate(back) == settings


def test_a_written_file_is_a_file_to_start_from(tmp_path: Path) -> None:
    settings = resolve_settings(ENVIRONMENT, None, ["beta1=0.5", "total_steps=7"]).settings
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(to_seed_format(settings, ADDRESSES)))
    assert resolve_settings(None, file, []).settings == settings


def test_a_file_of_the_seeds_switches_wandb_on_and_a_file_of_a_run_keeps_its_sinks(
    tmp_path: Path,
) -> None:
    file = tmp_path / "seed.yaml"
    file.write_text(yaml.safe_dump(SEED))
    settings = resolve_settings(ENVIRONMENT, file, ["sinks=[trackio]"]).settings
    assert settings.sinks == ("wandb", "trackio")
    written = to_seed_format(settings, ADDRESSES)
    assert written["env"]["use_wandb"] is True
    for told_environment in (True, False):  # what the environment is told is the run's affair
        file.write_text(
            yaml.safe_dump({**written, "env": {**written["env"], "use_wandb": told_environment}})
        )
        assert resolve_settings(ENVIRONMENT, file, []).settings.sinks == ("wandb", "trackio")


@pytest.mark.parametrize(("edits", "lag"), [([], None), (["max_staleness=3", "loss=ppo"], 3)])
def test_a_deterministic_run_tells_its_environment_by_which_weights_it_samples(
    edits: list[str], lag: int
) -> None:
    for deterministic, told in ((False, None), (True, lag or 0)):
        settings = resolve_settings(
            ENVIRONMENT, None, [*edits, f"trainer.deterministic={deterministic}"]
        ).settings
        assert to_seed_format(settings, ADDRESSES)["env"].get("weights_lag") == told


def test_a_deterministic_run_samples_by_no_older_weights_than_are_kept() -> None:
    with pytest.raises(InvalidConfig, match="at most 32 where deterministic"):
        resolve_settings(
            ENVIRONMENT, None, ["max_staleness=33", "loss=ppo", "trainer.deterministic=true"]
        )
