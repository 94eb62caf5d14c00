"""Settings of an environment: the order of their sources, and what is said of a wrong one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from halteres.environments.arithmetic import ArithmeticConfig, ArithmeticEnv
from halteres.environments.base import BaseEnv
from halteres.environments.commands import BadUsage, describe, parse
from halteres.environments.config import (
    APIServerConfig,
    BaseEnvConfig,
    EvalHandling,
    Overrides,
    effective,
    read_file,
)
from halteres.errors import EnvironmentFailed, InvalidConfig, NotFound
from halteres.tokenizer import Message

ATROPOS_FIELDS = [
    "group_size",
    "max_num_workers",
    "max_eval_workers",
    "max_num_workers_per_node",
    "steps_per_eval",
    "max_token_length",
    "eval_handling",
    "eval_limit_ratio",
    "inference_weight",
    "batch_size",
    "max_batches_offpolicy",
    "tokenizer_name",
    "use_wandb",
    "rollout_server_url",
    "total_steps",
    "wandb_name",
    "num_rollouts_to_keep",
    "num_rollouts_per_group_for_logging",
    "ensure_scores_are_not_same",
    "data_path_to_save_groups",
    "data_dir_to_save_evals",
    "min_items_sent_before_logging",
    "include_messages",
    "min_batch_allocation",
    "worker_timeout",
    "thinking_mode",
    "reasoning_effort",
    "max_reasoning_tokens",
    "custom_thinking_prompt",
]

DEFAULTS = {
    "group_size": 4,
    "steps_per_eval": 100,
    "max_token_length": 2048,
    "batch_size": -1,
    "worker_timeout": 600,
}


def described(*arguments: str) -> dict[str, Any]:
    return describe(ArithmeticEnv, parse(["describe", *arguments]))


@pytest.mark.parametrize(
    "module",
    [
        "arithmetic",
        "game",
        "gsm8k_tinker",
        "judge_pairs",
        "reasoning_gym_tasks",
        "text_gym",
        "word_problems",
    ],
)
def test_every_built_in_environment_describes_itself(module: str) -> None:
    found = importlib.import_module(f"halteres.environments.{module}")
    kinds = [
        kind
        for kind in vars(found).values()
        if isinstance(kind, type) and kind.__module__ == found.__name__
    ]
    (kind,) = (kind for kind in kinds if issubclass(kind, BaseEnv))
    shown = describe(kind, parse(["describe"]))
    assert shown["class_name"] == kind.__name__
    assert shown["config"]["group_size"] == kind.config_init()[0].group_size


def yaml(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return file


def test_every_atropos_field_is_there_with_its_default() -> None:
    assert set(ATROPOS_FIELDS) <= set(BaseEnvConfig.model_fields)
    assert DEFAULTS.items() <= BaseEnvConfig().model_dump().items()
    assert BaseEnvConfig().eval_handling is EvalHandling.STOP_TRAIN
    assert BaseEnvConfig().ensure_scores_are_not_same


def test_arguments_beat_the_file_which_beats_the_environments_own(tmp_path: Path) -> None:
    file = yaml(
        tmp_path,
        "env: {group_size: 8, seed: 3}\nopenai: [{model_name: m}]\ntinker: {lora_rank: 32}\n",
    )
    shown = described(
        "--config", str(file), "--env.group_size", "32", "--env.system_prompt=Be brief."
    )
    assert shown["problems"] == []
    assert (
        shown["config"]["group_size"],
        shown["config"]["seed"],
        shown["config"]["max_new_tokens"],
    ) == (32, 3, 64)
    assert shown["config"]["system_prompt"] == "Be brief."


def test_describe_tells_name_class_description_schema_and_effective_settings() -> None:
    shown = described()
    assert (shown["name"], shown["class_name"]) == ("arithmetic", "ArithmeticEnv")
    assert shown["description"].startswith("Easy arithmetic")
    fields = shown["schema"]["properties"]
    assert set(fields) == set(shown["config"]) == set(ArithmeticConfig.model_fields)
    assert fields["group_size"]["minimum"] == 1
    assert "supervisor" in fields["rollout_server_url"]["wiring"]
    assert "wiring" not in fields["group_size"]
    assert (
        shown["config"]["group_size"],
        shown["config"]["batch_size"],
        shown["config"]["eval_tasks"],
    ) == (
        16,
        256,
        128,
    )


def test_an_unknown_setting_names_the_nearest_and_the_others_stand() -> None:
    shown = described("--env.group_sise", "4", "--env.seed", "9")
    (problem,) = shown["problems"]
    assert (problem["field"], problem["got"], problem["did_you_mean"]) == (
        "group_sise",
        "4",
        "group_size",
    )
    assert shown["config"]["seed"] == 9


def test_every_problem_is_told_with_field_value_and_rule() -> None:
    arguments = (
        "--env.group_size=many",
        "--env.temperature=-1",
        "--env.eval_handling=SOMETIMES",
        "--openai.url=x",
    )
    problems = {problem["field"]: problem for problem in described(*arguments)["problems"]}
    assert set(problems) == {"group_size", "temperature", "eval_handling", "openai.url"}
    assert problems["group_size"]["got"] == "many"
    assert "integer" in problems["group_size"]["rule"]
    assert problems["openai.url"]["did_you_mean"] == "base_url"


def test_a_batch_that_is_not_whole_groups_is_refused_with_sizes_that_are() -> None:
    (problem,) = described("--env.batch_size", "100")["problems"]
    assert (problem["field"], problem["got"], problem["suggest"]) == (
        "batch_size",
        "100",
        (96, 112),
    )
    (problem,) = described("--env.group_size", "12")["problems"]
    assert (problem["field"], problem["got"], problem["suggest"]) == ("batch_size", 256, (252, 264))


def test_serving_with_problems_is_refused_in_one_sentence_that_names_them_all() -> None:
    settings = effective(
        BaseEnvConfig(), APIServerConfig(), Overrides(env={"seeed": 1, "group_size": 0})
    )
    with pytest.raises(InvalidConfig) as caught:
        settings.checked()
    assert "did you mean 'seed'?" in caught.value.sentence
    assert "group_size = 0" in caught.value.sentence
    assert {problem["field"] for problem in caught.value.details["problems"]} == {
        "seeed",
        "group_size",
    }


def test_null_is_nothing_and_text_is_converted() -> None:
    shown = described(
        "--env.system_prompt", "null", "--env.use_wandb", "false", "--env.wandb_name", "123"
    )
    assert shown["problems"] == []
    assert (shown["config"]["system_prompt"], shown["config"]["wandb_name"]) == (None, "123")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("env: [1]", "'env:'"),
        ("- 1", "no map"),
        ("env: {", "as YAML"),
        ("openai: [{}, {}]", "names 2 servers"),
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(InvalidConfig, match=why):
        read_file(yaml(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_file(tmp_path / "none.yaml")


def test_an_empty_file_and_a_single_server_are_fine(tmp_path: Path) -> None:
    assert read_file(yaml(tmp_path, "")) == Overrides()
    assert read_file(yaml(tmp_path, "openai: {base_url: u}")).openai == {"base_url": "u"}


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["train"],
        ["serve", "--env.seed"],
        ["serve", "--nothing", "1"],
        ["serve", "loose"],
        ["serve", "--env.", "1"],
    ],
)
def test_what_is_no_command_is_a_usage_error(arguments: list[str]) -> None:
    with pytest.raises(BadUsage):
        parse(arguments)


def test_atropos_switches_are_accepted() -> None:
    assert parse(["serve", "--slurm", "false", "--testing", "--env.seed", "1"]).overrides.env == {
        "seed": "1"
    }


def test_settings_without_effect_are_known() -> None:
    assert BaseEnvConfig(use_wandb=True, thinking_mode=True).set_without_effect == (
        "thinking_mode",
    )


class GameConfig(BaseEnvConfig):
    variant: str = ""
    turns: int = 1


class Game(BaseEnv):
    name = "game"
    variants = ("short", "long")
    trainer_defaults: ClassVar[Mapping[str, float | int | str]] = {"total_steps": 12}

    @classmethod
    def config_init(cls, variant: str = "short") -> tuple[GameConfig, list[APIServerConfig]]:
        return GameConfig(turns=2 if variant == "short" else 20), []


class Plain(Game):
    @classmethod
    def config_init(cls) -> tuple[GameConfig, list[APIServerConfig]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return GameConfig(turns=5), []


def test_a_familys_settings_are_those_of_the_variant(tmp_path: Path) -> None:
    """`config_init` is given the variant where it takes an argument: the one that file or arguments
    name, else the first.
    """
    by_file = ("--config", str(yaml(tmp_path, "env: {variant: long}")))
    for arguments, variant, turns in (
        ((), "short", 2),
        (("--env.variant", "long"), "long", 20),
        (by_file, "long", 20),
    ):
        shown = describe(Game, parse(["describe", *arguments]))
        assert (shown["config"]["variant"], shown["config"]["turns"], shown["problems"]) == (
            variant,
            turns,
            [],
        )
    assert shown["trainer"] == {"total_steps": 12}
    plain = describe(Plain, parse(["describe", "--env.variant", "long"]))["config"]
    assert (plain["variant"], plain["turns"]) == ("long", 5)
    with pytest.raises(NotFound, match="Did you mean 'long'"):
        describe(Game, parse(["describe", "--env.variant", "log"]))


class OddFamily(ArithmeticEnv):
    variants = ("one", "two")


class OddDefaults(ArithmeticEnv):
    trainer_defaults: ClassVar[Mapping[str, float | int | str]] = {"lerning_rate": 1.0}


@pytest.mark.parametrize(
    ("kind", "why"), [(OddFamily, "no field `variant: str`"), (OddDefaults, "lerning_rate")]
)
def test_what_a_class_declares_and_no_run_can_have_is_the_files_mistake(
    kind: type[BaseEnv], why: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=why):
        describe(kind, parse(["describe"]))


class MistakenThreshold(ArithmeticEnv):
    success_threshold = 0.5


class OwnPrompt(ArithmeticEnv):
    """It has the name of a setting for a constant of its own, and reads it."""

    system_prompt = "Be brief."

    def chat_of(self, prompt: str | Sequence[Message]) -> list[dict[str, Any]]:
        return super().chat_of(f"{self.system_prompt} {prompt}")


def test_a_class_attribute_that_is_taken_for_a_setting_is_refused() -> None:
    with pytest.raises(EnvironmentFailed) as refused:
        describe(MistakenThreshold, parse(["describe"]))
    line = inspect.getsourcelines(MistakenThreshold)[1] + 1
    assert f"{Path(__file__).name}:{line} sets success_threshold" in refused.value.sentence
    assert "cls.env_config_cls(success_threshold=0.5)" in refused.value.sentence


def test_a_class_attribute_that_the_author_reads_is_the_authors_own() -> None:
    assert describe(OwnPrompt, parse(["describe"]))["config"]["system_prompt"] is None
