"""`halteres rl`: every tool is a command; programs get JSON, people a page."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from halteres.agent.call import Reply
from halteres.agent.table import TOOLS
from halteres.agent.tool import Caller
from halteres.agent.transports import command_line as cli
from halteres.agent.transports.command_line import as_command, command_name
from halteres.cli import follow
from halteres.next_step import Advice, NextStep, Placeholder, Remedy, then, written
from halteres.runs.directory import RunDirectory


class Table:
    """Stands in for `call`: keeps what it was asked, answers as it was told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.drafts: list[str] = []
        self.reply = Reply(body={})
        self.next: Advice = NextStep("rl_list_runs")

    async def __call__(
        self, name: str, arguments: Mapping[str, Any] | None, caller: Caller
    ) -> Reply:
        self.asked.append((name, dict(arguments or {})))
        self.drafts.append(caller.draft)
        return replace(
            self.reply, body={**self.reply.body, "next": written(self.next, caller.write)}
        )


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    monkeypatch.delenv("HALTERES_SESSION", raising=False)
    return tmp_path


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    found = Table()
    monkeypatch.setattr(cli, "call", found)
    return found


def rl(*words: str) -> Result:
    return CliRunner().invoke(cli.tools_app(), words)


def halteres(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from halteres.cli.main import main; main()", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "name", "arguments"),
    [
        ("list-environments", "rl_list_environments", {}),
        (
            "list-environments --query sums --refresh",
            "rl_list_environments",
            {"query": "sums", "refresh": True},
        ),
        ("select-environment arithmetic", "rl_select_environment", {"name": "arithmetic"}),
        ("get-current-config --detail full", "rl_get_current_config", {"detail": "full"}),
        ("get-current-config --field model", "rl_get_current_config", {"field": "model"}),
        ("edit-config group_size 16", "rl_edit_config", {"field": "group_size", "value": "16"}),
        (
            "edit-config group_size 16 --draft b",
            "rl_edit_config",
            {"field": "group_size", "value": "16", "draft": "b"},
        ),
        (
            "edit-config learning_rate -- -1e-5",
            "rl_edit_config",
            {"field": "learning_rate", "value": "-1e-5"},
        ),
        ("edit-config name plain", "rl_edit_config", {"field": "name", "value": "plain"}),
        ('edit-config name "16"', "rl_edit_config", {"field": "name", "value": '"16"'}),
        ("edit-config name null", "rl_edit_config", {"field": "name", "value": "null"}),
        ("edit-config tags [1,2]", "rl_edit_config", {"field": "tags", "value": "[1,2]"}),
        (
            'edit-config --changes {"group_size":16}',
            "rl_edit_config",
            {"changes": {"group_size": 16}},
        ),
        ("start-training --dry-run", "rl_start_training", {"dry_run": True}),
        (
            "start-training --no-dry-run --name 7",
            "rl_start_training",
            {"dry_run": False, "name": "7"},
        ),
        ("check-status", "rl_check_status", {}),
        ("check-status 12345678", "rl_check_status", {"run_id": "12345678"}),
        (
            "check-status 3fa9 --wait-s 45 --until terminal",
            "rl_check_status",
            {"run_id": "3fa9", "wait_s": 45, "until": "terminal"},
        ),
        (
            "stop-training 3fa9 --mode after_step",
            "rl_stop_training",
            {"run_id": "3fa9", "mode": "after_step"},
        ),
        (
            "get-rollouts 3fa9 --step 0 --n 1",
            "rl_get_rollouts",
            {"run_id": "3fa9", "step": 0, "n": 1},
        ),
        ("compare-runs a b --no-plot", "rl_compare_runs", {"run_ids": ["a", "b"], "plot": False}),
        (
            "test-inference --models a --models b --temperature 1",
            "rl_test_inference",
            {"models": ["a", "b"], "temperature": 1},
        ),
    ],
)
def test_words_become_the_arguments_that_were_given(
    table: Table, words: str, name: str, arguments: dict[str, Any]
) -> None:
    ended = rl(*words.split())
    assert ended.exit_code == 0, ended.output
    assert table.asked == [(name, arguments)]


def test_the_help_lists_every_tool_with_its_first_sentence() -> None:
    ended = halteres("rl", "--help")
    listed = " ".join(ended.stdout.split())
    for tool in TOOLS:
        assert f"{command_name(tool)} {cli.first_sentence(tool.description)}" in listed
    assert "Look at a run: state, step, reward, trend, alerts with remedies, time left." in listed


def test_the_help_of_a_command_tells_what_its_arguments_mean() -> None:
    told = " ".join(rl("get-results", "--help").output.split())
    assert "[RUN_ID]" in told
    assert "rows of the history [default: 10]" in told
    assert "--plot / --no-plot show the curves as a picture too" in told
    assert "--mode now|after_step" in " ".join(rl("stop-training", "--help").output.split())


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("list-runs --limit x", "limit"),
        ("list-runs --limit 900", "limit"),
        ("stop-training a --mode softly", "mode"),
        ("edit-config --changes {group_size}", "changes"),
        ("select-environment", "name"),
        ("check-status --wait-s 3601", "wait_s"),
    ],
)
def test_a_wrong_value_is_answered_as_on_every_transport(words: str, field: str) -> None:
    ended = rl(*words.split(), "--json")
    assert ended.exit_code == 1
    answer = json.loads(ended.stdout)
    assert (answer["code"], answer["field"]) == ("invalid_arguments", field)


def test_json_is_the_compact_answer_alone(table: Table) -> None:
    table.reply = Reply(body={"message": "Größe", "config": {"a": 1.5, "b": None}})
    ended = rl("list-runs", "--json")
    assert ended.exit_code == 0
    assert (
        ended.stdout == '{"message":"Größe","config":{"a":1.5,"b":null},"next":"rl_list_runs()"}\n'
    )
    assert ended.stderr == ""


def test_an_error_is_exit_code_1_also_where_the_call_itself_succeeded(table: Table) -> None:
    table.reply = Reply(body={"run_id": "3fa9", "status": "failed", "error": "Out of memory."})
    for words in (("check-status",), ("check-status", "--json")):
        ended = rl(*words)
        assert ended.exit_code == 1
        assert "Out of memory." in ended.stdout
        assert ended.stderr == ""


def test_a_failed_call_is_told_on_stderr_with_what_to_do(table: Table) -> None:
    body = {"error": "Run 'x' not found.", "code": "run_not_found"}
    table.reply, table.next = (
        Reply(body=body, failed=True, status=404),
        NextStep.of("rl_check_status", "3fa9"),
    )
    ended = rl("check-status", "x")
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert ended.stderr.splitlines() == [
        "error: Run 'x' not found.",
        "code  run_not_found",
        "next: halteres rl check-status 3fa9",
    ]


def test_people_get_lines_tables_and_whole_paths(table: Table, home: Path) -> None:
    picture = home / ("long" * 30) / "plot.png"
    body = {
        "runs": [
            {"run_id": "3fa9c1d2", "status": "running", "reward": 0.41},
            {"run_id": "77aa0b1c", "status": "failed", "reward": None, "code": "gpu_oom"},
        ],
        "config": {"model": "halteres/tiny", "group_size": 8},
        "lines": ["first line of a log", "x" * 250],
        "metrics": {"nested": {"a": 1}, "flag": True},
        "tags": [],
        "rollouts": [{"prompt": "1 + 1?\nThink.", "score": 1.0}],
    }
    table.reply, table.next = (
        Reply(body=body, images=(picture,)),
        NextStep.of("rl_get_results", plot=True),
    )
    lines = rl("list-runs").stdout.splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert lines[0].split() == ["runs", "run_id", "status", "reward", "code"]
    assert lines[1].split() == ["3fa9c1d2", "running", "0.41"]
    assert lines[2].split() == ["77aa0b1c", "failed", "–", "gpu_oom"]
    assert "config    model=halteres/tiny  group_size=8" in lines
    assert "lines     first line of a log" in lines
    assert "          " + "x" * 250 in lines
    assert "metrics   nested  a=1" in lines
    assert "          flag    yes" in lines
    assert "tags      –" in lines
    assert "rollouts  prompt  1 + 1?" in lines
    assert f"picture: {picture}" in lines
    assert lines[-1] == "next: halteres rl get-results --plot"


def test_a_draft_is_the_sessions_unless_a_call_names_one(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    rl("get-current-config")
    monkeypatch.setenv("HALTERES_SESSION", "mine")
    rl("get-current-config")
    assert table.drafts == ["default", "mine"]


@pytest.mark.parametrize(
    ("advice", "command"),
    [
        (NextStep("rl_list_runs"), "halteres rl list-runs"),
        (
            NextStep.of("rl_check_status", "3fa9", wait_s=45, until="step>=3"),
            "halteres rl check-status 3fa9 --wait-s 45 --until 'step>=3'",
        ),
        (
            NextStep("rl_stop_training", {"run_id": "3fa9"}, "Stop it"),
            "Stop it: halteres rl stop-training 3fa9",
        ),
        (NextStep.of("rl_edit_config", "group_size", 16), "halteres rl edit-config group_size 16"),
        (
            NextStep.of("rl_edit_config", changes={"group_size": 12, "env.name": "a (b)"}),
            """halteres rl edit-config --changes '{"group_size": 12, "env.name": "a (b)"}'""",
        ),
        (
            NextStep.of(
                "rl_start_training", resume_from="3f", changes={"a": None}, dry_run=True, name=None
            ),
            """halteres rl start-training --resume-from 3f --changes '{"a": null}' --dry-run""",
        ),
        (
            NextStep.of("rl_compare_runs", ["a", "b"], plot=False),
            "halteres rl compare-runs a b --no-plot",
        ),
        (
            then(
                NextStep("rl_list_environments"),
                NextStep.of("rl_select_environment", Placeholder("name")),
            ),
            "halteres rl list-environments then halteres rl select-environment NAME",
        ),
        (
            ("mend it, then ", NextStep.of("rl_list_runs", limit=3), "."),
            "mend it, then halteres rl list-runs --limit 3.",
        ),
        (
            Remedy(
                (NextStep("rl_stop_training", {"run_id": "3fa9"}),),
                "see",
                (NextStep("rl_list_runs"),),
            ),
            "halteres rl stop-training 3fa9; see halteres rl list-runs",
        ),
        ("rl_list_runs takes: status, limit", "rl_list_runs takes: status, limit"),
        (NextStep("rl_unknown", {"run_id": "3fa9"}), 'rl_unknown("3fa9")'),
    ],
)
def test_the_calls_of_an_answer_are_told_as_commands(advice: Advice, command: str) -> None:
    assert written(advice, as_command) == command


def test_a_text_of_somebody_else_that_looks_like_a_call_stays_as_it_is(table: Table) -> None:
    table.reply = Reply(body={"completion": "Say rl_list_runs() now."})
    assert "Say rl_list_runs() now." in rl("get-rollouts").stdout


def test_every_word_of_a_tools_command_reaches_it() -> None:
    ended = halteres("rl", "stop-training", "--mode", "softly", "--json", "--", "-x")
    assert ended.returncode == 1
    assert json.loads(ended.stdout)["field"] == "mode"
    ended = halteres("rl", "no-such-tool")
    assert ended.returncode == 2
    assert "No such command" in ended.stderr


def test_who_only_watches_leaves_the_run_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(run: RunDirectory) -> None:
        raise KeyboardInterrupt

    def stop(run: RunDirectory, **_: Any) -> None:
        raise AssertionError("the run was stopped")

    monkeypatch.setattr(follow, "report_of", interrupted)
    monkeypatch.setattr(follow, "stop_run", stop)
    said = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        follow.follow(RunDirectory(home / "aaaa1111"), Console(file=said), may_stop=False)
    assert said.getvalue() == "Left to itself. Look at it with: halteres runs status aaaa1111\n"


def test_watching_wants_a_run() -> None:
    ended = halteres("watch")
    assert (ended.returncode, ended.stderr) == (
        1,
        "error: There is no run to watch. Try: halteres quickstart\n",
    )
    assert "Run 'ffff' not found." in halteres("watch", "ffff").stderr
