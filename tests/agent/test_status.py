"""rl_check_status: what a look at a run tells, in every state of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halteres.agent.call import call
from halteres.agent.tool import Caller, ShownAlerts
from halteres.config.operator_policy import HERMES_COMPAT
from halteres.next_step import NextStep, Remedy
from halteres.observe.metrics import append_row
from halteres.observe.sinks import Reports, SinkReport
from halteres.runs.directory import RunDirectory
from halteres.runs.state import Failure

from .run_fixtures import (
    READ_BEST,
    RUN,
    SEED_STATUS,
    STOP,
    add_alert,
    add_evaluation,
    add_step,
    change,
    end_alert,
    make_run,
    replied,
    short_home,
    supervised,
    tokens,
    told,
)

BUDGET = 350


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    home = short_home(tmp_path)
    monkeypatch.setenv("HALTERES_HOME", str(home))
    yield home
    home.unlink()


@pytest.fixture
def running() -> Iterator[RunDirectory]:
    run = make_run(steps=12)
    add_evaluation(run, 0, 0.3)
    add_evaluation(run, 10, 0.39)
    with supervised(run):
        yield run


async def test_a_running_run_tells_state_figures_trend_and_time_left(running: RunDirectory) -> None:
    answer = await told("rl_check_status", run_id=RUN)
    assert answer.keys() >= SEED_STATUS
    assert (answer["status"], answer["state"], answer["health"]) == (
        "running",
        "running",
        "healthy",
    )
    assert (answer["step"], answer["total_steps"], answer["alerts"]) == (12, 50, [])
    assert answer["metrics"] == {
        "step": 12,
        "reward_mean": 0.3,
        "percent_correct": 0.32,
        "eval_percent_correct": 0.39,
        "eval_step": 10,
        "loss_per_token": 0.0131,
        "kl": 0.00213,
    }
    assert answer["trend"] == {
        "reward_mean": "▁▂▂▃▄▄▅▅▆▇▇█ 0.19->0.3",
        "groups_without_signal": 0.25,
    }
    assert answer["eta_minutes"] == [9.5, 9.5]
    assert answer["processes"] == dict.fromkeys(("api", "trainer", "env"), "running")
    assert answer["wandb_project"] == "atropos-tinker"
    assert answer["wandb_run_name"] == f"gsm8k-{RUN}"
    assert answer["logs"] == {}, (
        "rl_start_training has told them; they are worth a look where something ails"
    )
    assert answer["running_time_minutes"] == pytest.approx(4, abs=0.1)
    assert answer["suggested_wait_s"] == 50
    assert answer["next"] == f'rl_check_status("{RUN}", wait_s=50, until="eval")'
    assert "woke" not in answer and "error" not in answer
    assert tokens(answer) <= BUDGET


async def test_the_time_left_is_reckoned_without_steps_that_shared_the_engine_with_an_evaluation() -> (
    None
):
    """Ten steps of 15 s, then five of 60 s during an evaluation."""
    run, now = make_run(step=15), time.time()
    for step in range(1, 11):
        add_step(run, step, t=now - 300 - 15 * (11 - step))
    for step in range(11, 16):
        add_step(run, step, step_s=60.0, t=now - 60 * (15 - step))
    append_row(run.path / "events.jsonl", {"type": "eval", "step": 10, "t": now, "took_s": 290.0})
    add_evaluation(run, 10)
    with supervised(run):
        answer = await told("rl_check_status", run_id=RUN)
    left = (35 * 15 + 290) / 60
    assert answer["eta_minutes"] == [round(left), round(left)]


async def test_what_drifts_is_told_beside_the_divergence_where_it_is_measured(
    running: RunDirectory,
) -> None:
    add_step(running, 13, **{"policy/kl_reference": 0.02, "policy/implicit_reward_gap": 0.3})
    row = {"step": 13, "src": "eval", "eval/percent_correct": 0.4, "eval/panel/share_of_gain": 0.7}
    append_row(running.path / "metrics.jsonl", row)
    figures = (await told("rl_check_status", run_id=RUN))["metrics"]
    assert (figures["kl_reference"], figures["implicit_reward_gap"], figures["share_of_gain"]) == (
        0.02,
        0.3,
        0.7,
    )


async def test_steps_that_moved_no_weight_are_told_beside_the_policy_version(
    running: RunDirectory,
) -> None:
    add_step(running, 13, **{"train/skipped": 1.0, "policy/version": 11.0})
    figures = (await told("rl_check_status", run_id=RUN))["metrics"]
    assert (figures["step"], figures["skipped_steps"], figures["policy_version"]) == (13, 1, 11)
    (note,) = [
        note
        for note in (await told("rl_get_results", run_id=RUN))["notes"]
        if "moved no weight" in note
    ]
    assert note.startswith("1 of 13 steps") and "policy version is 11" in note


async def test_weights_that_have_hardly_moved_are_said(running: RunDirectory) -> None:
    add_step(running, 13, **{"policy/update_norm": 1.2e-5})
    told_so = (await told("rl_check_status", run_id=RUN))["weights"]
    assert "hardly moved" in told_so and "1.2e-05" in told_so and "learning_rate" in told_so
    assert told_so in (await told("rl_get_results", run_id=RUN))["notes"]
    add_step(running, 14, **{"policy/update_norm": 2e-2})
    assert "weights" not in await told("rl_check_status", run_id=RUN)


async def test_a_loss_is_told_per_token_with_its_meaning(running: RunDirectory) -> None:
    answer = await told("rl_get_results", run_id=RUN)
    assert answer["final_metrics"]["train/loss_per_token"] == 0.0131
    assert any(
        note.startswith("train/loss_per_token: minus the mean advantage")
        for note in answer["notes"]
    )


async def test_a_starting_run_says_what_it_waits_for_and_has_null_for_figures() -> None:
    processes = {
        role: {"pid": None, "exit": None, "state": "not started"}
        for role in ("api", "trainer", "env")
    }
    with supervised(make_run(), status="starting", phase="api", processes=processes):
        answer = await told("rl_check_status", run_id=RUN)
    assert answer.keys() >= SEED_STATUS
    assert (answer["status"], answer["state"], answer["phase"]) == ("starting", "running", "api")
    assert answer["processes"] == dict.fromkeys(("api", "trainer", "env"), "not started")
    assert answer["metrics"].pop("step") == 0
    assert set(answer["metrics"].values()) == {None}
    assert answer["eta_minutes"] is None
    assert answer["next"] == f'rl_check_status("{RUN}", wait_s=20, until="running")'
    assert tokens(answer) <= BUDGET


async def test_a_failed_run_tells_error_exit_log_checkpoint_and_the_call_that_mends_it() -> None:
    lower = "Lower max_token_length to 768 or batch_size to 32"
    run = failed(
        code="gpu_oom",
        error=(
            f"Trainer ran out of GPU memory. {lower}, then go on from step 5: halteres train "
            f"--resume {RUN}"
        ),
        failure=Failure(what="Trainer ran out of GPU memory at step 7.", first=lower),
    )
    run.log("trainer").write_text(
        "".join(f"{n:02} {'torch.OutOfMemoryError: CUDA out of memory. ' * 4}\n" for n in range(20))
    )
    answer = await told("rl_check_status", run_id=RUN)
    assert answer.keys() >= SEED_STATUS
    assert (answer["status"], answer["state"], answer["health"]) == ("failed", "crashed", "failed")
    assert (answer["phase"], answer["step"], answer["code"]) == ("trainer", 7, "gpu_oom")
    assert answer["error"].startswith(
        "Trainer ran out of GPU memory at step 7. Lower max_token_length to 768 or"
    )
    assert "halteres train" not in answer["error"] and answer["error"].endswith(
        "batch_size to 32, then resume."
    )
    assert answer["exit"] == {"process": "trainer", "code": 1}
    assert [line[:2] for line in answer["log_tail"]] == ["19"], "fewer lines rather than cut ones"
    assert answer["last_checkpoint"] == {"step": 5, "path": f"tinker://{RUN}/weights/step_5"}
    assert answer["next"] == f'rl_start_training(resume_from="{RUN}", changes={{"batch_size":32}})'
    assert answer["suggested_wait_s"] == 0
    assert tokens(answer) <= BUDGET


def failed(**changes: Any) -> RunDirectory:
    ended: dict[str, Any] = {
        "status": "failed",
        "phase": "trainer",
        "ended_at": time.time(),
        "exit": {"process": "trainer", "code": 1},
        "resumable": True,
        "last_checkpoint": {
            "name": "step-5",
            "step": 5,
            "state_path": f"tinker://{RUN}/weights/step_5",
        },
        "processes": {
            "service": {"pid": 1, "exit": 0, "state": "exited (0)"},
            "api": {"pid": 2, "exit": -9, "state": "exited (-9)"},
            "trainer": {"pid": 3, "exit": 1, "state": "exited (1)"},
            "env": {"pid": 4, "exit": 0, "state": "exited (0)"},
        },
    }
    return make_run(steps=7, **{**ended, **changes})


async def test_how_each_process_ended_is_told_in_the_seeds_words_first() -> None:
    failed(code="process_exited", error="Trainer exited with code 1 at step 7.")
    answer = await told("rl_check_status", run_id=RUN)
    assert list(answer["processes"])[:3] == ["api", "trainer", "env"]
    assert answer["processes"]["trainer"] == "exited (1)"
    assert answer["processes"]["api"] == "ended by SIGKILL"


async def test_a_reward_training_that_ended_early_goes_on_as_a_reward_training() -> None:
    failed(kind="reward", status="stopped", exit=None)
    answer = await told("rl_check_status", run_id=RUN)
    assert (
        answer["next"] == f'rl_get_results("{RUN}") or rl_train_reward_model(resume_from="{RUN}")'
    )


@pytest.mark.parametrize(
    ("changes", "following"),
    [
        ({"code": "process_exited"}, f'rl_start_training(resume_from="{RUN}")'),
        (
            {"code": "nan_loss"},
            f'rl_start_training(resume_from="{RUN}", changes={{"learning_rate":2e-05}})',
        ),
        (
            {"code": "disk_full", "exit": None},
            f'make room, then rl_start_training(resume_from="{RUN}")',
        ),
        (
            {"code": "process_exited", "exit": {"process": "env", "code": 3}},
            f'rl_get_logs("{RUN}", role="env") then rl_start_training(resume_from="{RUN}")',
        ),
        (
            {"code": "gpu_oom", "resumable": False},
            'rl_start_training(environment="gsm8k", changes={"batch_size":32})',
        ),
    ],
)
async def test_every_failure_has_the_call_that_goes_on_from_it(
    changes: dict[str, Any], following: str
) -> None:
    failed(error="It failed.", **changes)
    assert (await told("rl_check_status", run_id=RUN))["next"] == following


async def test_a_run_without_a_checkpoint_is_started_again_with_what_was_set_by_hand() -> None:
    run = failed(code="process_exited", error="It failed.", resumable=False, last_checkpoint=None)
    (run.path / "config.resolved.json").write_text(
        '{"trainer.lora_rank": {"value": 8, "source": "edit"}, "env.group_size": {"value": 8, '
        '"source": "config_init"},'
        ' "run.name": {"value": "x", "source": "edit"}}'
    )
    answer = await told("rl_check_status", run_id=RUN)
    assert answer["last_checkpoint"] is None and not answer["resumable"]
    assert (
        answer["next"] == 'rl_start_training(environment="gsm8k", changes={"trainer.lora_rank":8})'
    )


async def test_a_run_whose_supervisor_is_gone_has_failed_at_once_and_can_be_resumed() -> None:
    run = make_run(
        steps=3, status="running", supervisor={"pid": 2**22 + 1, "start_time": 1, "boot_id": "x"}
    )
    append_row(
        run.path / "checkpoints.jsonl",
        {"name": "s", "step": 2, "state_path": "tinker://x/weights/s"},
    )
    answer = await told("rl_check_status", run_id=RUN)
    assert (answer["status"], answer["code"]) == ("failed", "supervisor_lost")
    assert answer["error"].endswith(" `next` goes on from step 2.")
    assert answer["next"] == f'rl_start_training(resume_from="{RUN}")'
    assert answer["last_checkpoint"] == {"step": 2, "path": "tinker://x/weights/s"}


async def test_a_completed_run_stops_its_clock_and_leads_to_its_results() -> None:
    now = time.time()
    make_run(steps=50, created_at=now - 4000, ended_at=now - 3400)
    answer = await told("rl_check_status", run_id=RUN)
    assert (answer["state"], answer["health"]) == ("finished", "completed")
    assert answer["running_time_minutes"] == 10.0
    assert answer["next"] == f'rl_get_results("{RUN}")'
    assert tokens(answer) <= BUDGET


@pytest.mark.parametrize(
    ("resumable", "also"), [(True, f' or rl_start_training(resume_from="{RUN}")'), (False, "")]
)
async def test_a_stopped_run_may_go_on_where_it_has_a_checkpoint(
    resumable: bool, also: str
) -> None:
    make_run(steps=5, status="stopped", resumable=resumable, ended_at=time.time())
    answer = await told("rl_check_status", run_id=RUN)
    assert answer["state"] == "finished"
    assert answer["next"] == f'rl_get_results("{RUN}"){also}'


async def test_a_run_that_a_cap_ended_says_so_and_is_not_offered_to_go_on() -> None:
    note = "The policy's max_steps of 5 are used up."
    make_run(steps=5, status="stopped", resumable=True, code="policy_cap", note=note)
    answer = await told("rl_check_status", run_id=RUN)
    assert (answer["code"], answer["note"]) == ("policy_cap", note)
    assert answer["next"] == f'rl_get_results("{RUN}")'


async def test_of_a_log_the_last_line_is_told_first_and_all_within_the_budget() -> None:
    run = failed(
        code="process_exited",
        error=f"Trainer exited with code 1 at step 7. {'No more. ' * 6}Its log: /x/trainer.log. "
        f"Go on from step 5: halteres train --resume {RUN}",
        failure=Failure(
            what="Trainer exited with code 1 at step 7.",
            why=("No more. " * 6).strip(),
            log="/x/trainer.log",
        ),
    )
    lines = [
        f"2026-07-01 12:00:0{n},123 INFO halteres.training.loop: Step {n}: reward 0.250, 2.10 s."
        for n in range(9)
    ]
    last = "error: The training service did not answer forward_backward within 600 s."
    run.log("trainer").write_text("\n\n".join([*lines, last, "", ""]))
    add_alert(run)
    answer = await told("rl_check_status", run_id=RUN)
    assert answer["log_tail"][-2:] == ["Step 8: reward 0.250, 2.10 s.", last]
    assert all(line.endswith(" s.") for line in answer["log_tail"])
    assert "Its log" not in answer["error"]
    assert answer["error"].endswith("No more. `next` goes on from step 5.")
    assert answer["alerts"] == []
    assert tokens(answer) <= BUDGET
    change(run, failure=Failure(what="x" * 5000))
    assert tokens(await told("rl_check_status", run_id=RUN)) <= BUDGET + 40


async def test_a_line_that_tells_of_trouble_is_told_before_later_ones() -> None:
    run = failed(code="process_exited", error="It failed.")
    warning = "2026-07-01 12:00:00,123 WARNING halteres.training.loop: The loss is not finite."
    run.log("trainer").write_text(
        "\n".join([warning, *(f"Step {number}. {'.' * 150}" for number in range(9))])
    )
    log_tail = (await told("rl_check_status", run_id=RUN))["log_tail"]
    assert log_tail[0] == "WARNING: The loss is not finite."
    assert log_tail[-1].startswith("Step 8.")


async def test_the_way_on_is_told_as_it_is_now_not_as_it_was_when_a_process_failed() -> None:
    before = (
        "Trainer exited with code 1 at step 7. There is no checkpoint to go on from: start "
        "the run again."
    )
    run = failed(
        code="process_exited",
        error=before,
        failure=Failure(what="Trainer exited with code 1 at step 7."),
    )
    assert (await told("rl_check_status", run_id=RUN))["error"].endswith(
        " `next` goes on from step 5."
    )
    change(run, resumable=False, last_checkpoint=None)
    answer = await told("rl_check_status", run_id=RUN)
    assert answer["error"].endswith("There is no checkpoint to go on from: `next` starts again.")
    assert answer["next"] == 'rl_start_training(environment="gsm8k")'


async def test_the_error_of_a_run_of_an_older_version_is_told_as_it_stands() -> None:
    failed(
        code="process_exited",
        error="Trainer exited with code 1 at step 7. Its log: /x/trainer.log.",
    )
    answer = await told("rl_check_status", run_id=RUN)
    assert answer["error"] == "Trainer exited with code 1 at step 7. Its log: /x/trainer.log."


async def test_a_run_that_failed_after_its_last_step_is_resumed_to_its_end() -> None:
    """As where the final weights cannot be copied: all steps are done, and no process is to
    blame.
    """
    processes = {
        "trainer": {"pid": 3, "exit": 0, "state": "exited (0)"},
        "env": {"pid": 4, "exit": -15},
    }
    final = {"name": "final", "step": 50, "state_path": f"tinker://{RUN}/weights/final"}
    facts: dict[str, Any] = {
        "exit": None,
        "resumable": True,
        "last_checkpoint": final,
        "processes": processes,
    }
    run = failed(
        code="not_found",
        error="The final weights could not be copied.",
        phase="evaluation",
        **facts,
    )
    for role, code in (("trainer", 0), ("env", -15), ("service", 0)):
        append_row(run.path / "events.jsonl", {"type": "process_exit", "role": role, "code": code})
    answer = await told("rl_check_status", run_id=RUN)
    assert (answer["exit"], answer["resumable"]) == (None, True)
    assert answer["next"] == f'rl_start_training(resume_from="{RUN}")'


HACKED = Remedy(
    (STOP, READ_BEST),
    "mend the scorer, then",
    (NextStep("rl_start_training", {"environment": "gsm8k"}),),
)


async def test_an_alert_in_force_comes_before_waiting_and_before_going_on(
    running: RunDirectory,
) -> None:
    add_alert(running, "reward_hacking", 9, remedy=HACKED)
    resume = NextStep("rl_start_training", {"resume_from": RUN})
    add_alert(running, "truncation", 12, remedy=Remedy((STOP, resume)))
    assert (await told("rl_check_status", run_id=RUN))["next"] == f'rl_stop_training("{RUN}")'
    change(running, status="stopped", resumable=True)
    for tool in ("rl_check_status", "rl_stop_training"):
        following = (await told(tool, run_id=RUN))["next"]
        assert following == f'rl_get_results("{RUN}") or rl_get_rollouts("{RUN}", which="best")'


async def test_what_was_learnt_by_hacking_is_not_forgotten_and_what_only_costs_time_may_be_waited_for(
    running: RunDirectory,
) -> None:
    add_alert(running, "env_idle", 12, remedy=Remedy((STOP,)))
    assert "until" in (await told("rl_check_status", run_id=RUN))["next"]
    add_alert(running, "reward_hacking", 3, remedy=HACKED)
    for step in range(13, 40):
        add_step(running, step)
    assert (await told("rl_check_status", run_id=RUN))["next"] == f'rl_stop_training("{RUN}")'


async def test_a_stopped_run_goes_on_as_its_alert_asks_for(running: RunDirectory) -> None:
    mended = NextStep(
        "rl_start_training", {"resume_from": RUN, "changes": {"env.max_new_tokens": 128}}
    )
    add_alert(running, "truncation", 12, remedy=Remedy((STOP, mended), "or ask for short answers."))
    change(running, status="stopped", resumable=True)
    assert (await told("rl_check_status", run_id=RUN))[
        "next"
    ] == f'rl_get_results("{RUN}") or {mended.call}'
    results = NextStep("rl_get_results", {"run_id": RUN})
    solved = Remedy((STOP, results), "only harder tasks would teach more.")
    add_alert(running, "truncation", 12, remedy=solved)
    assert (await told("rl_check_status", run_id=RUN))["next"] == f'rl_get_results("{RUN}")'


async def test_the_last_evaluation_is_part_of_the_time_left_and_processes_that_ended_for_it_are_no_failure(
    running: RunDirectory,
) -> None:
    append_row(running.path / "events.jsonl", {"type": "eval", "step": 10, "took_s": 24.0})
    assert (await told("rl_check_status", run_id=RUN))["eta_minutes"] == [9.9, 9.9]
    ended = {"env": {"pid": 3, "exit": -15, "state": "exited (-15)"}}
    change(running, phase="evaluation", processes=ended)
    assert (await told("rl_check_status", run_id=RUN))["health"] == "healthy"
    add_evaluation(running, 50)
    assert (await told("rl_check_status", run_id=RUN))["eta_minutes"] == [9.5, 9.5]


async def test_whoever_waits_for_the_end_waits_as_long_as_may_be(running: RunDirectory) -> None:
    for step in range(13, 50):
        add_step(running, step, step_s=0.5)
    for status in ("stopping", "running"):
        change(running, status=status)
        following = (await told("rl_check_status", run_id=RUN))["next"]
        assert following == f'rl_check_status("{RUN}", wait_s=50, until="terminal")'


async def test_alerts_are_told_once_per_rule_newest_first_with_their_remedy(
    running: RunDirectory,
) -> None:
    for step in (2, 9):
        add_alert(running, "truncation", step, evidence="x" * 500)
    for number, rule in enumerate(("a", "b", "c")):
        add_alert(running, rule, 3 + number)
    answer = await told("rl_check_status", run_id=RUN)
    assert answer["health"] == "alert"
    assert [(alert["rule"], alert["step"]) for alert in answer["alerts"]] == [
        ("truncation", 9),
        ("c", 5),
    ]
    assert answer["alerts"][0].keys() == {"rule", "step", "evidence", "remedy"}
    assert answer["alerts"][0]["evidence"].endswith("...")
    assert answer["alerts"][0]["remedy"] == "rl_edit_config('max_token_length', 1536)"
    assert tokens(answer) <= BUDGET


async def test_an_alert_is_whole_when_it_is_raised_and_a_name_while_it_lasts(
    running: RunDirectory,
) -> None:
    one, another = (Caller(shown_alerts=ShownAlerts()) for _ in range(2))

    whole, name = {"rule", "step", "evidence", "remedy"}, {"rule", "since_step"}

    async def keys(caller: Caller) -> list[set[str]]:
        answer = (await call("rl_check_status", {"run_id": RUN}, caller)).body
        assert answer["health"] == "alert"
        return [set(row) for row in answer["alerts"]]

    add_alert(running, "truncation", 7)
    assert [await keys(one), await keys(one)] == [[whole], [name]]
    assert await keys(another) == [whole], "what one was shown, the other has not seen"
    add_alert(running, "entropy_collapse", 8)
    assert await keys(one) == [whole, name], "a new one is whole beside those that last"
    end_alert(running, "truncation", 9)
    add_alert(running, "truncation", 11)
    answer = (await call("rl_check_status", {"run_id": RUN}, one)).body
    assert [set(row) for row in answer["alerts"]] == [whole, name], "it was raised again"
    assert answer["alerts"][1] == {"rule": "entropy_collapse", "since_step": 8}
    nobody = Caller()
    assert [await keys(nobody), await keys(nobody)] == [[whole, whole]] * 2


async def test_an_alert_for_which_there_was_no_room_is_whole_in_a_later_look(
    running: RunDirectory,
) -> None:
    caller = Caller(shown_alerts=ShownAlerts())
    for number, rule in enumerate(("a", "b", "c", "d")):
        add_alert(running, rule, 3 + number, evidence="x" * 500)
    whole = list[str]()
    for _ in range(4):
        answer = (await call("rl_check_status", {"run_id": RUN}, caller)).body
        whole += [row["rule"] for row in answer["alerts"] if "evidence" in row]
    assert whole == ["d", "c", "b", "a"]


async def test_a_remedy_is_told_whole_for_it_is_a_call(running: RunDirectory) -> None:
    remedy = f'rl_start_training(changes={{"name":"{"x" * 600}"}})'
    add_alert(running, remedy=remedy)
    (alert,) = (await told("rl_check_status", run_id=RUN))["alerts"]
    assert alert["remedy"] == remedy


async def test_an_alert_of_long_ago_is_told_and_stands_for_nothing(running: RunDirectory) -> None:
    add_alert(running, step=12)
    assert (await told("rl_check_status", run_id=RUN))["health"] == "alert"
    for step in range(13, 34):
        add_step(running, step)
    answer = await told("rl_check_status", run_id=RUN)
    assert (answer["health"], len(answer["alerts"])) == ("healthy", 1)


async def test_what_will_not_get_well_by_itself_is_failing(running: RunDirectory) -> None:
    add_alert(running, "nan_loss", 12)
    assert (await told("rl_check_status", run_id=RUN))["health"] == "failing"


async def test_a_run_without_a_first_batch_whose_calls_are_refused_is_failing_in_the_servers_words() -> (
    None
):
    run = make_run()
    words = "`stop` is a list of texts. It was 7. Send them as texts."
    evidence = (
        "The inference server refused 1738 calls in a row (HTTP 400, "
        f"/v1/chat/completions): {words}"
    )
    remedy = Remedy(
        (STOP, NextStep("rl_start_training", {"environment": "gsm8k"})), "once it is changed."
    )
    with supervised(run):
        add_alert(run, "calls_refused", 0, evidence=evidence, remedy=remedy)
        add_alert(run, "no_reward_variance", 1)
        answer = await told("rl_check_status", run_id=RUN)
        assert (answer["health"], answer["alerts"][0]["evidence"]) == ("failing", evidence)
        assert answer["next"] == 'rl_stop_training("3fa9c1d2")'
        assert tokens(answer) <= BUDGET
        add_step(run, 1)
        answer = await told("rl_check_status", run_id=RUN)
        assert answer["health"] == "alert", "a step was done since"


async def test_an_evaluation_that_failed_is_told_with_why_until_one_succeeds(
    running: RunDirectory,
) -> None:
    failed = {"type": "eval_failed", "error": "The evaluation exited with code 1. KeyError: 'gold'"}
    append_row(running.path / "events.jsonl", {**failed, "step": 10})
    last = (await told("rl_check_status", run_id=RUN)).get("eval_failed")
    assert not last, "there is a figure of step 10"
    append_row(running.path / "events.jsonl", {**failed, "step": 20})
    answer = await told("rl_check_status", run_id=RUN)
    assert answer["eval_failed"] == {"step": 20, "why": failed["error"]}
    assert tokens(answer) <= BUDGET
    results = await told("rl_get_results", run_id=RUN)
    assert [it["step"] for it in results["eval_failed"]] == [20, 10]
    add_evaluation(running, 30)
    assert "eval_failed" not in await told("rl_check_status", run_id=RUN)


async def test_a_run_whose_environment_has_no_evaluation_says_that_there_will_be_no_held_out_figure() -> (
    None
):
    run, says = make_run(), "There will be no held-out figure. Its class has no evaluate."
    with supervised(run):
        append_row(run.path / "events.jsonl", {"type": "no_evaluation", "step": 0, "error": says})
        answer = await told("rl_check_status", run_id=RUN)
        assert (answer["no_evaluation"], answer["health"]) == (says, "healthy")
        assert says in (await told("rl_get_results", run_id=RUN))["notes"]


async def test_a_run_that_stood_still_and_goes_on_is_healthy(running: RunDirectory) -> None:
    add_alert(running, "stalled", 12)
    assert (await told("rl_check_status", run_id=RUN))["health"] == "failing"
    add_step(running, 13)
    assert (await told("rl_check_status", run_id=RUN))["health"] == "healthy"


async def test_a_supervisor_that_shows_no_sign_of_life_is_an_alert(running: RunDirectory) -> None:
    os.utime(running.path / "heartbeat", (time.time() - 60, time.time() - 60))
    answer = await told("rl_check_status", run_id=RUN)
    assert (answer["health"], answer["alerts"][0]["rule"]) == ("failing", "stalled")
    os.utime(running.path / "heartbeat")
    assert (await told("rl_check_status", run_id=RUN))["health"] == "healthy"


async def test_a_process_that_has_just_died_is_failing(running: RunDirectory) -> None:
    change(running, processes={"env": {"pid": 3, "exit": -9, "state": "exited (-9)"}})
    assert (await told("rl_check_status", run_id=RUN))["health"] == "failing"


async def test_the_wait_that_is_suggested_grows_with_the_time_of_a_step_up_to_fifty_seconds() -> (
    None
):
    waits = []
    for number, step_s in enumerate((0.01, 1.2, 3.0, 400.0)):
        with supervised(make_run(f"0000000{number}", steps=3, step_s=step_s)):
            waits.append(
                (await told("rl_check_status", run_id=f"0000000{number}"))["suggested_wait_s"]
            )
    assert waits == [5, 12, 30, 50]


async def test_near_its_end_a_run_is_waited_for(running: RunDirectory) -> None:
    for step in range(13, 49):
        add_step(running, step)
    answer = await told("rl_check_status", run_id=RUN)
    assert answer["next"] == f'rl_check_status("{RUN}", wait_s=50, until="terminal")'


async def test_the_project_is_the_runs_own_where_it_has_one(
    running: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    assert (await told("rl_check_status", run_id=RUN))["wandb_project"] == "ours"
    (running.path / "settings.json").write_text('{"run": {"wandb_project": "mine"}}')
    assert (await told("rl_check_status", run_id=RUN))["wandb_project"] == "mine"


async def test_where_metrics_are_forwarded_to_is_told_and_what_is_wrong_with_a_sink(
    running: RunDirectory,
) -> None:
    reports = Reports(running.path)
    reports.put(
        "wandb", SinkReport(state="online", url="https://wandb.ai/team/sums/runs/1", folder="/w")
    )
    answer = await told("rl_check_status", run_id=RUN)
    assert (answer["wandb"], answer["wandb_url"]) == ("online", "https://wandb.ai/team/sums/runs/1")
    assert "sinks" not in answer and "wandb_error" not in answer
    assert tokens(answer) <= BUDGET
    reports.failed("wandb", "The server is gone.")
    reports.put(
        "trackio",
        SinkReport(state="failed", note="It is not installed. pip install 'halteres[trackio]'"),
    )
    answer = await told("rl_check_status", run_id=RUN)
    assert (answer["wandb"], answer["wandb_url"]) == ("failed", "https://wandb.ai/team/sums/runs/1")
    assert answer["wandb_error"] == "The server is gone. Upload what it kept: wandb sync /w"
    assert answer["sinks"] == {
        "trackio": "failed: It is not installed. pip install 'halteres[trackio]'"
    }
    assert (answer["health"], answer["alerts"]) == ("healthy", []), "training is as well as it was"
    assert answer["next"].startswith("rl_check_status(")


async def test_without_an_id_the_only_active_run_is_meant(running: RunDirectory) -> None:
    make_run("0000ffff")
    assert (await told("rl_check_status"))["run_id"] == RUN
    with supervised(make_run("0000eeee"), status="starting"):
        reply = await replied("rl_check_status")
    assert (reply.body["code"], reply.failed) == ("run_ambiguous", True)
    assert set(reply.body["active_runs"]) == {RUN, "0000eeee"}
    assert f"{RUN} (gsm8k, running)" in reply.body["error"]


async def test_without_an_active_run_the_newest_are_listed() -> None:
    empty = await replied("rl_check_status")
    assert (empty.body["code"], empty.body["next"]) == ("run_not_found", "rl_list_environments()")
    make_run("0000ffff", created_at=1.0)
    make_run(RUN, created_at=2.0)
    reply = await replied("rl_check_status")
    assert (reply.body["code"], reply.body["active_runs"], reply.status) == (
        "run_not_found",
        [],
        404,
    )
    assert f"{RUN} (gsm8k, completed), 0000ffff (gsm8k, completed)" in reply.body["error"]
    assert reply.body["next"] == f'rl_check_status(run_id="{RUN}")'


async def test_an_unknown_run_offers_the_nearest_in_the_specs_words(running: RunDirectory) -> None:
    reply = await replied("rl_check_status", run_id="3fa8")
    assert reply.body == {
        "error": f"Run '3fa8' not found. Did you mean {RUN} (gsm8k, running)?",
        "code": "run_not_found",
        "did_you_mean": RUN,
        "active_runs": [RUN],
        "next": f'rl_check_status(run_id="{RUN}")',
    }


async def test_a_beginning_and_a_name_do(running: RunDirectory) -> None:
    change(running, name="my sums")
    for word in ("3fa", "my sums", RUN):
        assert (await told("rl_check_status", run_id=word))["run_id"] == RUN
    make_run("3fa00000")
    reply = await replied("rl_check_status", run_id="3fa")
    assert reply.body["code"] == "run_ambiguous"
    assert reply.body["active_runs"] == [RUN]


@pytest.mark.parametrize(
    "word", ["../3fa9c1d2", "..", "/etc/passwd", "*", "3fa9c1d2/", ".\x00", "x" * 400]
)
async def test_no_word_is_a_path(running: RunDirectory, word: str) -> None:
    reply = await replied("rl_check_status", run_id=word)
    assert reply.body["code"] == "run_not_found"
    assert tokens(reply.body) < 150


async def test_a_secret_in_a_log_is_struck_out_also_where_a_line_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = "sk-" + "abcdefgh" * 12
    monkeypatch.setenv("OPENROUTER_API_KEY", secret)
    run = failed(code="process_exited", error=f"It failed. {secret}")
    run.log("trainer").write_text(f"key={secret}\n" * 8)
    answer = await told("rl_check_status", run_id=RUN)
    assert answer["log_tail"] == ["key=***"]
    assert answer["error"] == "It failed. ***"


@pytest.fixture
def limited(home: Path, running: RunDirectory) -> RunDirectory:
    (home / "policy.yaml").write_text("hermes-compat\n")
    return running


async def test_a_second_look_within_the_interval_is_limited_and_keeps_the_last_snapshot(
    limited: RunDirectory,
) -> None:
    first = await told("rl_check_status", run_id=RUN)
    add_step(limited, 13)
    change(limited, step=13)
    second = await told("rl_check_status", run_id=RUN)
    assert second.keys() == {
        *("rate_limited", "run_id", "message", "next_check_in_seconds"),
        *("status", "step", "metrics", "next"),
    }
    assert second["rate_limited"] is True
    assert second["message"] == "Rate limited. Next check available in 30 minutes."
    assert 0 < second["next_check_in_seconds"] <= HERMES_COMPAT.min_status_interval_s
    assert [second[key] for key in ("run_id", "status", "step", "metrics")] == [
        first[key] for key in ("run_id", "status", "step", "metrics")
    ]
    assert second["next"] == f'rl_check_status("{RUN}", wait_s=50, until="terminal")'


async def test_a_limit_holds_also_for_a_run_among_several(limited: RunDirectory) -> None:
    (first,) = (await told("rl_check_status", run_ids=[RUN]))["runs"]
    add_step(limited, 13)
    change(limited, step=13)
    (second,) = (await told("rl_check_status", run_ids=[RUN]))["runs"]
    assert (second["rate_limited"], second["step"]) == (True, first["step"])
    assert (await told("rl_check_status", run_id=RUN))["rate_limited"]


async def test_a_limit_never_hides_an_alert_a_changed_state_or_an_end(
    limited: RunDirectory,
) -> None:
    async def is_limited() -> bool:
        return (await told("rl_check_status", run_id=RUN)).get("rate_limited", False)

    assert [await is_limited(), await is_limited()] == [False, True]
    add_alert(limited)
    assert [await is_limited(), await is_limited()] == [False, False]
    (limited.path / "events.jsonl").write_text("")
    change(limited, status="stopping")
    assert [await is_limited(), await is_limited()] == [False, True]
    os.utime(limited.path / "heartbeat", (1, 1))
    assert [await is_limited(), await is_limited()] == [False, False]
    change(limited, status="failed", error="It failed.", code="process_exited")
    assert [await is_limited(), await is_limited()] == [False, False]


async def test_when_the_interval_is_over_a_run_may_be_looked_at_again(
    home: Path, limited: RunDirectory
) -> None:
    await told("rl_check_status", run_id=RUN)
    file = home / "looks" / f"{RUN}.json"
    seen = json.loads(file.read_bytes())
    file.write_text(json.dumps({**seen, "at": seen["at"] - HERMES_COMPAT.min_status_interval_s}))
    assert "rate_limited" not in await told("rl_check_status", run_id=RUN)
    assert (await told("rl_check_status", run_id=RUN))["rate_limited"]


async def test_an_unknown_id_and_an_ended_run_leave_no_trace(
    home: Path, limited: RunDirectory
) -> None:
    await told("rl_check_status", run_id="0bad0bad")
    assert not (home / "looks").exists()
    await told("rl_check_status", run_id=RUN)
    assert [file.name for file in (home / "looks").glob("*.json")] == [f"{RUN}.json"]
    change(limited, status="completed")
    await told("rl_check_status", run_id=RUN)
    assert not list((home / "looks").glob("*.json"))


async def test_without_a_policy_looks_are_free_and_nothing_is_written(
    home: Path, running: RunDirectory
) -> None:
    for _ in range(2):
        assert "rate_limited" not in await told("rl_check_status", run_id=RUN)
    assert not (home / "looks").exists()


async def test_processes_that_were_started_again_are_told() -> None:
    run = make_run()
    with supervised(run):
        assert "restarts" not in await told("rl_check_status", run_id=RUN)
        append_row(
            run.path / "events.jsonl",
            {"t": 1.0, "type": "restart", "role": "env", "attempt": 1, "of": 3},
        )
        assert (await told("rl_check_status", run_id=RUN))["restarts"] == {"env": 1}


async def test_an_alert_whose_cause_is_gone_is_named_and_decides_nothing(
    running: RunDirectory,
) -> None:
    add_alert(running, "entropy_collapse", 9, remedy=Remedy((STOP,), "lost."))
    answer = await told("rl_check_status", run_id=RUN)
    assert [alert["rule"] for alert in answer["alerts"]] == ["entropy_collapse"]
    assert (answer["health"], answer["next"]) == ("alert", f'rl_stop_training("{RUN}")')
    end_alert(running, "entropy_collapse", 11)
    answer = await told("rl_check_status", run_id=RUN)
    assert (answer["alerts"], answer["alerts_over"]) == ([], ["entropy_collapse"])
    assert (answer["health"], answer["next"].partition("(")[0]) == ("healthy", "rl_check_status")
    change(running, status="stopped", resumable=True)
    results = await told("rl_get_results", run_id=RUN)
    assert results["alerts"] == [{"rule": "entropy_collapse", "step": 9, "times": 1, "over_at": 11}]
    assert results["next"] == f'rl_evaluate("{RUN}") or rl_start_training(resume_from="{RUN}")'
    add_alert(running, "entropy_collapse", 12, remedy=Remedy((STOP,), "lost."))
    assert (await told("rl_check_status", run_id=RUN))["alerts"][0]["step"] == 12


async def test_a_policy_that_pleases_its_scorer_does_not_unlearn_it(running: RunDirectory) -> None:
    add_alert(running, "reward_hacking", 5, remedy=Remedy((STOP, READ_BEST)))
    end_alert(running, "reward_hacking", 10)
    answer = await told("rl_check_status", run_id=RUN)
    assert [alert["rule"] for alert in answer["alerts"]] == ["reward_hacking"]


async def test_a_look_names_each_figure_and_each_healthy_process_once(
    running: RunDirectory,
) -> None:
    entropy = {"policy/entropy": 0.2, "train/truncated": 0.0, "train/truncated_paid": 0.0}
    add_step(running, 13, **entropy)
    add_step(running, 14, **entropy | {"policy/entropy": 0.1})
    answer = await told("rl_check_status", run_id=RUN)
    assert answer["trend"]["entropy"] == "0.2->0.1" and "entropy" not in answer["metrics"]
    assert answer["metrics"]["truncated"] == 0 and "truncated" not in answer["trend"]
    assert "truncated_paid" not in answer["metrics"]
    assert answer["processes"].keys() == {"api", "trainer", "env"}
    restarting = {**running.state().processes, "engine": {"pid": 7, "exit": -9, "state": ""}}
    change(running, processes=restarting)
    answer = await told("rl_check_status", run_id=RUN)
    assert answer["processes"]["engine"] == "ended by SIGKILL"
    change(running, status="completed")
    answer = await told("rl_check_status", run_id=RUN)
    assert answer["metrics"]["entropy"] == 0.1, "of an ended run no trend is shown"


async def test_an_engine_that_gets_much_less_than_a_core_is_said_in_one_remark(
    running: RunDirectory,
) -> None:
    append_row(
        running.path / "metrics.jsonl", {"step": 11, "src": "supervisor", "engine/cpu_share": 0.9}
    )
    assert "remarks" not in await told("rl_check_status", run_id=RUN)
    append_row(
        running.path / "metrics.jsonl", {"step": 12, "src": "supervisor", "engine/cpu_share": 0.1}
    )
    (remark,) = (await told("rl_check_status", run_id=RUN))["remarks"]
    assert remark.startswith("the machine is busy") and "50%" in remark


async def test_groups_that_were_dropped_are_counted_beside_those_trained_on(
    running: RunDirectory,
) -> None:
    """The groups of a batch all have signal where those without it are dropped on the way."""
    for step, dropped, sent in ((13, 130, 8), (14, 7, 8)):
        add_step(running, step, **{"groups/without_signal": 0.0})
        row = {"step": step, "src": "env", "groups/dropped/same_scores": dropped}
        append_row(running.path / "metrics.jsonl", {**row, "groups/sent": sent})
    trend = (await told("rl_check_status", run_id=RUN))["trend"]
    assert trend["groups_dropped"] == {
        "number": 137,
        "of": 153,
        "share": 0.895,
        "why": {"same_scores": 137},
    }


async def test_groups_without_signal_say_what_teaches_more(running: RunDirectory) -> None:
    assert "remarks" not in await told("rl_check_status", run_id=RUN)
    for step in range(13, 21):
        add_step(running, step, **{"groups/without_signal": 0.9})
    (remark,) = (await told("rl_check_status", run_id=RUN))["remarks"]
    assert "90%" in remark and "a group_size above 8" in remark
    assert remark in (await told("rl_get_results", run_id=RUN))["notes"]


async def test_the_last_evaluation_of_a_stopped_run_says_of_which_weights_it_is() -> None:
    run = make_run(steps=12, status="stopped", ended_at=time.time())
    add_evaluation(run, 0, 0.3)
    add_evaluation(run, 10, 0.39)
    answer = await told("rl_check_status", run_id=RUN)
    gain = answer["gain"]
    assert (gain["after"], gain["step"], gain["weights_step"]) == (0.39, 10, 12)
    (remark,) = answer["remarks"]
    assert "of step 10" in remark and "of step 12, and were not evaluated" in remark
    assert answer["next"].startswith(f'rl_evaluate("{RUN}")')
    add_evaluation(run, 12, 0.41)
    answer = await told("rl_check_status", run_id=RUN)
    assert (answer["gain"]["after"], answer["gain"]["step"]) == (0.41, 12)
    assert "remarks" not in answer and "rl_evaluate" not in answer["next"]


async def test_a_resumed_run_shows_where_its_parent_ends() -> None:
    point = {"name": "step-5", "step": 5}
    make_run(steps=8, resumed_from="aaaa1111", resume_point=point)
    answer = await told("rl_get_results", run_id=RUN, points=8)
    assert [row.get("run_id") for row in answer["history"]] == ["aaaa1111"] * 5 + [None] * 3
    assert any("steps up to 5 are of run aaaa1111" in note for note in answer["notes"])
    assert (await told("rl_check_status", run_id=RUN))["resumed_from"] == "aaaa1111"


async def test_a_wait_that_the_hosts_limit_cut_says_so(
    running: RunDirectory,
) -> None:
    caller = Caller(host_wait_s=0.2)
    asked = {"run_id": RUN, "wait_s": 30, "until": "terminal"}
    answer = (await call("rl_check_status", asked, caller)).body
    assert answer["woke"] == "wait_s" and "0.2 s at most" in answer["wait_cut"]
    answer = await told("rl_check_status", run_id=RUN, wait_s=0.1, until="terminal")
    assert answer["woke"] == "wait_s" and "wait_cut" not in answer


async def test_what_failed_a_run_is_said_once_and_the_log_shows_where() -> None:
    said = "sums.score raised KeyError: 'answer'. (at sums.py:9)"
    run = failed(
        code="env_gave_up",
        error="x",
        exit={"process": "env", "code": 1},
        failure=Failure(what="Environment exited.", why=f"8 groups failed. The last: {said}"),
    )
    append_row(
        run.path / "events.jsonl",
        {"type": "eval_failed", "step": 9, "error": f"Last failure: {said}"},
    )
    traceback = ['  File "sums.py", line 9, in score', "KeyError: 'answer'"]
    repeated = [f"2026-07-01 12:00:00,123 env WARNING a.b: A rollout failed: {said}"] * 300
    last = f"error: 8 groups failed. The last: {said}"
    run.log("env").write_text("\n".join([*traceback, *repeated, last]))
    answer = await told("rl_check_status", run_id=RUN)
    assert json.dumps(answer).count("KeyError: 'answer'. (at") == 1
    assert answer["log_tail"] == [traceback[0].rstrip(), traceback[1]]
