"""rl_start_training: what it answers, what it refuses, that one key is one run. With stand-ins for
a run's roles.
"""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs.run_fixtures import ENVIRONMENT, STANDIN_SUPERVISOR, large_model, wait, wait_for_end
from typer.testing import CliRunner

from halteres.agent import start_request, start_training
from halteres.agent.next_call import next_call
from halteres.agent.trial.folder import TestOutcome
from halteres.cli.main import app
from halteres.models import TINY, builtin_path
from halteres.next_step import for_agents
from halteres.observe.metrics import append_row
from halteres.process import usable_cores
from halteres.runs import start
from halteres.runs.directory import RunDirectory, find_run, list_runs, stop_run
from halteres.runs.planning import plan as planning
from halteres.runs.planning import resources
from halteres.runs.planning.estimate import Estimate, Span
from halteres.runs.planning.resume_point import CheckpointMissing, checkpoint_of

from .run_fixtures import make_run
from .started_runs import CHANGES, begun_by_standins, check_of, runs, select, tokens, told

pytestmark = pytest.mark.runs

SEED_KEYS = {
    "run_id",
    "status",
    "environment",
    "config",
    "wandb_project",
    "wandb_run_name",
    "config_path",
    "logs",
    "message",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from begun_by_standins(tmp_path, monkeypatch)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers do two of four steps, then wait to be stopped."""
    monkeypatch.setenv("STANDIN_STEPS", "2")


def policy(home: Path, **fields: Any) -> None:
    (home / "policy.yaml").write_text(yaml.safe_dump(fields))


async def test_a_started_run_answers_with_the_keys_of_the_seeds_and_is_seen_at_once(
    home: Path,
) -> None:
    await select()
    started = await told("rl_start_training", name="first try")
    assert started.keys() >= SEED_KEYS | {"phase", "next"}
    run_id = started["run_id"]
    assert (started["status"], started["phase"], started["environment"]) == (
        "starting",
        "api",
        "standin_env",
    )
    assert (started["wandb_project"], started["wandb_run_name"]) == (
        "atropos-tinker",
        f"standin_env-{run_id}",
    )
    assert started["config"]["total_steps"] == 4
    assert set(started["logs"]) == {"api", "trainer", "env"}
    assert Path(started["config_path"]).is_file()
    assert started["next"].startswith(f'rl_check_status("{run_id}", wait_s=45, until=')
    looked = await told("rl_check_status", run_id=run_id)
    assert looked["run_id"] == run_id and looked["status"] in ("pending", "starting", "running")
    assert find_run("first try").run_id == run_id
    assert tokens(started) <= 450


async def test_a_run_with_wandb_says_so_when_it_is_started(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_SINKS", "variables")
    await select()
    assert "wandb" not in await told("rl_start_training"), "what is off is not told"
    started = await told("rl_start_training", changes={"use_wandb": True})
    assert (started["wandb"], started["config"]["use_wandb"]) == ("starting", True)


async def test_without_an_environment_the_seeds_sentence_is_told(home: Path) -> None:
    answer = await told("rl_start_training")
    assert answer["error"] == "No environment selected. Use rl_select_environment(name) first."
    assert answer["code"] == "no_environment"


async def test_an_environment_that_is_gone_is_told_as_the_seeds_do(
    home: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "standin_copy.py"
    copy.write_text(Path(ENVIRONMENT).read_text())
    await told("rl_select_environment", name=str(copy))
    copy.unlink()
    answer = await told("rl_start_training")
    assert answer["error"].startswith(f"Environment file not found for '{copy}'.")
    assert runs() == []


async def test_selecting_editing_and_starting_are_one_call(home: Path) -> None:
    await select()
    await told("rl_edit_config", field="difficulty", value=3)
    changes = {"group_size": 4, "batch_size": 8, "total_steps": 4}
    started = await told("rl_start_training", environment=ENVIRONMENT, changes=changes)
    assert started["config"]["group_size"] == 4
    assert started["discarded_edits"]["env.difficulty"] == 3
    config = await told("rl_get_current_config", field="group_size")
    assert config["configurable_fields"][0]["current_value"] == 4, "the draft was edited"


async def test_a_refused_change_starts_nothing_and_names_the_call_that_would(home: Path) -> None:
    await select()
    answer = await told("rl_start_training", changes={"batch_size": 7})
    assert answer["code"] == "invalid_config"
    assert answer["next"].startswith("rl_start_training(") and '"batch_size":6' in answer["next"]
    assert runs() == []


async def test_a_dry_run_tells_checks_and_changes_and_leaves_no_trace_of_a_run(home: Path) -> None:
    await select(group_size=4, **{"inference.engine": "scripted"})
    answer = await told("rl_start_training", dry_run=True)
    assert (answer["dry_run"], answer["ok"]) == (True, True)
    names = [check["check"] for check in answer["checks"]]
    assert names == [
        *("variables", "model present", "memory", "disk", "environment", "reward varies")
    ]
    memory = check_of(answer, "memory")
    assert 0 < memory["need_gb"] < memory["free_gb"]
    assert answer["config_diff"]["group_size"] == [2, 4]
    assert answer["next"] == "rl_test_inference() then rl_start_training()"
    assert tokens(answer) <= 450
    assert not (home / "runs").exists() and not (home / "logs").exists()


async def test_a_dry_run_on_a_busy_machine_says_so(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await select(**{"inference.engine": "scripted"})
    assert "warnings" not in await told("rl_start_training", dry_run=True)
    monkeypatch.setattr(resources, "load_average", lambda: 3.0 * usable_cores())
    (remark,) = (await told("rl_start_training", dry_run=True))["warnings"]
    assert remark.startswith(f"the machine is busy: {3 * usable_cores()} processes want")


async def test_a_time_limit_below_the_estimate_is_warned_of(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a dry run and by the start; the run begins all the same."""
    expected = Estimate(step_s=Span(60, 90), total_s=Span(600, 900), basis="a guess")
    monkeypatch.setattr(planning, "estimate", lambda *_, **__: expected)
    await select(max_minutes=10)
    rehearsed = await told("rl_start_training", dry_run=True)
    assert "max_minutes" not in [check["check"] for check in rehearsed["checks"]]
    await select(max_minutes=9)
    limit = check_of(await told("rl_start_training", dry_run=True), "max_minutes")
    assert not limit["ok"]
    assert limit["found"].startswith("the run takes 10 minutes at the least")
    (warning,) = await warned()
    assert "max_minutes ends it after 9" in warning


async def test_a_dry_run_tells_every_failing_check_and_raises_none(home: Path) -> None:
    policy(home, require_keys=["TINKER_API_KEY"])
    await select(**{"inference.model": "Qwen/Qwen3-8B"})
    answer = await told("rl_start_training", dry_run=True)
    assert answer["ok"] is False
    failed = {one["check"]: one["problem"] for one in answer["checks"] if "problem" in one}
    assert failed.keys() == {"keys", "model present"}
    assert "TINKER_API_KEY not set. Add it to ~/.hermes/.env" in failed["keys"]
    assert f"There is no folder {home}/models/Qwen/Qwen3-8B." in failed["model present"]
    assert "estimate" not in answer


async def test_a_dry_run_refuses_a_batch_that_no_memory_holds_and_warns_of_answers_without_room(
    home: Path,
) -> None:
    await told("rl_select_environment", name="arithmetic")
    huge = {"batch_size": 2**20, "max_token_length": 10**6, "inference.engine": "scripted"}
    await told("rl_edit_config", changes=huge)
    checks = {
        check["check"]: check for check in (await told("rl_start_training", dry_run=True))["checks"]
    }
    failed = checks.get("memory") or checks["gpu memory"]
    assert not failed["ok"]
    assert "1,048,576 sequences" in failed["problem"]
    edited = await told("rl_edit_config", changes={"batch_size": 64, "max_token_length": 5})
    assert any("cannot be reached" in warning for warning in edited["warnings"])
    answer = await told("rl_start_training", dry_run=True)
    checks = {check["check"]: check for check in answer["checks"]}
    reward = checks["reward varies"]
    assert (reward["ok"], reward["found"]) == (False, "not tested yet")
    assert not checks["room for answers"]["ok"]
    assert "max_token_length 5" in checks["room for answers"]["found"]


async def test_a_dry_run_ends_the_services_of_chats_only_where_their_memory_is_needed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(start_request, "end_all_kept", lambda: ended.append("all"))
    await told("rl_select_environment", name="arithmetic")
    await told("rl_edit_config", field="inference.engine", value="scripted")
    assert (await told("rl_start_training", dry_run=True))["ok"]
    assert not ended
    await told("rl_edit_config", changes={"batch_size": 2**20, "max_token_length": 10**6})
    assert not (await told("rl_start_training", dry_run=True))["ok"]
    assert ended == ["all"]


async def test_bfloat16_is_proposed_to_a_large_model_where_the_processor_has_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "estimate", lambda *_, **__: None)
    monkeypatch.setattr(resources, "CPU_INFO", home / "cpuinfo")
    model = str(large_model(home / "large"))

    async def proposed(**changes: Any) -> bool:
        await select(**changes)
        answer = await told("rl_start_training", dry_run=True)
        found = [check for check in answer["checks"] if check["check"] == "dtype"]
        return bool(found) and "inference.dtype to bfloat16" in found[0]["remedy"]

    (home / "cpuinfo").write_text("flags\t\t: fpu avx512f avx512_bf16 vaes\n")
    assert await proposed(**{"inference.model": model})
    assert not await proposed(**{"inference.model": model, "inference.dtype": "bfloat16"})
    assert not await proposed(), "the built-in model is too small to gain"
    for flags in ("avx512f vaes", "avx512_bf16 amx_bf16 amx_tile"):
        (home / "cpuinfo").write_text(f"flags\t\t: fpu {flags}\n")
        assert not await proposed(**{"inference.model": model})


async def test_a_temperature_that_nothing_corrects_is_said_where_the_run_starts(
    home: Path,
) -> None:
    """A loss that weighs every token by its ratio corrects it; one that clips the ratio does
    not.
    """
    await select(temperature=1.5)
    assert not any("temperature" in one for one in await warned())
    await select(temperature=1.5, **{"trainer.loss": "ppo"})
    (warning,) = await warned()
    assert "sampled at temperature 1.5" in warning and "set env.temperature to 1" in warning


async def warned() -> list[str]:
    """What a start warns of."""
    return (await told("rl_start_training")).get("warnings", [])


async def test_a_draft_that_changes_its_model_changes_the_learning_rate(home: Path) -> None:
    """A rate that nobody has set follows the model, back again too; one that was set stays."""
    model = str(large_model(home / "large"))
    await select()
    for changes, rate in (
        ({"inference.model": model}, 3e-4),
        ({"inference.model": TINY}, 1.5e-3),
        ({"inference.model": model, "learning_rate": 2e-4}, 2e-4),
    ):
        changed = await told("rl_edit_config", changes=changes)
        assert changed["config"]["learning_rate"] == rate


async def test_the_built_in_models_learning_rate_is_warned_of_where_it_meets_a_large_model(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a dry run, by the start itself, and by `halteres train`; the run begins all the same."""
    # the model has no weights to measure with
    monkeypatch.setattr(planning, "estimate", lambda *_, **__: None)
    monkeypatch.setattr(resources, "CPU_INFO", home / "cpuinfo")
    model = str(large_model(home / "large"))
    await select(**{"inference.model": model, "learning_rate": 1.5e-3})
    rehearsed = await told("rl_start_training", dry_run=True)
    assert rehearsed["ok"] and not check_of(rehearsed, "learning rate")["ok"]
    (warning,) = (await told("rl_start_training"))["warnings"]
    assert "0.0015 suits the built-in model of 0.9 M parameters; this model has 26 M" in warning
    monkeypatch.setattr(
        start, "start_run", functools.partial(start.start_run, supervisor=STANDIN_SUPERVISOR)
    )
    train = functools.partial(CliRunner().invoke, app, catch_exceptions=False)
    words = ["train", ENVIRONMENT, "--detach", "--set", f"inference.model={model}"]
    started = train([*words, "--set", "learning_rate=1.5e-3"])
    assert started.exit_code == 0 and f"warning: {warning}" in started.stderr
    assert "warning" not in train(words).stderr


async def test_what_a_dry_run_finds_failing_is_refused_by_a_start_with_all_checks(
    home: Path,
) -> None:
    await select(**{"inference.model": "Qwen/Qwen3-8B"})
    answer = await told("rl_start_training")
    assert (answer["code"], answer["field"]) == ("preflight_failed", "inference.model")
    assert "halteres/tiny" in answer["allowed"]
    assert answer["next"] == 'rl_get_current_config(field="model")'
    assert [check["check"] for check in answer["checks"] if not check["ok"]] == ["model present"]
    assert runs() == []


async def test_a_key_that_the_policy_asks_for_is_named_as_the_seeds_do(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy(home, require_keys=["TINKER_API_KEY"])
    await select()
    answer = await told("rl_start_training")
    assert answer["error"].startswith("TINKER_API_KEY not set. Add it to ~/.hermes/.env")
    assert answer["code"] == "missing_key"
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    assert (await told("rl_start_training"))["status"] == "starting"


@pytest.mark.parametrize(("share", "ok"), [(0.62, True), (0.0, False)])
async def test_whether_rewards_vary_is_told_from_the_last_test(
    home: Path, monkeypatch: pytest.MonkeyPatch, share: float, ok: bool
) -> None:
    outcome = TestOutcome(
        test_id="t-1",
        groups_with_variance=share,
        trainable=ok,
        finished_at=time.time() - 240,
    )
    monkeypatch.setattr(start_training, "latest_test", lambda *_: outcome)
    await select(**{"inference.engine": "scripted"})
    answer = await told("rl_start_training", dry_run=True)
    check = check_of(answer, "reward varies")
    assert (check["ok"], check["groups_with_variance"], check["from"]) == (
        ok,
        share,
        "rl_test_inference 4 min ago",
    )
    assert answer["ok"] is True, "no run is refused for it"
    assert answer["next"] == ("rl_start_training()" if ok else "rl_test_inference()")
    warnings = (await told("rl_start_training")).get("warnings", [])
    assert len(warnings) == (0 if ok else 1)
    assert all("rewards that vary (rl_test_inference 4 min ago)" in warning for warning in warnings)


async def test_a_stored_model_keeps_the_name_that_the_draft_has(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last test is found under it, and changes show it; the run itself has the folder."""
    built_in = builtin_path(TINY)
    assert built_in is not None
    shutil.copytree(built_in, home / "models" / "mine")
    asked: list[Any] = []
    monkeypatch.setattr(start_training, "latest_test", lambda *given: asked.append(given))
    await select(**{"inference.model": "mine", "inference.engine": "scripted"})
    answer = await told("rl_start_training", dry_run=True)
    assert [model for _, model, _ in asked] == ["mine"]
    assert answer["config_diff"]["model"] == [TINY, "mine"]


async def test_the_seeds_config_file_of_a_run_says_what_the_seeds_do(home: Path) -> None:
    """Spec 1.5: values that are null or empty are not written, but where that is what was asked
    for.
    """
    await select(**{"inference.engine": "scripted"})
    plain = await told("rl_start_training")
    written = yaml.safe_load(Path(plain["config_path"]).read_text())
    assert written["env"]["wandb_name"] == f"standin_env-{plain['run_id']}"
    assert (
        written["openai"][0].items()
        >= {"weight": 1.0, "num_requests_for_eval": 256, "timeout": 3600}.items()
    )
    assert written["openai"][0]["tokenizer_name"] == written["env"]["tokenizer_name"]
    folder = find_run(plain["run_id"]).path
    assert written["tinker"]["checkpoint_dir"] == str(folder / "service")
    assert None not in written["env"].values() and "" not in written["env"].values()
    named = await told("rl_start_training", changes={"wandb_name": "zed", "temperature": None})
    written = yaml.safe_load(Path(named["config_path"]).read_text())
    assert (written["env"]["wandb_name"], written["env"]["temperature"]) == ("zed", None)
    assert written["tinker"]["wandb_run_name"] == f"standin_env-{named['run_id']}"


async def test_a_repeated_key_is_the_first_run_also_when_another_could_not_be_started(
    home: Path,
) -> None:
    policy(home, caps={"max_concurrent_runs": 1})
    await select()
    edits = {"wandb_project": "mine", "tags": ["a"]}
    first = await told("rl_start_training", idempotency_key="the-key", changes=edits, name="zed")
    again = await told("rl_start_training", idempotency_key="the-key", changes={"total_steps": 3})
    assert again["config"] == first["config"]
    assert first["config"].items() >= {**edits, "name": "zed"}.items()
    assert again["run_id"] == first["run_id"] and again.keys() >= SEED_KEYS
    assert "nothing new was started" in again["message"]
    assert wait_for_end(find_run(first["run_id"])).idempotency_key == "the-key"
    ended = await told("rl_start_training", idempotency_key="the-key")
    assert (ended["run_id"], ended["status"]) == (first["run_id"], "completed")
    assert ended["next"] == f'rl_get_results("{first["run_id"]}")'
    assert runs() == [first["run_id"]]


async def test_what_was_checked_is_started_and_nothing_else(home: Path, tmp_path: Path) -> None:
    copy = tmp_path / "standin_copy.py"
    copy.write_text(Path(ENVIRONMENT).read_text())
    scripted = {"inference.engine": "scripted"}
    await told("rl_select_environment", name=str(copy), changes={**CHANGES, **scripted})
    plan = (await told("rl_start_training", dry_run=True))["plan"]
    assert plan == (await told("rl_start_training", dry_run=True))["plan"]

    async def changed() -> list[str]:
        answer = await told("rl_start_training", checked=plan)
        assert (answer["code"], answer["next"]) == (
            "plan_changed",
            "rl_start_training(dry_run=true)",
        )
        assert runs() == []
        return answer["changed"]

    await told("rl_edit_config", field="total_steps", value=3)
    assert await changed() == ["settings"]
    await told("rl_edit_config", field="total_steps", value=4)
    policy(home, caps={"max_hours": 5})
    assert "operator's policy" in await changed()
    (home / "policy.yaml").unlink()
    copy.write_text(f"{copy.read_text()}\n# another\n")
    assert await changed() == ["environment's file"]
    copy.write_text(Path(ENVIRONMENT).read_text())
    assert (await told("rl_start_training", checked=plan))["status"] == "starting"


async def test_a_plan_that_is_none_and_one_next_to_a_dry_run_are_refused(home: Path) -> None:
    await select()
    for arguments in ({"checked": "x"}, {"checked": "a-b-c-d", "dry_run": True}):
        answer = await told("rl_start_training", **arguments)
        assert (answer["code"], answer["field"]) == ("invalid_arguments", "checked")
    assert runs() == []


async def test_a_checkpoint_that_came_later_is_another_plan(home: Path) -> None:
    await select()
    first = find_run((await told("rl_start_training"))["run_id"])
    wait_for_end(first)
    go_on: dict[str, Any] = {"resume_from": first.run_id, "changes": {"total_steps": 6}}
    plan = (await told("rl_start_training", dry_run=True, **go_on))["plan"]
    newest = first.newest_checkpoint()
    assert newest is not None
    append_row(first.path / "checkpoints.jsonl", {**newest, "step": newest["step"] + 1})
    answer = await told("rl_start_training", checked=plan, **go_on)
    assert (answer["code"], answer["changed"]) == ("plan_changed", ["checkpoint"])
    assert f'resume_from="{first.run_id}"' in answer["next"] and "dry_run=true" in answer["next"]


async def test_a_refused_dry_run_names_the_setting_and_has_no_plan(home: Path) -> None:
    await select(**{"inference.model": "Qwen/Qwen3-8B"})
    answer = await told("rl_start_training", dry_run=True)
    assert answer["field"] == "inference.model" and "plan" not in answer


async def test_a_draft_begins_with_the_settings_of_a_run(home: Path) -> None:
    await select(difficulty=3)
    first = find_run((await told("rl_start_training", name="first"))["run_id"])
    wait_for_end(first)
    like: dict[str, Any] = {"name": ENVIRONMENT, "settings_of": first.run_id}
    again = await told("rl_select_environment", **like, changes={"seed": 5})
    assert again["differs"] == {"seed": [0, 5]}
    assert again["config"].items() >= {"difficulty": 3, "total_steps": 4, "seed": 5}.items()
    assert (await told("rl_start_training", dry_run=True))["config_diff"]["difficulty"] == [1, 3]
    second = find_run((await told("rl_start_training"))["run_id"])
    wait_for_end(second)
    assert second.state().name != "first", "two runs of one name cannot be told apart"


async def test_a_draft_like_a_run_that_went_on_from_another_has_the_settings_of_both(
    home: Path,
) -> None:
    await select(difficulty=3)
    first = find_run((await told("rl_start_training"))["run_id"])
    wait_for_end(first)
    gone_on = await told("rl_start_training", resume_from=first.run_id, changes={"total_steps": 6})
    wait_for_end(find_run(gone_on["run_id"]))
    again = await told("rl_select_environment", name=ENVIRONMENT, settings_of=gone_on["run_id"])
    assert "differs" not in again
    assert again["config"].items() >= {"difficulty": 3, "total_steps": 6}.items()
    assert "seed" not in again["config"], "what is a default was not edited"


async def test_settings_of_a_run_that_cannot_hold_any_more_are_told(home: Path) -> None:
    await select(difficulty=3)
    first = find_run((await told("rl_start_training"))["run_id"])
    wait_for_end(first)
    policy(home, lock={"trainer": {"total_steps": 2}})
    again = await told("rl_select_environment", name=ENVIRONMENT, settings_of=first.run_id)
    assert again["differs"] == {"total_steps": [4, 2]}
    other = await told("rl_select_environment", name="arithmetic", settings_of=first.run_id)
    assert "difficulty" in other["differs"] and other["environment"] == "arithmetic"


async def test_a_run_without_an_environment_has_no_settings_for_one(home: Path) -> None:
    run = make_run(kind="sft", environment="sft:rows")
    answer = await told("rl_select_environment", name="arithmetic", settings_of=run.run_id)
    assert (answer["code"], answer["field"]) == ("invalid_arguments", "settings_of")
    missing = await told("rl_select_environment", name="arithmetic", settings_of="ffff0000")
    assert missing["code"] == "run_not_found"


async def test_more_runs_at_once_than_the_policy_allows_are_refused_with_those_that_go_on(
    home: Path, waiting: None
) -> None:
    policy(home, caps={"max_concurrent_runs": 1})
    await select()
    first = find_run((await told("rl_start_training"))["run_id"])
    answer = await told("rl_start_training")
    assert (answer["code"], answer["active_runs"]) == ("policy_cap", [first.run_id])
    assert answer["next"].startswith(
        f'rl_check_status("{first.run_id}", wait_s=45, until="terminal")'
    )
    rehearsed = await told("rl_start_training", dry_run=True)
    assert check_of(rehearsed, "runs allowed")["ok"] is False
    wait(first, lambda state: state.status == "running")
    stop_run(first)
    wait_for_end(first)
    stop_run(find_run((await told("rl_start_training"))["run_id"]))


async def test_a_run_that_was_stopped_goes_on_with_changes_and_says_from_which_step(
    home: Path, waiting: None
) -> None:
    await select()
    old = find_run((await told("rl_start_training", name="mine"))["run_id"])
    wait(old, lambda state: state.status == "running" and state.step == 2)
    going = await told("rl_start_training", resume_from=old.run_id)
    following = f'rl_start_training(resume_from="{old.run_id}", stop_first=true)'
    assert (going["code"], going["next"]) == ("conflict", following)
    stop_run(old)
    rehearsed = await told(
        "rl_start_training", resume_from="mine", changes={"total_steps": 2}, dry_run=True
    )
    assert "nothing is left to do" in check_of(rehearsed, "checkpoint")["problem"]
    refused = await told("rl_start_training", resume_from=old.run_id, changes={"total_steps": 2})
    mended = 'changes={"total_steps":6})'
    assert refused["code"] == "invalid_config"
    assert refused["next"] == f'rl_start_training(resume_from="{old.run_id}", {mended}'
    assert rehearsed["next"] == f'rl_start_training(resume_from="mine", {mended}'
    append_row(old.path / "metrics.jsonl", {"step": 3, "src": "trainer", "reward/mean": 0.5})
    started = await told("rl_start_training", resume_from=old.run_id, changes={"total_steps": 6})
    assert (started["resumed_from"], started["step"]) == (old.run_id, 2)
    assert started["config"]["total_steps"] == 6
    assert started["message"] == (
        f"Training goes on after step 2 of run {old.run_id}, as a new run. "
        "Step 3 is done again: no checkpoint has what was learnt there. "
        "Its settings are that run's, but total_steps 4 -> 6; your draft plays no part."
    )
    new = find_run(started["run_id"])
    assert new.state().name != "mine", "two runs of one name could not be told apart"
    stop_run(new)


async def test_a_run_is_stopped_changed_and_gone_on_with_in_one_call(
    home: Path, waiting: None
) -> None:
    """What could not go on leaves the run alone."""
    await select()
    old = find_run((await told("rl_start_training"))["run_id"])
    wait(old, lambda state: state.status == "running" and state.step == 2)
    call = {"resume_from": old.run_id, "stop_first": True}
    for refused in (
        {**call, "changes": {"total_steps": 2}},
        {**call, "changes": {"lora_rank": 8}},
        {**call, "changes": {"no_such_field": 8}},
        {**call, "changes": {"rewards": [{"name": "one", "model": "/no/such/folder"}]}},
        {**call, "resume_from": f"{old.run_id}@1"},
        {**call, "dry_run": True},
        {"stop_first": True},
    ):
        assert "error" in await told("rl_start_training", **refused)
        assert old.state().status == "running"
    started = await told("rl_start_training", **call, changes={"total_steps": 6})
    assert (started["resumed_from"], started["step"]) == (old.run_id, 2)
    assert started["config"]["total_steps"] == 6 and old.state().status == "stopped"
    again = await told("rl_start_training", **call, changes={"total_steps": 7})
    assert again["resumed_from"] == old.run_id, "a run that has ended is gone on with as well"
    for one in (started, again):
        stop_run(find_run(one["run_id"]))


async def test_a_run_goes_on_from_the_checkpoint_of_a_step(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await select()
    old = find_run((await told("rl_start_training"))["run_id"])
    wait_for_end(old)
    missing = await told("rl_start_training", resume_from=f"{old.run_id}@3")
    assert (missing["code"], missing["steps"]) == ("not_found", [2, 4])
    assert missing["next"] in {
        f'rl_start_training(resume_from="{old.run_id}@{step}")' for step in (2, 4)
    }
    asked = {"resume_from": f"{old.run_id}@9", "changes": {"total_steps": 12}, "name": "longer"}
    for more in ({}, {"dry_run": True}, {"stop_first": True}):
        missing = await told("rl_start_training", **asked, **more)
        assert missing["next"].startswith(f'rl_start_training(resume_from="{old.run_id}@4", ')
        assert 'changes={"total_steps":12}, name="longer"' in missing["next"]
    started = await told("rl_start_training", resume_from=f"{old.run_id}@2")
    assert (started["resumed_from"], started["step"]) == (old.run_id, 2)
    assert "after step 2" in started["message"]
    assert "Steps 3 to 4 are done again." in started["message"]
    new = find_run(started["run_id"])
    assert [row["step"] for row in new.checkpoints()] == [
        row["step"] for row in old.checkpoints() if row["step"] <= 2
    ]
    assert wait_for_end(new).status == "completed"
    assert new.state().resume_point["name"] == "step-000002"
    monkeypatch.setattr(
        start, "start_run", functools.partial(start.start_run, supervisor=STANDIN_SUPERVISOR)
    )
    train = functools.partial(CliRunner().invoke, app, catch_exceptions=False)
    typed = train(["train", "--resume", f"{old.run_id}@2", "--detach"])
    assert typed.exit_code == 0
    assert list_runs()[0].state().resume_point["step"] == 2


async def test_a_run_without_a_checkpoint_starts_anew_from_what_it_was_started_from(
    home: Path, tmp_path: Path
) -> None:
    """From its file, where its name alone leads nowhere."""
    file = tmp_path / "mine.py"
    file.write_text("")
    run = make_run(status="failed", environment="mine", environment_file=str(file))
    with pytest.raises(CheckpointMissing) as missing:
        checkpoint_of(run, None)
    call = next_call("rl_start_training", missing.value)
    assert for_agents(call) == f'rl_start_training(environment="{file}")'


async def test_an_environment_beside_resume_from_is_refused_with_the_call_that_is_meant(
    home: Path,
) -> None:
    answer = await told("rl_start_training", environment=ENVIRONMENT, resume_from="3fa9c1d2")
    assert (answer["field"], answer["next"]) == (
        "environment",
        'rl_start_training(resume_from="3fa9c1d2")',
    )


async def test_the_policy_that_held_is_written_into_the_run(home: Path) -> None:
    policy(home, caps={"max_steps": 100}, lock={"trainer": {"lora_rank": 4}}, name="careful")
    await select()
    run = find_run((await told("rl_start_training"))["run_id"])
    told_policy = json.loads((run.path / "policy.json").read_text())
    assert (told_policy["name"], told_policy["caps"]["max_steps"]) == ("careful", 100)
    assert run.settings().trainer.lora_rank == 4
    assert run.state().policy == "careful"


async def test_logs_and_config_are_linked_under_the_names_of_the_seeds(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hermes = tmp_path / "hermes"
    monkeypatch.setenv("HERMES_HOME", str(hermes))
    await select()
    run = find_run((await told("rl_start_training"))["run_id"])
    for folder in (home / "logs", hermes / "logs" / "rl_training"):
        for role in ("api", "trainer", "env"):
            assert (folder / f"{role}_{run.run_id}.log").resolve() == run.log(role).resolve()
    assert (
        yaml.safe_load((home / "configs" / f"run_{run.run_id}.yaml").read_text())["env"][
            "total_steps"
        ]
        == 4
    )


async def test_a_model_on_the_shelf_is_named_and_its_folder_is_kept(home: Path) -> None:
    folder = home / "models" / "Qwen" / "Qwen3-0.6B"
    folder.mkdir(parents=True)
    builtin = Path(__file__).parents[2] / "src" / "halteres" / "models" / "tiny"
    for file in builtin.iterdir():
        (folder / file.name).symlink_to(file)
    await select(**{"inference.model": "Qwen/Qwen3-0.6B"})
    run: RunDirectory = find_run((await told("rl_start_training"))["run_id"])
    assert run.state().base_model == str(folder)
    assert run.settings().inference.model == str(folder), "the name means this folder from now on"
