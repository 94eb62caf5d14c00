"""Edits: one noun for texts and typed values; names, the seeds' included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halteres.config.edits import Edit, Word, nearest_setting, read_edit, short_name
from halteres.config.operator_policy import UNKNOWN_YET
from halteres.config.problem import LockedField, Problem, UnknownField
from halteres.config.resolution import Resolved, resolve_settings
from halteres.errors import InvalidConfig

ENVIRONMENT = str(Path(__file__).parents[1] / "runs" / "standin_env.py")

WITH_WANDB = """
from halteres.environments.base import BaseEnv
from halteres.environments.config import BaseEnvConfig

class Theirs(BaseEnv):
    @classmethod
    def config_init(cls):
        return BaseEnvConfig(use_wandb=True), []

if __name__ == "__main__":
    Theirs.cli()
"""


def resolved(**changes: Any) -> Resolved:
    return resolve_settings(
        ENVIRONMENT, None, (), changes={name.replace("__", "."): v for name, v in changes.items()}
    )


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("lora_rank", "trainer.lora_rank"),
        ("trainer.lora_rank", "trainer.lora_rank"),
        ("steps_per_eval", "trainer.eval_every"),
        ("save_checkpoint_interval", "trainer.checkpoint_every"),
        ("tokenizer_name", "env.tokenizer_name"),
        ("model_name", "inference.model"),
        ("model", "inference.model"),
        ("wandb_name", "run.name"),
        ("wandb_project", "run.wandb_project"),
        ("wandb_entity", "run.wandb_entity"),
        ("tags", "run.tags"),
        ("difficulty", "env.difficulty"),
    ],
)
def test_a_name_means_one_setting_the_seeds_names_too(name: str, key: str) -> None:
    assert Edit(name=name, value=1).key == key


def test_a_text_and_a_typed_value_go_the_same_way() -> None:
    assert read_edit("trainer.learning_rate=1e-3") == Edit(
        name="trainer.learning_rate", value=Word("1e-3")
    )
    by_text = resolve_settings(ENVIRONMENT, None, ["learning_rate=1e-3", "difficulty=2"])
    assert resolved(learning_rate=1e-3, difficulty=2).settings == by_text.settings
    assert resolved(learning_rate=1e-3, difficulty=2).sources == by_text.sources


def test_numbers_given_as_text_are_taken_for_numbers_and_told() -> None:
    asked = resolved(lora_rank="8", learning_rate="1e-3", name="8", trainer__beta1=0.5)
    assert (asked.settings.trainer.lora_rank, asked.settings.trainer.learning_rate) == (8, 1e-3)
    assert asked.coerced == {"lora_rank": 8, "learning_rate": 1e-3}


def test_null_is_a_value_where_the_type_allows_it() -> None:
    assert resolved(threads=None, temperature=None).settings.inference.threads is None
    with pytest.raises(InvalidConfig, match=r"lora_rank: must be a valid integer"):
        resolved(lora_rank=None)


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("lerning_rate", "trainer.learning_rate"),
        ("tinker.lora_rank", "trainer.lora_rank"),
        ("openai.model_name", "inference.model"),
        ("trainer.steps_per_eval", "trainer.eval_every"),
        ("envv.difficulty", "env"),
        ("xyzzy", None),
    ],
)
def test_a_name_that_nobody_knows_is_a_kind_of_its_own(name: str, guess: str | None) -> None:
    with pytest.raises(UnknownField) as caught:
        resolve_settings(ENVIRONMENT, None, (), changes={name: 1})
    error = caught.value
    assert error.what.startswith(f"Unknown field '{name}'")
    assert (error.code, error.details["field"], error.details["did_you_mean"]) == (
        "unknown_field",
        name,
        guess,
    )
    assert {"difficulty", "learning_rate", "steps_per_eval"} <= set(
        error.details["available_fields"]
    )
    assert not {"url", "rollout_server_url"} & set(error.details["available_fields"])


def test_wiring_is_locked_with_the_reason_and_the_value() -> None:
    with pytest.raises(LockedField) as caught:
        resolved(rollout_server_url="http://elsewhere")
    error = caught.value
    assert error.what.startswith("Field 'rollout_server_url' is locked and cannot be changed")
    assert (error.code, error.details["field"]) == ("locked_field", "rollout_server_url")
    assert error.details["locked_value"] == UNKNOWN_YET


def test_several_problems_are_one_refusal_that_lists_them() -> None:
    with pytest.raises(InvalidConfig) as caught:
        resolved(lora_rank=0, banana=1, run_dir="here")
    assert caught.value.code == "invalid_config"
    assert [one["field"] for one in caught.value.details["problems"]] == [
        "lora_rank",
        "run_dir",
        "banana",
    ]


@pytest.mark.parametrize("name", ["slurm", "testing"])
def test_the_seeds_switches_can_only_be_false(name: str) -> None:
    assert resolved(**{name: False}).settings == resolved().settings
    with pytest.raises(InvalidConfig, match="it can only be false here") as caught:
        resolved(**{name: True})
    assert {"slurm": "on this machine", "testing": "rl_test_inference"}[
        name
    ] in caught.value.sentence


def test_a_switch_in_a_file_is_explained_too(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("slurm: true\ntesting: false\n")
    with pytest.raises(InvalidConfig, match="start it inside the job that SLURM gave you"):
        resolve_settings(ENVIRONMENT, file, ())


def test_a_name_that_is_ours_and_the_environments_must_be_written_whole(tmp_path: Path) -> None:
    file = tmp_path / "twice.py"
    text = Path(ENVIRONMENT).read_text().replace('"difficulty": 1', '"difficulty": 1, "threads": 3')
    file.write_text(text)
    with pytest.raises(InvalidConfig, match=r"write inference\.threads or env\.threads"):
        resolve_settings(str(file), None, (), changes={"threads": 2})
    asked = resolve_settings(
        str(file), None, (), changes={"env.threads": 2, "inference.threads": 1}
    ).settings
    assert (asked.env["threads"], asked.inference.threads) == (2, 1)
    assert short_name("env.threads", asked.env) == "env.threads"
    assert short_name("inference.threads", asked.env) == "inference.threads"
    assert short_name("env.difficulty", asked.env) == "difficulty"


def test_a_slip_offers_only_what_is_alike() -> None:
    assert nearest_setting("max_stalenes") == "trainer.max_staleness"
    assert nearest_setting("banana") is None


def test_what_is_no_edit_is_a_problem() -> None:
    assert isinstance(read_edit("nonsense"), Problem)
    assert isinstance(read_edit("a.=1"), Problem)


def test_use_wandb_and_sinks_say_where_metrics_are_forwarded_to() -> None:
    assert resolved().settings.sinks == ()
    assert resolved(use_wandb=True).settings.sinks == ("wandb",)
    assert resolved(use_wandb=False, sinks=["trackio"]).settings.sinks == ("trackio",)
    assert resolved(use_wandb=True, sinks=["tensorboard", "wandb"]).settings.sinks == (
        "wandb",
        "tensorboard",
    )
    with pytest.raises(InvalidConfig, match="must be 'wandb', 'trackio' or 'tensorboard'"):
        resolved(sinks=["mlflow"])


def test_an_environments_own_use_wandb_switches_nothing_on(tmp_path: Path) -> None:
    """atroposlib's default is true, and so is what many a config_init says; only who starts a run
    asks for W&B.
    """
    file = tmp_path / "theirs.py"
    file.write_text(WITH_WANDB)
    assert resolve_settings(str(file), None, ()).settings.sinks == ()
    assert resolve_settings(str(file), None, ["use_wandb=true"]).settings.sinks == ("wandb",)
