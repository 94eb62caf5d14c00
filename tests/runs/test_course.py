"""The course of a run, with stand-ins for its roles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deadlines import wait_until

from halteres.config.resolution import resolve_settings
from halteres.observe.metrics import merge_by_step
from halteres.runs.directory import WAKE, stop_run
from halteres.runs.planning.plan import plan_run
from halteres.runs.reading.failures import read_restarts
from halteres.runs.reading.progress import conditions, read_progress
from halteres.runs.reading.report import report_of
from halteres.runs.start import start_run
from halteres.runs.supervision.controller import ENGINE_PEAK

from .run_fixtures import ENVIRONMENT, STANDIN_SUPERVISOR, StartRun, survivors, wait, wait_for_end

pytestmark = pytest.mark.runs


def test_a_run_goes_from_start_to_its_results(start: StartRun) -> None:
    run = start()
    state = wait_for_end(run)
    assert (state.status, state.step, state.error, state.resumable) == ("completed", 4, None, False)
    assert not survivors(state)
    assert (run.path / "adapter" / "adapter_config.json").is_file()
    results = run.results()
    assert results is not None
    assert results["improvement"]["eval/percent_correct"]["delta"] == 1.0
    assert results["samples"][0]["before"]["score"] == 0.0
    assert results["weights"]["peft_dir"] == str(run.path / "adapter")
    assert (run.path / "plot.png").exists()
    assert "completed" in (run.path / "STATUS.md").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_the_most_memory_that_the_engine_has_held_stands_with_its_step(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def peaks() -> list[float]:
        return [row[ENGINE_PEAK] for row in run.metrics() if ENGINE_PEAK in row]

    # the trainer waits after two of four steps, so that the engine lives until it was looked at
    monkeypatch.setenv("STANDIN_STEPS", "2")
    run = start()
    wait(run, lambda _: peaks())
    stop_run(run)
    assert peaks() == sorted(peaks()) and peaks()[0] > 0


def test_a_proxy_in_the_environment_is_not_asked_for_what_is_on_this_machine(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    state = wait_for_end(start())
    assert (state.status, state.error) == ("completed", None)


def test_where_each_setting_comes_from_is_written_at_the_start(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {lora_rank: 8}\nenv: {difficulty: 2}\n")
    asked = resolve_settings(ENVIRONMENT, file, ["total_steps=2", "batch_size=6"])
    run = start_run(plan_run(asked), supervisor=STANDIN_SUPERVISOR)
    state = wait_for_end(run)
    told = json.loads((run.path / "config.resolved.json").read_bytes())
    assert told["trainer.lora_rank"] == {"value": 8, "source": "file"}
    assert told["trainer.total_steps"] == {"value": 2, "source": "edit"}
    assert told["trainer.eval_every"]["source"] == "default"
    assert told["env.difficulty"] == {"value": 2, "source": "file"}
    assert told["env.batch_size"] == {"value": 6, "source": "edit"}
    assert told["env.group_size"] == {"value": 2, "source": "config_init"}
    assert told["env.rollout_server_url"] == {"value": state.urls["api"], "source": "wiring"}
    assert told["inference.url"] == {"value": state.urls["service"], "source": "wiring"}


@pytest.mark.parametrize("request_", [b"[]", b"{"])
def test_a_stop_request_that_is_junk_still_stops_the_run(
    start: StartRun, monkeypatch: pytest.MonkeyPatch, request_: bytes
) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "1")
    run = start()
    state = wait(run, lambda state: state.status == "running" and state.step == 1)
    (run.path / "control" / "stop.json").write_bytes(request_)
    assert state.supervisor is not None
    os.kill(state.supervisor["pid"], WAKE)
    state = wait_for_end(run)
    assert (state.status, state.error) == ("stopped", None)


def test_phases_are_told_in_order_and_every_role_is_recorded(start: StartRun) -> None:
    run = start()
    state = wait_for_end(run)

    def phases() -> list[tuple[str, str | None]]:
        return [
            (event["status"], event["phase"]) for event in run.events() if event["type"] == "status"
        ]

    wait_until(lambda: phases()[-1][0] == "completed")  # run.json says so first
    told = phases()
    assert told[0] == ("starting", "api")
    assert told[-2:] == [("running", "evaluation"), ("completed", None)]
    assert {"service", "engine", "api", "trainer", "env"} == set(state.processes)
    assert set(conditions(state).values()) <= {
        "exited (0)",
        "ended with the run",
        "exited with its service",
    }
    assert state.processes["trainer"]["exit"] == 0
    assert state.processes["service"]["port"] == int(state.urls["service"].rpartition(":")[2])


def test_evaluations_run_before_after_and_between(start: StartRun) -> None:
    run = start("trainer.eval_every=2")
    wait_for_end(run)
    evaluated = {row["step"] for row in run.metrics() if row.get("src") == "eval"}
    assert {0, 4} <= evaluated <= {0, 2, 4}
    assert merge_by_step(run.metrics())[-1]["eval/percent_correct"] == 1.0


def test_an_evaluation_that_dies_is_an_event_and_the_run_completes(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_EVALUATE", "dies")
    run = start()
    assert wait_for_end(run).status == "completed"
    why = "The evaluation exited with code 4. All 3 held-out tasks failed. They are too hard."
    told = [{"step": 0, "why": why}, {"step": 4, "why": why}]
    assert [
        {"step": it["step"], "why": it["error"]}
        for it in run.events()
        if it["type"] == "eval_failed"
    ] == told
    progress, results = read_progress(run), run.results()
    assert [{"step": failed.step, "why": failed.why} for failed in progress.eval_failed] == told
    assert results is not None and results["eval_failed"] == told
    assert why in (run.path / "STATUS.md").read_text()


def test_an_environment_without_evaluation_is_asked_once_and_the_run_says_so_from_its_start(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_EVALUATE", "has none")
    monkeypatch.setenv("STANDIN_STEPS", "1")
    run = start("trainer.eval_every=1")
    says = (
        "There will be no held-out figure. standin cannot be evaluated. Its class has no evaluate."
    )
    wait(run, lambda state: read_progress(run).no_evaluation == says)
    stop_run(run)
    wait_for_end(run)
    assert [event["step"] for event in run.events() if event["type"] == "no_evaluation"] == [0]
    assert not [event for event in run.events() if event["type"] == "eval_failed"]
    results = run.results()
    assert results is not None and (results["no_evaluation"], results["eval_failed"]) == (says, [])


def test_calls_of_the_environment_that_are_all_refused_are_an_alert_before_the_first_step(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_REFUSES", "`stop` is a list of texts.")
    monkeypatch.setenv("STANDIN_STEPS", "0")
    run = start()
    wait(run, lambda state: state.status == "running" and read_progress(run).alerts)
    snapshot = report_of(run)
    assert (snapshot.state.status, snapshot.step, snapshot.health) == ("running", 0, "failing")
    (alert,) = snapshot.alerts
    assert (alert.rule, "`stop` is a list of texts." in alert.evidence) == ("calls_refused", True)
    stop_run(run)
    wait_for_end(run)


def test_an_evaluation_ends_with_its_process_whatever_that_leaves_behind(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its child would hold its output open, until the evaluation's own deadline."""
    monkeypatch.setenv("STANDIN_EVALUATE", "leaves a child")
    run = start()
    assert wait_for_end(run).status == "completed"
    assert [row["step"] for row in run.metrics() if row.get("src") == "eval"] == [0, 4]


def test_an_engine_that_dies_in_the_last_evaluation_and_comes_back_is_told(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_EVALUATE_S", "6")
    run = start()
    state = wait(run, lambda state: state.phase == "evaluation")
    with subprocess.Popen(["sleep", "4"]) as another:
        os.kill(state.processes["engine"]["pid"], signal.SIGKILL)
        service = run.path / "service" / "service.json"
        service.write_text(
            json.dumps({**json.loads(service.read_text()), "engine_pid": another.pid})
        )
        assert wait_for_end(run).status == "completed"
    assert read_restarts(run.path / "events.jsonl") == {"engine": 1}
    exits = [event["role"] for event in run.events() if event["type"] == "process_exit"]
    assert exits.index("engine") < exits.index("service")


def test_what_a_role_notices_becomes_an_alert_that_the_supervisor_writes_without_secrets(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "tok-1234567890")
    monkeypatch.setenv("STANDIN_NOTICE", "The loss is not finite, says tok-1234567890.")
    run = start()
    wait_for_end(run)
    (alert,) = [event for event in run.events() if event["type"] == "alert"]
    assert (alert["rule"], alert["step"]) == ("nan_loss", 1)
    assert alert["evidence"] == "The loss is not finite, says ***."
    assert alert["remedy"].startswith("rl_start_training(")
    assert "tok-1234567890" not in run.log("supervisor").read_text()


def test_rows_that_show_nothing_to_learn_raise_one_alert(start: StartRun) -> None:
    """The stand-in's groups never differ, from its first step to its last."""
    run = start("trainer.total_steps=12")
    wait_for_end(run)
    (alert,) = [event for event in run.events() if event["type"] == "alert"]
    assert (alert["rule"], alert["step"]) == ("no_reward_variance", 5)
    assert (
        f'resume_from="{run.run_id}"' in alert["remedy"] and '"env.group_size":4' in alert["remedy"]
    )


def test_a_failures_words_hold_no_secret(start: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "It was born so")  # what the stand-in says when it dies
    monkeypatch.setenv("STANDIN_DIES", "trainer@start")
    state = wait_for_end(run := start())
    assert state.error is not None and "The trainer has no legs. ***." in state.error
    assert "It was born so" not in "".join(
        file.read_text(errors="replace") for file in run.path.glob("*.*")
    )
    assert "It was born so" not in run.log("trainer").read_text()


def test_stop_ends_a_run_with_a_checkpoint_and_no_orphan(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "1")
    run = start()
    wait(run, lambda state: state.status == "running" and state.step == 1)
    state = stop_run(run)
    assert (state.status, state.step, state.resumable) == ("stopped", 1, True)
    assert state.last_checkpoint is not None and state.last_checkpoint["step"] == 1
    assert not survivors(state)
    assert stop_run(run) == state, "stopping again changes nothing"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_a_process_that_left_its_group_ends_with_the_run(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "1")
    monkeypatch.setenv("STANDIN_ENV", "leaves a session")
    run = start()
    wait(run, lambda state: state.status == "running" and state.step == 1)
    left = int(wait_until(lambda: (file := run.path / "left").exists() and file.read_text()))
    assert not is_gone(left)
    stop_run(run)
    wait_until(lambda: is_gone(left))


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_stop_works_while_the_run_is_still_starting(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "0")
    run = start()
    state = stop_run(run)
    assert state.status == "stopped"
    assert not survivors(state)


def test_after_step_leaves_the_trainer_to_end_by_itself(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "1")
    run = start()
    running = wait(run, lambda state: state.status == "running" and state.step == 1)
    assert stop_run(run, mode="after_step", deadline_s=0).status in ("running", "stopping")
    wait(run, lambda state: state.status == "stopping")
    os.kill(running.processes["trainer"]["pid"], signal.SIGTERM)  # stands for: its step is done
    assert wait_for_end(run).status == "stopped"


def test_a_run_completes_early_once_its_held_out_figure_is_reached(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "2")
    monkeypatch.setenv("STANDIN_TRAINER", "obeys")
    run = start("trainer.eval_every=2", "run.stop_when=0.9")
    state = wait_for_end(run)
    assert (state.status, state.step, state.error) == ("completed", 2, None)
    assert state.note == (
        "eval/percent_correct was 1 at step 2: stop_when (0.9) is reached; the run ended at "
        "step 2 of 4."
    )
    assert [event["step"] for event in run.events() if event["type"] == "goal_reached"] == [2]
    assert [event["step"] for event in run.events() if event["type"] == "eval"] == [0, 2]
    assert (run.path / "adapter" / "adapter_config.json").is_file()
    assert not survivors(state)


def test_a_held_out_figure_that_is_no_number_reaches_no_goal_and_the_run_goes_on(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_EVALUATE", "says NaN")
    monkeypatch.setenv("STANDIN_STEPS", "2")
    run = start("trainer.eval_every=2", "run.stop_when=0.9")
    wait(
        run, lambda _: [row["step"] for row in run.metrics() if row.get("src") == "eval"] == [0, 2]
    )
    os.kill(run.state().processes["trainer"]["pid"], signal.SIGTERM)
    state = wait_for_end(run)
    assert "Trainer exited with code 0 at step 2" in (state.error or ""), (
        "it was the test that ended it"
    )
    assert not [event for event in run.events() if event["type"] == "goal_reached"]


def test_a_trainer_that_does_not_end_at_the_held_out_figure_is_ended_after_a_grace(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "2")
    monkeypatch.setenv("STANDIN_CAP_GRACE_S", "0.3")
    state = wait_for_end(start("trainer.eval_every=2", "run.stop_when=0.9"))
    assert (state.status, state.error) == ("stopped", None)
    assert "stop_when (0.9) is reached; the trainer did not end" in (state.note or "")
    assert not survivors(state)


def test_a_run_ends_with_a_checkpoint_at_an_alert_of_drift_where_its_settings_say_so(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "3")
    monkeypatch.setenv("STANDIN_TRAINER", "obeys")
    monkeypatch.setenv("STANDIN_FIGURES", '{"policy/kl_reference": 0.2}')
    budget = ("trainer.kl_coef=0.1", "trainer.kl_budget=0.1")
    state = wait_for_end(run := start(*budget, "run.on_drift=stop"))
    assert (state.status, state.step, state.error, state.resumable) == ("stopped", 3, None, True)
    assert (state.note or "").startswith(
        "The alert kl_over_budget came at step 3, and on_drift is stop. The policy is"
    )
    assert [event["rule"] for event in run.events() if event["type"] == "drift"] == [
        "kl_over_budget"
    ]
    assert not survivors(state)


def test_a_trainer_that_does_not_end_at_an_alert_of_drift_is_ended_after_a_grace(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "3")
    monkeypatch.setenv("STANDIN_CAP_GRACE_S", "0.3")
    monkeypatch.setenv("STANDIN_FIGURES", '{"policy/kl_reference": 0.2}')
    state = wait_for_end(start("trainer.kl_coef=0.1", "trainer.kl_budget=0.1", "run.on_drift=stop"))
    assert (state.status, state.error) == ("stopped", None)
    note = state.note or ""
    assert note.startswith("The alert kl_over_budget came at step 3")
    assert note.endswith("The trainer did not end after its step, and was ended.")
    assert not survivors(state)


def test_every_later_evaluation_tells_the_share_of_the_gain_that_the_panel_confirms(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_EVALUATE", "has a panel")
    wait_for_end(run := start())
    rows = [row for row in run.metrics() if row.get("src") == "eval"]
    assert [row.get("eval/panel/share_of_gain") for row in rows] == [None, 0.5]
    assert rows[-1]["eval/panel/other/share_of_gain"] == 0.5


def test_an_alert_of_drift_warns_and_the_run_goes_on_where_nothing_else_was_asked_for(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_FIGURES", '{"policy/kl_reference": 0.2}')
    state = wait_for_end(run := start("trainer.kl_coef=0.1", "trainer.kl_budget=0.1"))
    assert (state.status, state.step) == ("completed", 4)
    assert [event["rule"] for event in run.events() if event["type"] == "alert"] == [
        "kl_over_budget"
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_supervisor_stops_the_run(
    start: StartRun, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "1")
    run = start()
    state = wait(run, lambda state: state.status == "running" and state.step == 1)
    assert state.supervisor is not None
    os.kill(state.supervisor["pid"], number)
    state = wait_for_end(run)
    assert state.status == "stopped"
    assert not survivors(state)


def test_a_child_that_will_not_end_is_killed_with_its_group(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "1")
    monkeypatch.setenv("STANDIN_ENV", "stubborn")
    run = start()
    wait(run, lambda state: state.status == "running")
    state = stop_run(run)
    assert state.status == "stopped"
    assert state.processes["env"]["exit"] == -signal.SIGKILL
    assert not survivors(state)


def test_two_runs_at_once_do_not_meet(start: StartRun) -> None:
    runs = [start(), start()]
    states = [wait_for_end(run) for run in runs]
    assert [state.status for state in states] == ["completed", "completed"]
    assert len({port for state in states for port in state.urls.values()}) == 4


def test_somebody_elses_service_is_used_and_never_stopped(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "1")
    host = start()
    service = wait(host, lambda state: state.status == "running").urls["service"]
    monkeypatch.setenv("STANDIN_STEPS", "4")
    # The stand-in service has no info route: it is taken for a service of other make, from which
    # one can sample.
    guest = start(service_url=service)
    state = wait_for_end(guest)
    assert state.status == "completed"
    assert "service" not in state.processes
    assert state.urls["service"] == service
    assert host.state().status == "running"


def test_a_time_limit_reached_as_asked_is_a_completed_run_that_says_so(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "1")
    monkeypatch.setenv("STANDIN_REASON", "time_limit")
    run = start("run.max_minutes=60")
    state = wait(run, lambda state: state.status == "running" and state.step == 1)
    os.kill(state.processes["trainer"]["pid"], signal.SIGTERM)  # stands for: its time is over
    state = wait_for_end(run)
    assert state.status == "completed"
    assert state.note == "The time limit of 60 minutes was reached at step 1 of 4."


def test_start_returns_at_once(start: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "0")
    start()  # warm: the environment has described itself
    began = time.monotonic()
    run = start()
    assert time.monotonic() - began < 2
    assert run.state().status in ("pending", "starting", "running")


def test_a_defect_in_what_concludes_a_run_does_not_keep_its_end_from_being_written(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_CONCLUSION", "raises")
    run = start()
    state = wait_for_end(run)
    assert (state.status, state.error) == ("completed", None)
    (told,) = [event for event in run.events() if event["type"] == "conclusion_failed"]
    assert told["error"] == "Concluding raised ZeroDivisionError: division by zero."
    assert not survivors(state)
