"""Settings from files and edits: one value, or one error that lists everything."""

from __future__ import annotations

import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from halteres.config import environ
from halteres.config.discovery import EnvironmentBroken
from halteres.config.program import find_program
from halteres.config.resolution import resolve_settings
from halteres.config.settings import OneLine, Settings, settings_schema
from halteres.errors import InvalidConfig, NotFound

ENVIRONMENT = str(Path(__file__).parents[1] / "runs" / "standin_env.py")


def refused(*edits: str, file: Path | None = None) -> InvalidConfig:
    with pytest.raises(InvalidConfig) as error:
        resolve_settings(ENVIRONMENT, file, edits)
    return error.value


def problems(error: InvalidConfig) -> dict[str, dict[str, Any]]:
    return {problem["field"]: problem for problem in error.details["problems"]}


def test_paths_of_a_run_mean_the_same_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    settings = resolve_settings(
        ENVIRONMENT, None, ["run.interpreter=./python", "run.working_directory=."]
    ).settings
    assert (settings.run.interpreter, settings.run.working_directory) == (
        str(tmp_path / "python"),
        str(tmp_path),
    )


def test_without_file_or_edits_the_defaults_hold() -> None:
    settings = resolve_settings(ENVIRONMENT, None, []).settings
    assert settings.trainer == Settings().trainer
    assert settings.env["group_size"] == 2, "the environment's own, not the base class's"


def test_edits_beat_the_file_and_the_file_beats_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump(
            {"trainer": {"total_steps": 7, "learning_rate": 0.01}, "env": {"difficulty": 3}}
        )
    )
    settings = resolve_settings(ENVIRONMENT, file, ["trainer.total_steps=9"]).settings
    assert (
        settings.trainer.total_steps,
        settings.trainer.learning_rate,
        settings.env["difficulty"],
    ) == (9, 0.01, 3)


@pytest.mark.parametrize(
    ("edit", "section", "field", "value"),
    [
        ("learning_rate=1e-3", "trainer", "learning_rate", 1e-3),
        ("trainer.learning_rate=1E-3", "trainer", "learning_rate", 1e-3),
        ("total_steps=5", "trainer", "total_steps", 5),
        ("seed=3", "run", "seed", 3),
        ("run.name=a=b", "run", "name", "a=b"),
        ("threads=null", "inference", "threads", None),
    ],
)
def test_a_bare_field_finds_its_section(edit: str, section: str, field: str, value: object) -> None:
    assert (
        getattr(getattr(resolve_settings(ENVIRONMENT, None, [edit]).settings, section), field)
        == value
    )


def test_a_bare_field_may_be_the_environments() -> None:
    assert resolve_settings(ENVIRONMENT, None, ["difficulty=4"]).settings.env["difficulty"] == 4


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {lora_rank: banana}\nenvv: {}\n")
    error = refused(
        "trainer.total_stepz=5", "group_size=many", "run.seed=-1", "nonsense", file=file
    )
    found = problems(error)
    assert found.keys() == {
        *("trainer.lora_rank", "envv", "trainer.total_stepz", "group_size", "run.seed", "nonsense"),
    }
    assert found["trainer.total_stepz"]["did_you_mean"] == "trainer.total_steps"
    assert found["envv"]["did_you_mean"] == "env"
    assert "valid integer" in found["trainer.lora_rank"]["rule"]
    assert error.sentence.startswith("6 settings cannot be used.")


def test_a_bare_slip_offers_the_nearest_of_all_sections() -> None:
    assert (
        problems(refused("lerning_rate=1"))["lerning_rate"]["did_you_mean"]
        == "trainer.learning_rate"
    )
    assert problems(refused("dificulty=1"))["dificulty"]["did_you_mean"] == "difficulty"


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (
            "env.rollout_server_url=http://x",
            "the supervisor writes the trajectory server's address",
        ),
        ("env.total_steps=3", "set trainer.total_steps"),
        ("inference.url=http://x", "the supervisor writes the service's address"),
        ("env.tokenizer_name=x", "it is the base model's; set inference.model"),
    ],
)
def test_wiring_is_refused_with_the_reason(edit: str, why: str) -> None:
    assert why in refused(edit).sentence


def test_a_batch_of_broken_groups_is_refused_with_the_sizes_on_either_side() -> None:
    found = problems(refused("env.batch_size=65", "env.group_size=12"))["env.batch_size"]
    assert found["rule"] == "must be a multiple of group_size 12"
    assert found["suggest"] == [60, 72]


def test_a_truth_value_is_no_number() -> None:
    assert problems(refused("run.seed=true"))["run.seed"]["rule"] == "must be a number"


@pytest.mark.parametrize(
    ("edits", "field"),
    [
        (["batch_size=1000000000", "group_size=1000000000"], "env.group_size"),
        (["batch_size=2097152", "group_size=8"], "env.batch_size"),
        (["batch_size=-1", "group_size=1000000000"], "env.group_size"),
    ],
)
def test_a_batch_that_no_trajectory_server_takes_is_refused(edits: list[str], field: str) -> None:
    with pytest.raises(InvalidConfig, match="at most 1048576") as caught:
        resolve_settings("arithmetic", None, edits)
    assert caught.value.details["field"].removeprefix("env.") == field.removeprefix("env.")


def test_an_unset_batch_size_becomes_whole_groups_near_128() -> None:
    assert (
        resolve_settings(ENVIRONMENT, None, ["batch_size=-1", "group_size=12"]).settings.env[
            "batch_size"
        ]
        == 120
    )


def test_the_base_of_a_resumed_run_keeps_what_is_not_edited() -> None:
    base = resolve_settings(ENVIRONMENT, None, ["learning_rate=0.5", "difficulty=9"]).settings
    settings = resolve_settings(None, None, ["total_steps=99"], base=base).settings
    assert settings.trainer == base.trainer.model_copy(update={"total_steps": 99})
    assert settings.env == base.env
    assert settings.run.environment == ENVIRONMENT


@pytest.mark.parametrize(
    "text", ["a: [", "- just\n- a list\n", "\xff\xfe".encode("latin-1").decode("latin-1") + ": :"]
)
def test_a_file_that_is_no_mapping_is_a_sentence(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert str(file) in refused(file=file).sentence


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    assert "cannot be read" in refused(file=tmp_path / "none.yaml").sentence


def test_an_unknown_environment_offers_the_nearest() -> None:
    with pytest.raises(NotFound, match="Did you mean 'arithmetic'"):
        resolve_settings("arithmetik", None, [])


def test_an_unknown_interpreter_is_a_sentence() -> None:
    with pytest.raises(NotFound, match="no Python interpreter '/no/python'"):
        find_program("arithmetic", "/no/python")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise SystemExit(0)\n", "printed nothing. Does the file end with"),
        ("import sys; sys.exit('error: No data.')\n", "No data."),
        ("1 / 0\n", "ZeroDivisionError"),
        ("print('{}')\n", "printed no usable JSON"),
    ],
)
def test_an_environment_that_cannot_describe_itself_is_broken(
    tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(InvalidConfig, match="is broken") as error:
        resolve_settings(str(file), None, [])
    assert says in error.value.sentence


def test_an_environment_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halteres.config.program.DEADLINE_S", 0.3)
    file = tmp_path / "hangs.py"
    file.write_text("import subprocess; subprocess.run(['sleep', '1000'])\n")
    with pytest.raises(EnvironmentBroken, match="did not describe itself within"):
        resolve_settings(str(file), None, [])


def test_an_environment_sees_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    file = tmp_path / "curious.py"
    file.write_text(
        "import os, sys; sys.exit(f\"error: saw {os.environ.get('TINKER_API_KEY')}\")\n"
    )
    with pytest.raises(InvalidConfig, match="saw None"):
        resolve_settings(str(file), None, [])


@pytest.mark.parametrize(
    ("edits", "field", "rule"),
    [
        (
            ("inference.samplers=vllm", "trainer.deterministic=true"),
            "trainer.deterministic",
            "needs samplers of ours alone",
        ),
        (
            ("inference.samplers=[vllm]", "trainer.train_unembed=true"),
            "trainer.train_unembed",
            "needs an engine in inference.samplers",
        ),
        (("inference.samplers=2,http://a:1",), "inference.samplers", "a number of engines"),
        (("inference.samplers=[own, 2]",), "inference.samplers", "a number of engines"),
    ],
)
def test_samplers_that_cannot_do_what_a_run_asks_for_are_one_problem(
    edits: tuple[str, ...], field: str, rule: str
) -> None:
    error = refused(*edits)
    (problem,) = error.details["problems"]
    assert problem["field"] == field
    assert rule in problem["rule"]
    assert "\n" not in error.sentence


def test_an_environment_does_not_see_the_key_of_a_sampler_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environ, "_held_back", set[str]())
    monkeypatch.setenv("GPU2", "hunter2222")
    file = tmp_path / "curious.py"
    file.write_text("import os, sys; sys.exit(f\"error: saw {os.environ.get('GPU2')}\")\n")
    with pytest.raises(InvalidConfig, match="saw None"):
        resolve_settings(str(file), None, ["inference.samplers=http://a:1 GPU2"])


def test_an_environment_without_describe_is_taken_as_its_file_says(tmp_path: Path) -> None:
    file = tmp_path / "atropos.py"
    file.write_text(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('v', "
        "choices=['serve'])\np.parse_args()\n"
    )
    settings = resolve_settings(str(file), None, ["env.group_size=8", "env.whatever=1"]).settings
    assert settings.env == {"group_size": 8, "whatever": 1, "batch_size": 128}


def test_the_schema_names_every_field_and_marks_wiring() -> None:
    schema = settings_schema()["$defs"]
    assert schema["TrainerSettings"]["properties"]["total_steps"]["minimum"] == 1
    assert "supervisor" in schema["InferenceSettings"]["properties"]["url"]["x-wiring"]


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        ("run.seed=yes", "must be a number"),
        ("run.max_minutes=true", "must be a number"),
        ("run.max_minutes=.inf", "must be a finite number"),
        ("trainer.learning_rate=.nan", "must be a finite number"),
        ("trainer.learning_rate=1e999", "must be a finite number"),
        ("env.temperature=true", "must be a number"),
        ("env.temperature=.inf", "must be a finite number"),
        ("env.difficulty=[1, .nan]", "must be a finite number"),
    ],
)
def test_what_is_no_number_or_no_text_is_refused_with_the_rule(edit: str, rule: str) -> None:
    error = refused(edit)
    (problem,) = error.details["problems"]
    assert (problem["field"], problem["rule"]) == (edit.partition("=")[0], rule)
    json.dumps(problem, allow_nan=False)


def test_settings_come_with_where_they_were_given(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"trainer": {"total_steps": 7, "lora_rank": 8}}))
    asked = resolve_settings(ENVIRONMENT, file, ["trainer.total_steps=9", "difficulty=2"])
    assert asked.sources == {
        "trainer.total_steps": "edit",
        "trainer.lora_rank": "file",
        "env.difficulty": "edit",
        "run.environment": "edit",
    }


def test_a_group_of_one_teaches_nothing_and_is_refused() -> None:
    assert "group_size = 1: must be at least 2" in refused("group_size=1").sentence


def test_a_value_that_no_choice_allows_is_one_problem() -> None:
    assert list(problems(refused("advantage=grpo"))) == ["advantage"]
    assert len(refused("advantage=grpo").details["problems"]) == 1


def test_refused_trainer_settings_are_no_reason_to_refuse_the_group_size(tmp_path: Path) -> None:
    given = (
        "trainer.total_steps=0",
        "trainer.advantage=rebn",
        "env.group_size=1",
        "env.batch_size=4",
    )
    assert list(problems(refused(*given))) == ["trainer.total_steps"]


def test_a_setting_within_a_setting_is_named() -> None:
    error = refused("loss=ppo", "loss_config={clip_high_threshold: .nan}")
    assert "clip_high_threshold: must be a finite number" in error.sentence


def test_a_loss_without_a_setting_names_those_that_have_it() -> None:
    assert (
        "Losses with 'clip_high_threshold': ppo, cispo, gspo."
        in refused("loss_config={clip_high: 1.2}").sentence
    )


def test_a_batch_is_divided_into_no_more_minibatches_than_it_has_rollouts() -> None:
    edits = ("loss=ppo", "env.group_size=2", "env.batch_size=8")
    assert "must be at most env.batch_size (8)" in refused(*edits, "minibatches=1000").sentence
    assert (
        resolve_settings(ENVIRONMENT, None, [*edits, "minibatches=8"]).settings.trainer.minibatches
        == 8
    )


@pytest.mark.parametrize(
    ("wrappers", "why"),
    [
        ("concatt", "Did you mean 'concat'?"),
        ("episode_tracking,concat", "is the order"),
        ("search_tool,concat", "search_url is not set"),
    ],
)
def test_a_games_wrappers_are_checked_before_a_run_begins(wrappers: str, why: str) -> None:
    with pytest.raises(InvalidConfig) as error:
        resolve_settings("game:GuessTheNumber-v0-easy", None, [f"env.env_wrappers={wrappers}"])
    assert why in error.value.sentence


EVERY_CHARACTER = [chr(number) for number in range(sys.maxunicode + 1)]
UNSEEN = [one for one in EVERY_CHARACTER if unicodedata.category(one) in ("Cc", "Cf", "Zl", "Zp")]


def test_a_name_holds_no_character_that_is_not_seen_or_turns_others() -> None:
    """It stands in listings: a line break in it would look like another run."""
    assert {"\n", "\x1b", "\x9b", "\u200b", "\u2028", "\u202e", "\ufeff"} <= set(UNSEEN)
    names = TypeAdapter(OneLine)
    for one in UNSEEN:
        with pytest.raises(ValidationError):
            names.validate_python(f"a{one}b")
    assert names.validate_python("déjà vu 1, 東京 👍") == "déjà vu 1, 東京 👍"


NAMES = {
    "name": "\u202ea",
    "wandb_project": "\u202ea",
    "wandb_entity": "\u202ea",
    "tags": ["\u202ea"],
}


@pytest.mark.parametrize("field", NAMES)
def test_a_name_that_would_be_shown_otherwise_than_it_is_is_refused(field: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        resolve_settings("arithmetic", None, [f"run.{field}={json.dumps(NAMES[field])}"])
    assert [problem["field"] for problem in refused.value.details["problems"]] == [f"run.{field}"]


def test_a_data_set_is_looked_for_beside_the_settings_file_and_where_the_caller_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment runs in another folder; a name on the hub is no path."""
    folder, here = tmp_path / "settings", tmp_path / "here"
    for place in (folder, here):
        place.mkdir()
    (folder / "beside.jsonl").touch()
    (here / "mine.jsonl").touch()
    monkeypatch.chdir(here)

    def dataset(value: str, *, in_file: bool) -> str:
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump({"env": {"dataset": value}}))
        edits = [] if in_file else [f"env.dataset={value}"]
        return resolve_settings("gsm8k", file if in_file else None, edits).settings.env["dataset"]

    assert dataset("beside.jsonl", in_file=True) == str(folder / "beside.jsonl")
    assert (
        dataset("mine.jsonl", in_file=True)
        == dataset("mine.jsonl", in_file=False)
        == str(here / "mine.jsonl")
    )
    assert dataset("gone.jsonl", in_file=True) == str(folder / "gone.jsonl")
    assert (
        dataset("openai/gsm8k", in_file=False)
        == dataset("openai/gsm8k", in_file=True)
        == "openai/gsm8k"
    )


def test_tasks_are_looked_for_where_the_caller_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that is not there stays what it is: the environment may have it in its own folder."""
    (tmp_path / "mine.jsonl").write_text('{"question": "?"}\n')
    monkeypatch.chdir(tmp_path)

    def tasks(value: str) -> str:
        return resolve_settings("agent", None, [f"env.tasks={value}"]).settings.env["tasks"]

    assert tasks("mine.jsonl") == str(tmp_path / "mine.jsonl")
    assert tasks("theirs.jsonl") == "theirs.jsonl"


@pytest.mark.parametrize(
    ("edits", "batch"),
    [
        ([], (64, 8, "model")),
        (["env.group_size=4"], (64, 4, "model")),
        (["env.group_size=128"], (128, 128, "model")),
        (["env.batch_size=512"], (512, 16, "edit")),
    ],
)
def test_a_batch_that_nobody_set_follows_the_models_size(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    edits: list[str],
    batch: tuple[int, int, str],
) -> None:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    found = resolve_settings("arithmetic", None, ["model=vendor/Any-1.5B", *edits])
    env = found.settings.env
    assert (env["batch_size"], env["group_size"], found.sources["env.batch_size"]) == batch
    # an environment of somebody else's has what its author chose
    own = resolve_settings(ENVIRONMENT, None, ["model=vendor/Any-1.5B"])
    assert "env.batch_size" not in own.sources
    small = resolve_settings("arithmetic", None, [])
    assert small.settings.env["batch_size"] == 256 and "env.batch_size" not in small.sources
