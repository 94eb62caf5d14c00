"""`--json`: every verb that reads prints one JSON object and nothing else; a tool's values where a
tool reads the same.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent import run_fixtures
from agent.run_fixtures import told
from typer.main import get_command
from typer.testing import CliRunner

from halteres.cli.main import app
from halteres.cli.output import print_json
from halteres.runs.directory import RunDirectory

RUN = "aaaa1111"

READS: dict[str, tuple[str, ...]] = {
    "doctor": (),
    "env list": (),
    "keys list": (),
    "models list": (),
    "runs connect": (RUN,),
    "runs list": (),
    "runs logs": (RUN,),
    "runs note": (RUN,),
    "runs status": (RUN,),
    "runs tag": (RUN,),
    "variables": ("--url", "http://127.0.0.1:9"),
    "watch": (RUN,),
}
"""Verbs that read what is there, and what they are given here."""

RUNS_LONG = {
    "chat",
    "dpo",
    "env eval",
    "export",
    "gateway run",
    "models add",
    "quickstart",
    "reward calibrate",
    "reward check",
    "reward eval",
    "reward rank",
    "reward train",
    "sft",
    "train",
}
"""Verbs that compute something and then tell it; tests of their own read their JSON."""

OTHERS = {
    "checkpoints add": "prints one path",
    "env serve": "is a server",
    "groups export": "writes JSON lines",
    "groups import": "writes to a server",
    "groups view": "is for eyes: `groups export` writes the same as JSON lines",
    "init": "writes files",
    "install-agent": "writes files",
    "keys create": "prints one key",
    "keys revoke": "writes a file",
    "mcp": "is a server",
    "models remove": "writes files",
    "reward data": "writes files",
    "reward export": "writes files",
    "reward serve": "is a server",
    "rl": "is the tools, each with --json",
    "runs report": "writes a page",
    "runs stop": "changes a run",
    "serve control": "is a server",
    "serve trajectories": "is a server",
    "tools": "has --format",
    "ui": "is a server",
    "version": "prints one word",
}


def verbs(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every verb of the command line, with the command behind it."""
    for name, below in command.commands.items():
        here = f"{path} {name}".strip()
        if hasattr(below, "commands"):
            yield from verbs(below, here)
        else:
            yield here, below


def test_every_verb_has_json_or_a_reason_to_have_none() -> None:
    found = dict(verbs(get_command(app)))
    with_json = {
        name
        for name, command in found.items()
        if any("--json" in parameter.opts for parameter in command.params)
    }
    assert with_json == READS.keys() | RUNS_LONG
    assert found.keys() - with_json == OTHERS.keys()


@pytest.mark.parametrize("verb", READS)
def test_what_it_prints_is_one_json_object(verb: str, finished: RunDirectory) -> None:
    shown = CliRunner().invoke(app, [*verb.split(), *READS[verb], "--json"])
    if verb == "runs connect":  # a run that has ended has no servers: nothing on standard output
        assert (shown.exit_code, shown.stdout) == (1, "")
        return
    assert shown.exit_code == 0, shown.output
    assert isinstance(json.loads(shown.stdout), dict)
    assert len(shown.stdout.splitlines()) == 1


def read(*words: str) -> dict[str, Any]:
    shown = CliRunner().invoke(app, [*words, "--json"])
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)


def answer(tool: str, **arguments: Any) -> dict[str, Any]:
    return asyncio.run(told(tool, **arguments))


def test_a_verb_has_the_values_of_the_tool_that_reads_the_same(finished: RunDirectory) -> None:
    assert read("runs", "list")["runs"] == answer("rl_list_runs")["runs"]
    status = answer("rl_check_status", run_id=RUN)
    shown = read("runs", "status", RUN)
    del status["next"], shown["next"]  # the tool's own words are marked for its reader
    assert shown == status
    results = answer("rl_get_results", run_id=RUN)
    assert read("watch", RUN)["improvement"] == results["improvement"]
    health = answer("rl_health_check")
    doctor = read("doctor")
    assert (doctor["status"], doctor["active_runs"]) == (health["status"], health["active_runs"])
    listed = answer("rl_list_environments")["environments"]
    rows = {row["name"]: row for row in read("env", "list")["environments"]}
    assert {row["name"]: row["file_path"] for row in listed} == {
        name: row["file_path"] for name, row in rows.items()
    }


def test_a_list_of_runs_holds_no_secret(
    finished: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-planted-0123456789")
    run_fixtures.change(finished, name="with sk-planted-0123456789")
    assert read("runs", "list")["runs"][0]["name"] == "with ***"
    assert read("runs", "list")["runs"] == answer("rl_list_runs")["runs"]


def test_what_is_no_json_is_null_or_a_question_mark(capsys: pytest.CaptureFixture[str]) -> None:
    """An environment's evaluation returns what it likes."""
    print_json({"eval/mean": math.nan, "eval/most": math.inf, "text": "\ud800é"})
    shown = capsys.readouterr().out
    assert shown == '{"eval/mean":null,"eval/most":null,"text":"?é"}\n'


def test_the_end_of_an_export_is_told_as_json(finished: RunDirectory, tmp_path: Path) -> None:
    shutil.rmtree(finished.path / "adapter")
    folder = finished.path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        json.dumps({"r": 2, "base_model_name_or_path": "halteres/tiny"})
    )
    header = json.dumps({"__metadata__": {"format": "pt"}}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    facts = read("export", RUN, "--out", str(tmp_path / "out"))
    assert (facts["format"], facts["base_model"]) == ("peft", "halteres/tiny")
    assert facts["run_id"] == RUN
    assert "--lora-modules" in facts["serve"]
    assert (tmp_path / "out" / "README.md").is_file()
