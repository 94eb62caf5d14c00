"""What the documents say: every call and every command in them is one that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halteres.agent.table import BY_NAME
from halteres.config.discovery import ENTRY_POINTS
from halteres.runs.diagnosis.rules import RULES

from .calls_in_texts import calls_in, calls_in_blocks, check_call, check_command, commands_in

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(document.read_text() for document in DOCUMENTS)
TOOLS = (ROOT / "docs" / "agent-tools.md").read_text()

CALLS = sorted({*calls_in(TEXT), *calls_in_blocks(TEXT)})
COMMANDS = sorted(set(commands_in(TEXT)))


def test_calls_and_commands_were_found() -> None:
    assert len(CALLS) >= 9 and len(COMMANDS) >= 25


@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_one_that_the_tool_takes(call: str) -> None:
    check_call(call)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_exists_with_these_options(command: str) -> None:
    check_command(command)


def test_every_tool_and_no_other_is_in_the_table_of_tools() -> None:
    rows = re.findall(r"^\| (`rl_.*?) \|", TOOLS, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(rl_\w+)`", row)} == set(BY_NAME)


def test_the_pages_count_the_tools() -> None:
    counts = re.findall(r"\b(\d+) tools\b", TEXT)
    assert counts == [str(len(BY_NAME))] * 2


def test_every_alert_is_in_the_table_of_alerts() -> None:
    told = TOOLS[TOOLS.index("## Alerts") : TOOLS.index("## The operator")]
    named = {
        name
        for row in re.findall(r"^\| (`.*?) \|", told, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    noticed = {
        "temperature",
        "own_advantages",
        "truncated_sampling",
        "stalled",
        "calls_refused",
        "groups_failed",
        "scorer_uncaged",
        "env_stuck",
        "tasks_quarantined",
    }
    assert named == {rule.name for rule in RULES} | noticed


def test_targets_of_make_are_there() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z0-9-]+)", TEXT, re.MULTILINE))
    assert named and named <= targets


def test_the_folders_that_are_searched_are_named() -> None:
    for name in ("HALTERES_ENVIRONMENTS", "HALTERES_HOME/environments", ENTRY_POINTS):
        assert f"`{name}`" in TEXT
