"""What a person sees of a run, in a terminal and in a pipe."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from collections.abc import Callable

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from halteres.agent.transports.command_line import as_command
from halteres.cli import runs
from halteres.cli.follow import LiveView, PlainView, follow, summarise
from halteres.errors import ProcessFailed
from halteres.next_step import NextStep, Remedy
from halteres.observe.metrics import append_row
from halteres.observe.sinks import Reports, SinkReport
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.alerts import Alert
from halteres.runs.reading.evaluations import before_and_after
from halteres.runs.reading.progress import read_progress
from halteres.runs.reading.report import report_of
from halteres.runs.state import read_state, write_state

from .conftest import PROMPT


def pipe() -> Console:
    return Console(file=io.StringIO(), width=100, highlight=False)


def terminal() -> Console:
    return Console(file=io.StringIO(), width=100, force_terminal=True, highlight=False)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_progress_is_read_from_the_files_alone(finished: RunDirectory) -> None:
    progress = read_progress(finished)
    assert (progress.step, progress.total_steps, progress.status) == (2, 2, "completed")
    assert progress.reward == ((1, 0.3), (2, 0.6))
    assert progress.evaluation == ((0, 0.25), (2, 0.75))
    assert progress.remaining_s == 0.0
    assert [str(alert) for alert in progress.alerts] == ["logprob_drift (step 2): look"]


def test_the_first_answer_to_a_task_is_compared_before_and_after(finished: RunDirectory) -> None:
    (task,) = [task for task in before_and_after(finished) if task.learnt]
    assert task.prompt == PROMPT
    assert "\\boxed{9}" in task.before
    assert "\\boxed{7}" in task.after


def test_without_two_evaluations_there_is_nothing_to_compare(finished: RunDirectory) -> None:
    (finished.path / "evals" / "step_2").rename(finished.path / "elsewhere")
    assert not before_and_after(finished)


def test_a_resumed_run_does_not_tell_its_past_again(finished: RunDirectory) -> None:
    file = finished.path / "run.json"
    write_state(
        file,
        msgspec.structs.replace(read_state(file), resume_point={"name": "step-000001", "step": 1}),
    )
    console = pipe()
    follow(finished, console)
    assert text(console).splitlines()[0] == "going on after step 1"
    assert "step 1/2" not in text(console)
    assert "step 2/2" in text(console)


def test_a_pipe_gets_one_plain_line_per_step_and_no_control_codes(finished: RunDirectory) -> None:
    console = pipe()
    assert follow(finished, console).status == "completed"
    lines = text(console).splitlines()
    assert "step 1/2  reward 0.300  success 30%" in lines
    assert "evaluation after step 2: 75.0% correct on held-out tasks" in lines
    assert "alert: logprob_drift (step 2): look" in lines
    assert "\x1b" not in text(console)


def test_a_person_is_told_where_metrics_are_forwarded_to_and_what_is_wrong_with_a_sink(
    finished: RunDirectory, halteres: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    Reports(finished.path).put("wandb", SinkReport(state="online", url="https://wandb.ai/x"))
    Reports(finished.path).put(
        "trackio", SinkReport(state="failed", note="pip install 'halteres[trackio]'")
    )
    lines = [
        "wandb: online: https://wandb.ai/x",
        "trackio: failed: pip install 'halteres[trackio]'",
    ]
    console = pipe()
    follow(finished, console)
    assert set(lines) <= set(text(console).splitlines())
    console = terminal()
    with LiveView(finished, console) as view:
        view.show(report_of(finished))
    assert "https://wandb.ai/x" in text(console)
    assert set(lines) <= set(halteres("runs", "status", "aaaa").stdout.splitlines())
    console = pipe()
    summarise(finished, finished.state(), console)
    assert "wandb:   online: https://wandb.ai/x" in text(console).splitlines()


def test_plain_lines_are_said_once_however_often_one_looks(finished: RunDirectory) -> None:
    console, report = pipe(), report_of(finished)
    view = PlainView(console)
    view.show(report)
    once = text(console)
    view.show(report)
    assert text(console) == once


def test_the_live_view_shows_curve_success_and_held_out_share(finished: RunDirectory) -> None:
    console = terminal()
    with LiveView(finished, console) as view:
        view.show(report_of(finished))
    assert "0.30 → 0.60" in text(console)
    assert "60% of rollouts" in text(console)
    assert "step 2: 75%" in text(console)


def test_failed_evaluations_and_a_run_without_any_are_told_in_the_terminal(
    finished: RunDirectory,
) -> None:
    why = "The evaluation exited with code 1. All 3 held-out tasks failed."
    append_row(finished.path / "events.jsonl", {"type": "eval_failed", "step": 3, "error": why})
    append_row(
        finished.path / "events.jsonl",
        {"type": "no_evaluation", "step": 0, "error": "There will be none."},
    )
    console = pipe()
    follow(finished, console)
    assert text(console).count(f"evaluation after step 3 failed: {why}") == 1
    assert "There will be none." in text(console)
    live = terminal()
    with LiveView(finished, live) as view:
        view.show(report_of(finished))
    assert "evaluation after step 3 failed" in text(live)
    shown = CliRunner().invoke(runs.app, ["status", finished.run_id]).output
    assert f"evaluation after step 3 failed: {why}" in shown
    assert "There will be none." in shown


def test_an_evaluation_whose_tasks_failed_says_of_how_many_its_figure_is(
    finished: RunDirectory,
) -> None:
    row = {
        "step": 2,
        "src": "eval",
        "eval/percent_correct": 1.0,
        "eval/num_tasks": 1,
        "eval/num_failed": 3,
    }
    append_row(finished.path / "metrics.jsonl", row)
    line = (
        "evaluation after step 2: 100.0% correct on held-out tasks (of 1 of 4 tasks; 3 failed, see"
    )
    console = pipe()
    follow(finished, console)
    assert line in text(console)
    assert line in CliRunner().invoke(runs.app, ["status", finished.run_id]).output
    console = pipe()
    summarise(finished, finished.state(), console)
    assert re.search(r"tasks failed, left out +0 of 0 +3 of 4", text(console))


def test_failed_rollouts_are_counted_by_their_reasons_in_the_status(finished: RunDirectory) -> None:
    for step in (1, 2):
        row = {"step": step, "src": "env", "rollouts/failed": 3, "rollouts/failed/env_error": 3}
        append_row(finished.path / "metrics.jsonl", row)
    assert (
        "failed rollouts: 6 env_error"
        in CliRunner().invoke(runs.app, ["status", finished.run_id]).output
    )


def test_the_status_of_a_completed_run_says_what_comes_next(finished: RunDirectory) -> None:
    shown = CliRunner().invoke(runs.app, ["status", finished.run_id]).output
    assert f"next: halteres chat {finished.run_id}" in shown
    file = finished.path / "run.json"
    write_state(file, msgspec.structs.replace(read_state(file), kind="reward"))
    shown = CliRunner().invoke(runs.app, ["status", finished.run_id]).output
    assert f"next: halteres reward eval {finished.path}" in shown and "HELD_OUT" in shown


def test_the_status_tells_how_often_a_process_was_started_again(finished: RunDirectory) -> None:
    for role in ("engine", "env", "engine"):
        append_row(finished.path / "events.jsonl", {"type": "restart", "role": role})
    assert (
        "restarts: engine 2, env 1"
        in CliRunner().invoke(runs.app, ["status", finished.run_id]).output
    )


def test_the_success_rate_is_that_of_all_rollouts_and_many_dropped_groups_are_told_of(
    finished: RunDirectory,
) -> None:
    row = {"train/percent_correct": 0.01, "groups/sent": 8, "groups/dropped/no_reward_variance": 87}
    append_row(finished.path / "metrics.jsonl", {"step": 1, "src": "env", **row})
    console = pipe()
    follow(finished, console)
    lines = text(console).splitlines()
    assert (
        "step 1/2  reward 0.300  success 1%  87 of 95 groups dropped (no_reward_variance)" in lines
    )


def test_the_live_view_says_what_it_waits_for_before_the_first_batch(
    finished: RunDirectory,
) -> None:
    console = terminal()
    (finished.path / "metrics.jsonl").unlink()
    empty = report_of(finished)
    with LiveView(finished, console) as view:
        view.show(empty)
    assert "waiting for the first batch" in text(console)


def test_the_end_tells_figures_answers_places_and_the_next_command(finished: RunDirectory) -> None:
    console = pipe()
    summarise(finished, finished.state(), console)
    shown = text(console)
    assert "25.0%" in shown
    assert "75.0%" in shown
    assert "after:  3 + 4 = 7. \\boxed{7}" in shown
    assert f"adapter: {finished.path / 'adapter'}" in shown
    assert "plot:" not in shown  # there is none
    assert "next:    halteres chat aaaa1111" in shown


def test_a_failed_run_is_an_error_with_the_runs_own_sentence(finished: RunDirectory) -> None:
    file = finished.path / "run.json"
    write_state(
        file,
        msgspec.structs.replace(
            read_state(file), status="failed", error="Trainer exited with code 1."
        ),
    )
    with pytest.raises(ProcessFailed, match=r"Run aaaa1111 failed\. Trainer exited with code 1\."):
        summarise(finished, finished.state(), pipe())


def test_the_status_of_a_reward_training_names_the_command_that_goes_on_with_it(
    finished: RunDirectory,
) -> None:
    file = finished.path / "run.json"
    stopped = msgspec.structs.replace(
        read_state(file), status="stopped", resumable=True, kind="reward"
    )
    write_state(file, stopped)
    shown = CliRunner().invoke(runs.app, ["status", finished.run_id]).output
    assert "or: halteres reward train --resume-run aaaa1111" in shown


def test_a_stopped_run_offers_to_go_on(finished: RunDirectory) -> None:
    file = finished.path / "run.json"
    stopped = msgspec.structs.replace(read_state(file), status="stopped", resumable=True)
    write_state(file, stopped)
    console = pipe()
    summarise(finished, finished.state(), console)
    assert "or: halteres train --resume aaaa1111" in text(console)
    write_state(file, msgspec.structs.replace(stopped, resumable=False))
    console = pipe()
    summarise(finished, finished.state(), console)
    assert "--resume" not in text(console)


def test_the_command_at_the_end_of_a_failure_runs_into_no_other(finished: RunDirectory) -> None:
    file = finished.path / "run.json"
    error = "Its supervisor is gone. Go on from step 2: halteres train --resume aaaa1111"
    write_state(file, msgspec.structs.replace(read_state(file), status="failed", error=error))
    with pytest.raises(ProcessFailed) as failed:
        summarise(finished, finished.state(), pipe())
    told = "halteres train --resume aaaa1111. Read its logs: halteres runs logs aaaa1111"
    assert failed.value.sentence.endswith(told)


def test_after_a_run_of_several_turns_its_rollouts_are_the_next_thing_to_see(
    finished: RunDirectory,
) -> None:
    (finished.path / "config.yaml").write_text("env: {max_turns: 16}")
    console = pipe()
    summarise(finished, finished.state(), console)
    assert "next:    halteres rl get-rollouts aaaa1111" in text(console)


def test_columns_stand_under_each_other_whatever_the_longest_name(finished: RunDirectory) -> None:
    other = finished.path.with_name("bbbb2222")
    shutil.copytree(finished.path, other)
    name = "an_environment_with_a_long_name"
    state = msgspec.structs.replace(finished.state(), run_id="bbbb2222", environment=name)
    write_state(other / "run.json", state)
    lines = CliRunner().invoke(runs.app, ["list"]).output.splitlines()
    assert len({line.index("2/2") for line in lines[1:]}) == 1


def test_a_run_resumed_after_its_last_step_tells_its_last_evaluation(
    finished: RunDirectory,
) -> None:
    file = finished.path / "run.json"
    write_state(
        file, msgspec.structs.replace(read_state(file), resume_point={"name": "final", "step": 2})
    )
    console = pipe()
    follow(finished, console)
    assert "evaluation after step 2: 75.0% correct" in text(console)


def test_what_to_do_about_an_alert_is_a_command() -> None:
    remedy = Remedy((NextStep("rl_get_logs", {"run_id": "3fa9", "role": "env"}),), "mend the file.")
    alert = Alert(rule="truncation", step=3, evidence="Most answers are cut.", remedy=remedy)
    said = alert.text(as_command)
    assert said == (
        "truncation (step 3): Most answers are cut. halteres rl get-logs 3fa9 --role env; mend "
        "the file."
    )
