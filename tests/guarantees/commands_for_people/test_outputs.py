"""People get commands, agents get calls: no `rl_...(` in what a terminal or the page shows, and
every command that is proposed there is one that the command line takes.
"""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from agent.run_fixtures import RUN, add_alert, make_run, supervised
from rich.console import Console
from typer.core import TyperGroup
from typer.testing import CliRunner

from halteres.agent.transports.command_line import for_person, tools_app
from halteres.cli import follow, runs
from halteres.cli.main import app
from halteres.config.settings import TrainerSettings
from halteres.dashboard.runs import view_of
from halteres.errors import HalteresError, UserError
from halteres.next_step import Advice, NextStep, Remedy, lines_of, then
from halteres.runs.diagnosis.run_facts import RunFacts
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.report import environment_of, report_of

CALL = re.compile(r"\brl_\w+\(")

FACTS = RunFacts(
    run_id=RUN,
    environment="/home/me/my envs/sums.py",
    trainer=TrainerSettings(),
    env={"group_size": 8, "batch_size": 64, "max_new_tokens": 32},
    given={"env.prompt": "it's"},
)
REMEDIES = {
    "stop": Remedy((FACTS.stop("after_step"), FACTS.results()), "only harder tasks teach more."),
    "resume": Remedy(FACTS.go_on_with(FACTS.larger_groups())),
    "spoilt": FACTS.spoilt(0.5),
    "unscored": FACTS.unscored(),
    "longer": Remedy(FACTS.go_on_with(FACTS.longer_answers()), "or ask for short answers."),
    "logs": Remedy((FACTS.logs("env"),), "first see its key.", (FACTS.rollouts("best"),)),
}
ENDS: dict[str, dict[str, Any]] = {
    "completed": {},
    "stopped": {"status": "stopped", "resumable": True},
    "failed": {"status": "failed", "code": "process_exited", "error": "It failed."},
    "failed in its environment": {
        "status": "failed",
        "error": "It failed.",
        "exit": {"process": "env", "code": 3},
    },
    "out of memory": {
        "status": "failed",
        "code": "gpu_oom",
        "error": "It failed.",
        "resumable": True,
    },
    "disk full": {"status": "failed", "code": "disk_full", "error": "It failed."},
    "a reward model": {"status": "stopped", "kind": "reward", "resumable": True},
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    return tmp_path


def parse(command: str) -> None:
    """Read it as the command line does; nothing is run."""
    program, *words = shlex.split(command)
    assert program == "halteres", command
    current: Any = typer.main.get_command(app)
    if words[0] == "rl":
        current, words = typer.main.get_command(tools_app()), words[1:]
    while isinstance(current, TyperGroup):
        name = words.pop(0)
        assert name in current.commands, command
        current = current.commands[name]
    current.make_context(current.name, words)


def proposed(advice: Advice) -> Iterator[str]:
    for line in lines_of(advice, for_person):
        assert not CALL.search(str(line))
        if line.command:
            yield line.command


def terminal_of(run: RunDirectory) -> str:
    """All that a terminal shows of a run."""
    console = Console(file=io.StringIO(), width=200)
    report = report_of(run)
    with follow.PlainView(console) as plain:
        plain.show(report)
    with follow.LiveView(run, Console(file=console.file, width=200, force_terminal=True)) as live:
        live.show(report)
    if report.state.terminal and report.state.status != "failed":
        follow.summarise(run, report.state, console)
    assert isinstance(console.file, io.StringIO)
    status = CliRunner().invoke(runs.app, ["status", run.run_id], catch_exceptions=False)
    listed = CliRunner().invoke(runs.app, ["list"], catch_exceptions=False)
    return console.file.getvalue() + status.output + listed.output


@pytest.mark.parametrize("end", ENDS)
def test_no_call_is_shown_to_a_person_and_what_is_proposed_can_be_pasted(end: str) -> None:
    run = make_run(steps=9, **ENDS[end])
    (run.path / "config.yaml").write_text("env: {}\n")
    for rule, remedy in REMEDIES.items():
        add_alert(run, rule, 8, remedy=remedy)
    view, printed = view_of(run, for_person), terminal_of(run)
    assert not CALL.search(json.dumps(view)) and not CALL.search(printed)
    lines = [*view["next"], *(line for alert in view["alerts"] for line in alert["remedy"])]
    commands = [line["command"] for line in lines if line["command"]]
    assert commands
    for command in [*commands, *follow.next_lines(report_of(run))]:
        parse(re.sub(r"^[^:]*: (?=halteres)", "", command))


def test_of_a_run_that_goes_on_no_call_is_shown_either() -> None:
    run = make_run(steps=9)
    with supervised(run):
        for rule, remedy in REMEDIES.items():
            add_alert(run, rule, 8, remedy=remedy)
        printed = terminal_of(run)
        view = view_of(run, for_person)
        assert not CALL.search(printed) and not CALL.search(json.dumps(view))
        for command in proposed(report_of(run).next):
            parse(command)


@pytest.mark.parametrize("remedy", REMEDIES.values(), ids=REMEDIES)
def test_every_command_of_a_remedy_is_one_line_that_the_command_line_takes(remedy: Remedy) -> None:
    found = list(proposed(remedy))
    assert len(found) == len([*remedy.steps, *remedy.later])
    for command in found:
        assert "\n" not in command
        parse(command)


def test_of_two_steps_each_has_a_line_and_says_how_it_follows() -> None:
    both = then(NextStep.of("rl_get_logs", RUN, role="env"), NextStep("rl_list_runs"))
    assert [(line.words, line.command) for line in lines_of(both, for_person)] == [
        ("", f"halteres rl get-logs {RUN} --role env"),
        ("then", "halteres runs list"),
    ]
    either = (NextStep.of("rl_check_status", RUN), " or ", NextStep.of("rl_stop_training", RUN))
    assert [str(line) for line in lines_of(either, for_person)] == [
        f"halteres runs status {RUN}",
        f"or: halteres runs stop {RUN}",
    ]
    words = ("make room, then ", NextStep("rl_list_runs"))
    assert [str(line) for line in lines_of(words, for_person)] == [
        "make room, then: halteres runs list"
    ]


def test_an_error_of_a_command_proposes_a_command() -> None:
    error: HalteresError = UserError("No.", "Why.", NextStep.of("rl_get_results", RUN))
    assert error.written(for_person) == f"No. Why. halteres rl get-results {RUN}"


def test_a_restart_names_an_environment_that_is_found(tmp_path: Path) -> None:
    """It was started from a path: its name alone leads nowhere."""
    file = tmp_path / "my sums.py"
    file.write_text("from halteres.environments.base import BaseEnv\nclass Sums(BaseEnv): ...\n")
    run = make_run(
        environment="sums", environment_file=str(file), status="failed", error="It failed."
    )
    report = report_of(run)
    (command,) = proposed(report.next)
    assert shlex.split(command)[-1] == str(file) == environment_of(report.state)
    parse(command)
