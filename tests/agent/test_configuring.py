"""rl_get_current_config and rl_edit_config: the seeds' keys, types, locks, what an edit brings with
it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halteres.losses import LOSSES

from .draft_fixtures import QUIZ, environment, quiz, refused, reply, tokens, told

SEED_FIELD = {"name", "type", "default", "description", "current_value"}
SEED_LOCKED = {
    "tokenizer_name": "Qwen/Qwen3-8B",
    "rollout_server_url": "http://localhost:8000",
    "use_wandb": True,
    "max_token_length": 8192,
    "max_num_workers": 2048,
    "worker_timeout": 3600,
    "total_steps": 2500,
    "steps_per_eval": 25,
    "max_batches_offpolicy": 3,
    "inference_weight": 1.0,
    "eval_limit_ratio": 0.1,
}
SEED_CONFIGURABLE = {
    "group_size",
    "batch_size",
    "max_eval_workers",
    "max_num_workers_per_node",
    "eval_handling",
    "wandb_name",
    "num_rollouts_to_keep",
    "num_rollouts_per_group_for_logging",
    "ensure_scores_are_not_same",
    "min_items_sent_before_logging",
    "include_messages",
    "thinking_mode",
    "data_path_to_save_groups",
    "min_batch_allocation",
    "reasoning_effort",
    "max_reasoning_tokens",
    "custom_thinking_prompt",
}
NO_ENVIRONMENT = "No environment selected. Use rl_select_environment(name) first."


@pytest.fixture
def home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    quiz(tmp_path_factory, monkeypatch)
    return tmp_path


@pytest.fixture
async def selected(home: Path) -> Path:
    """A home whose draft has the quiz."""
    await told("rl_select_environment", name="quiz")
    return home


async def fields(**arguments: Any) -> dict[str, dict[str, Any]]:
    answer = await told("rl_get_current_config", **arguments)
    return {one["name"]: one for one in (*answer["configurable_fields"], *answer["locked_fields"])}


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [("rl_get_current_config", {}), ("rl_edit_config", {"field": "x", "value": 1})],
)
async def test_without_an_environment_the_seeds_error_is_given(
    home: Path, tool: str, arguments: dict[str, Any]
) -> None:
    answer = await refused(tool, **arguments)
    assert (answer["error"], answer["code"]) == (NO_ENVIRONMENT, "no_environment")


async def test_brief_tells_the_headline_and_what_was_changed(selected: Path) -> None:
    await told("rl_edit_config", field="level", value=4)
    answer = await told("rl_get_current_config")
    assert {"environment", "configurable_fields", "locked_fields", "tip"} <= answer.keys()
    assert {"name": "group_size", "current_value": 8} in answer["configurable_fields"]
    assert {"name": "level", "current_value": 4} in answer["configurable_fields"]
    names = [one["name"] for one in answer["configurable_fields"]]
    assert {
        "model",
        "batch_size",
        "total_steps",
        "learning_rate",
        "lora_rank",
        "wandb_name",
    } <= set(names)
    assert answer["locked_fields"] == []
    assert answer["tip"].startswith(
        "Use rl_edit_config(field, value) to change any configurable field."
    )
    assert tokens(answer) <= 350


async def test_full_tells_every_field_with_the_seeds_keys(selected: Path) -> None:
    answer = await told("rl_get_current_config", detail="full")
    everything = [*answer["configurable_fields"], *answer["locked_fields"]]
    assert all(one.keys() >= SEED_FIELD for one in everything)
    assert all("locked_value" in one for one in answer["locked_fields"])
    assert {one["name"] for one in answer["configurable_fields"]} >= SEED_CONFIGURABLE
    assert len({one["name"] for one in everything}) == len(everything)
    assert "rollout_server_url" in {one["name"] for one in answer["locked_fields"]}
    assert "policy" not in answer
    assert tokens(answer) < 5900
    described = {one["name"]: one["description"] for one in everything}
    assert (described["level"], described["group_size"]) == (
        "how hard",
        "rollouts of one task, scored together",
    )
    # the quiz's author described one of five
    ours = described.keys() - {"style", "topics", "hint", "env.loss"}
    assert all(described[name] for name in ours), [name for name in ours if not described[name]]


async def test_a_field_tells_its_type_its_range_and_what_is_allowed(selected: Path) -> None:
    told_fields = await fields(detail="full")
    level = (await fields(field="level"))["level"]
    assert {**level, **told_fields["level"]} == level
    assert (level["type"], level["default"], level["current_value"], level["range"]) == (
        "int",
        3,
        3,
        ">= 1, <= 9",
    )
    assert (level["description"], level["section"]) == ("how hard", "env")
    assert (told_fields["style"]["allowed"], told_fields["style"]["type"]) == (
        ["plain", "witty"],
        "str",
    )
    (loss,) = (await fields(field="trainer.loss")).values()
    assert loss["allowed"] == list(LOSSES), "a validator's values too"
    assert told_fields["eval_handling"]["allowed"] == ["STOP_TRAIN", "LIMIT_TRAIN", "NONE"]
    assert (told_fields["topics"]["type"], told_fields["topics"]["default"]) == (
        "list",
        ["history"],
    )
    assert (told_fields["hint"]["type"], told_fields["hint"]["default"]) == ("str | None", None)
    assert told_fields["steps_per_eval"]["same_as"] == "eval_every"


async def test_a_required_field_is_flagged_and_does_no_harm(home: Path) -> None:
    """The seeds' tool could not make JSON of it."""
    text = QUIZ.replace("hint: str | None = None", "hint: str").replace(
        "level=3", "level=3, hint='no'"
    )
    environment(home, "strict", text.replace('"quiz"', '"strict"'))
    await told("rl_select_environment", name="strict")
    hint = (await fields(field="hint"))["hint"]
    assert (hint["required"], hint["default"], hint["current_value"]) == (True, "no", "no")


async def test_one_field_is_told_in_full_by_any_of_its_names(selected: Path) -> None:
    for name in ("eval_every", "trainer.eval_every"):
        assert list(await fields(field=name)) == ["eval_every"]
    answer = await refused("rl_get_current_config", field="levle")
    assert (answer["code"], answer["did_you_mean"]) == ("unknown_field", "level")
    assert "level" in answer["available_fields"]


async def test_the_model_is_told_with_those_that_there_are(selected: Path) -> None:
    answer = await told("rl_get_current_config", field="model")
    assert answer["configurable_fields"][0]["current_value"] == "halteres/tiny"
    models = {model["name"]: model for model in answer["models"]}
    assert models["halteres/tiny"]["fits"] == "yes"
    assert answer["proposed"] in models
    assert tokens(answer) <= 350


async def test_a_name_that_is_ours_and_the_environments_is_told_whole(selected: Path) -> None:
    told_fields = await fields(detail="full")
    assert {"env.loss", "trainer.loss"} <= told_fields.keys()
    assert "loss" not in told_fields
    assert (
        "write trainer.loss or env.loss"
        in (await refused("rl_edit_config", field="loss", value=1))["error"]
    )
    await told("rl_edit_config", field="env.loss", value=0.25)


async def test_an_edit_answers_with_the_seeds_keys_and_the_difference(selected: Path) -> None:
    answer = await told("rl_edit_config", field="group_size", value=16)
    assert {"message", "field", "value", "config"} <= answer.keys()
    assert (answer["message"], answer["field"], answer["value"]) == (
        "Updated group_size = 16",
        "group_size",
        16,
    )
    assert answer["diff"] == {"group_size": [8, 16]}
    assert answer["config"]["group_size"] == 16
    assert answer["next"] == "rl_start_training(dry_run=true)"
    assert tokens(answer) <= 350


async def test_several_changes_are_all_made_or_none(selected: Path) -> None:
    answer = await told(
        "rl_edit_config", changes={"group_size": 12, "batch_size": 72, "steps_per_eval": 5}
    )
    assert answer["diff"] == {"group_size": [8, 12], "batch_size": [64, 72], "eval_every": [20, 5]}
    assert not {"field", "value"} & answer.keys()
    refusal = await refused("rl_edit_config", changes={"level": 5, "lora_rank": "banana"})
    assert "Nothing was changed." in refusal["error"]
    assert (await fields(field="level"))["level"]["current_value"] == 3


async def test_a_batch_of_broken_groups_is_refused_with_the_call_that_mends_it(
    selected: Path,
) -> None:
    answer = await refused("rl_edit_config", changes={"group_size": "12", "batch_size": 64})
    assert (answer["code"], answer["problems"][0]["suggest"]) == ("invalid_config", [60, 72])
    assert (answer["problems"][0]["field"], answer["coerced"]) == ("batch_size", {"group_size": 12})
    assert answer["next"] == 'rl_edit_config(changes={"group_size":12,"batch_size":60})'


async def test_a_wrong_name_is_told_with_the_seeds_keys_and_the_nearest(selected: Path) -> None:
    answer = await refused("rl_edit_config", field="lerning_rate", value=0.1)
    assert answer["error"].startswith("Unknown field 'lerning_rate'")
    assert (answer["code"], answer["did_you_mean"]) == ("unknown_field", "trainer.learning_rate")
    assert {"level", "learning_rate", "group_size"} <= set(answer["available_fields"])
    assert answer["next"] == 'rl_edit_config(changes={"trainer.learning_rate":0.1})'


@pytest.mark.parametrize(("value", "holds"), [("5", 5), (5.0, 5), ("5.0", 5)])
async def test_a_number_written_as_text_is_taken_for_one_and_told(
    selected: Path, value: Any, holds: int
) -> None:
    answer = await told("rl_edit_config", field="level", value=value)
    assert answer["value"] == holds
    assert answer.get("coerced", {}) == ({"level": holds} if isinstance(value, str) else {})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("level", "banana"),
            ("level", 10),
            ("level", None),
            ("level", True),
            ("style", "dull"),
            ("lora_rank", 0.5),
        ),
        *(("max_reasoning_tokens", 5), ("max_reasoning_tokens", 32_001), ("model", "")),
    ],
)
async def test_what_is_no_value_of_a_field_is_refused(
    selected: Path, field: str, value: Any
) -> None:
    answer = await refused("rl_edit_config", field=field, value=value)
    assert (answer["code"], answer["problems"][0]["field"].rpartition(".")[2]) == (
        "invalid_config",
        field,
    )


@pytest.mark.parametrize("value", [None, ""])
async def test_null_and_the_empty_text_are_values(selected: Path, value: str | None) -> None:
    """The seeds dropped both on the way to the run."""
    await told("rl_edit_config", field="hint", value="think")
    answer = await told("rl_edit_config", field="hint", value=value)
    assert (answer["value"], answer["diff"]) == (value, {"hint": ["think", value]})


async def test_a_field_needs_a_value_and_changes_need_none(selected: Path) -> None:
    for bad in (
        {},
        {"field": "level"},
        {"value": 3},
        {"field": "level", "value": 3, "changes": {"seed": 3}},
    ):
        assert (await refused("rl_edit_config", **bad))["code"] == "invalid_arguments"
    # so some hosts fill in what is missing
    await told("rl_edit_config", changes={"seed": 3}, value="", field="")


async def test_warnings_tell_what_an_edit_brings_with_it(selected: Path) -> None:
    slower = await told("rl_edit_config", changes={"batch_size": 128, "max_new_tokens": 64})
    assert slower["warnings"] == [
        "about 4.0x slower per step: up to 8,192 tokens in one, before 2,048"
    ]
    off = await told("rl_edit_config", field="temperature", value=0.7)
    assert off["warnings"][0].startswith("temperature 0.7")
    short = await told("rl_edit_config", field="max_token_trainer_length", value=512)
    assert "longer sequences are left out" in short["warnings"][0]
    assert (await told("rl_edit_config", field="thinking_mode", value=True))["warnings"] == [
        "thinking_mode has no effect here"
    ]
    assert "warnings" not in await told("rl_edit_config", field="seed", value=2)
    never = await told("rl_edit_config", changes={"stop_when": 0.9, "eval_every": 0})
    assert "eval_every 0 leaves only its two ends" in never["warnings"][-1]


@pytest.mark.parametrize("field", ["trainer.lora_rank", "lora_rank"])
async def test_a_locked_field_is_locked_also_for_the_value_that_holds(
    selected: Path, field: str
) -> None:
    (selected / "policy.yaml").write_text("lock: {trainer.lora_rank: 4}\n")
    answer = await refused("rl_edit_config", changes={field: 4, "level": 5})
    assert answer["error"].startswith(f"Field '{field}' is locked and cannot be changed")
    assert (answer["code"], answer["locked_value"]) == ("locked_field", 4)
    assert (await fields(field="level"))["level"]["current_value"] == 3


async def test_the_tokenizer_is_the_base_models(selected: Path) -> None:
    """Spec, section 2: it is wiring; a name that looks like the environment's does not change the
    base model.
    """
    await told("rl_edit_config", field="model", value="Qwen/Qwen3-0.6B")
    answer = await refused("rl_edit_config", field="tokenizer_name", value="Qwen/Qwen3-8B")
    assert (answer["code"], answer["locked_value"]) == ("locked_field", "Qwen/Qwen3-0.6B")
    assert "it is the base model's; set inference.model" in answer["error"]
    assert (await fields(field="tokenizer_name"))["tokenizer_name"][
        "current_value"
    ] == "Qwen/Qwen3-0.6B"


async def test_the_name_told_is_the_one_that_a_run_gets(selected: Path) -> None:
    named = (await fields(field="wandb_name"))["wandb_name"]
    assert (named["default"], named["current_value"]) == ("quiz-{run_id}", "quiz-{run_id}")
    await told("rl_edit_config", field="wandb_name", value="zed")
    assert (await fields(field="wandb_name"))["wandb_name"]["current_value"] == "zed"


async def test_a_default_that_is_no_number_is_told_as_null_and_left_alone(home: Path) -> None:
    text = QUIZ.replace("loss: float = 0.5", "loss: float = float('nan')").replace(
        '"quiz"', '"odd"'
    )
    environment(home, "odd", text)
    await told("rl_select_environment", name="odd")
    loss = (await fields(field="env.loss"))["env.loss"]
    assert (loss["default"], loss["current_value"]) == (None, None)
    for value in ("nan", "inf"):
        assert (
            "must be a finite number"
            in (await refused("rl_edit_config", field="env.loss", value=value))["error"]
        )
    assert (await told("rl_edit_config", field="env.loss", value=0.25))["value"] == 0.25


@pytest.mark.parametrize(
    ("field", "locked_value"), [("rollout_server_url", "http://localhost:8000"), ("url", None)]
)
async def test_wiring_is_locked_by_every_policy(
    selected: Path, field: str, locked_value: str | None
) -> None:
    answer = await refused("rl_edit_config", field=field, value="http://elsewhere")
    assert answer["error"].startswith(f"Field '{field}' is locked and cannot be changed")
    assert answer["code"] == "locked_field"
    assert answer["locked_value"] == (locked_value or "filled in by the run")


async def test_metrics_are_filed_as_the_variables_say_unless_edited(
    selected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await fields(field="wandb_project"))["wandb_project"][
        "current_value"
    ] == "atropos-tinker"
    monkeypatch.setenv("WANDB_PROJECT", "house")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    assert (await fields(field="wandb_project"))["wandb_project"]["current_value"] == "house"
    assert (await fields(field="wandb_entity"))["wandb_entity"]["current_value"] == "team"
    answer = await told("rl_edit_config", changes={"wandb_project": "mine", "tags": ["a", "b"]})
    assert (answer["config"]["wandb_project"], answer["config"]["tags"]) == ("mine", ["a", "b"])


async def test_hermes_compat_locks_what_the_seeds_locked(home: Path) -> None:
    (home / "policy.yaml").write_text("hermes-compat\n")
    selected = await told("rl_select_environment", name="quiz")
    assert (selected["config"]["total_steps"], selected["config"]["lora_rank"]) == (2500, 32)
    answer = await told("rl_get_current_config", detail="full")
    locked = {one["name"]: one["locked_value"] for one in answer["locked_fields"]}
    assert SEED_LOCKED.items() <= locked.items()
    assert {
        "lora_rank": 32,
        "learning_rate": 4e-5,
        "checkpoint_every": 25,
    }.items() <= locked.items()
    assert all(one["current_value"] == one["locked_value"] for one in answer["locked_fields"])
    assert {one["name"] for one in answer["configurable_fields"]} >= SEED_CONFIGURABLE
    assert answer["policy"] == "hermes-compat"
    assert tokens(answer) < 6200
    assert tokens(await told("rl_get_current_config")) <= 350


@pytest.mark.parametrize("field", sorted(SEED_LOCKED))
async def test_hermes_compat_refuses_in_the_seeds_words(home: Path, field: str) -> None:
    (home / "policy.yaml").write_text("extends: hermes-compat\n")
    await told("rl_select_environment", name="quiz")
    answer = await refused("rl_edit_config", field=field, value=7)
    assert answer["error"].startswith(f"Field '{field}' is locked and cannot be changed")
    assert (answer["code"], answer["field"], answer["locked_value"]) == (
        "locked_field",
        field,
        SEED_LOCKED[field],
    )


async def test_a_policy_that_came_later_can_be_followed(selected: Path) -> None:
    """Edits made before the lock are set aside (test_sifting)."""
    await told("rl_edit_config", field="lora_rank", value=8)
    (selected / "policy.yaml").write_text("lock: {trainer.lora_rank: 4}\n")
    assert (await fields(field="lora_rank"))["lora_rank"]["locked_value"] == 4


async def test_a_cap_on_steps_is_named_with_its_file(selected: Path) -> None:
    (selected / "policy.yaml").write_text("caps: {max_steps: 20}\n")
    answer = await reply("rl_edit_config", field="total_steps", value=50)
    assert (answer.body["code"], answer.status) == ("policy_cap", 403)
    assert (
        f"caps.max_steps is 20 in {selected / 'policy.yaml'}".lower()
        in answer.body["error"].lower()
    )
    assert answer.body["next"] == 'rl_edit_config(changes={"total_steps":20})'
    assert (await fields(field="total_steps"))["total_steps"]["current_value"] == 20


async def test_an_environment_that_broke_after_it_was_selected_is_an_answer(selected: Path) -> None:
    text = QUIZ.replace('"quiz"', '"fragile"')
    environment(selected, "fragile", text)
    await told("rl_select_environment", name="fragile")
    environment(
        selected, "fragile", text.replace("    class Quiz(", "    1 / 0\n\n    class Quiz(")
    )
    for tool, arguments in (
        ("rl_get_current_config", {}),
        ("rl_edit_config", {"field": "level", "value": 5}),
    ):
        assert (await refused(tool, **arguments))["code"] == "environment_broken"
    environment(selected, "fragile", text)
    assert (
        json.dumps((await told("rl_edit_config", field="level", value=5))["diff"])
        == '{"level": [3, 5]}'
    )


async def test_a_cap_that_lowers_the_default_steps_says_so(selected: Path) -> None:
    (selected / "policy.yaml").write_text("caps: {max_steps: 15}\n")
    for answer in (
        await told("rl_select_environment", name="quiz"),
        await told("rl_get_current_config"),
    ):
        assert answer["warnings"] == [
            "total_steps is 15 rather than 40: the policy 'policy' allows no more (caps.max_steps)"
        ]
    (selected / "policy.yaml").write_text("caps: {max_steps: 500}\n")
    assert "warnings" not in await told("rl_get_current_config")


async def test_a_model_that_is_not_on_this_disk_is_warned_of(selected: Path) -> None:
    answer = await told("rl_edit_config", field="model", value="nope/none")
    assert answer["warnings"] == [
        "the model 'nope/none' is not on this disk (`halteres models add`): no run can start with "
        "it"
    ]
