"""The skills, and what a workspace tells an agent: every call in them can be made, every name is
one that there is.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import halteres
from halteres.agent import Tools
from halteres.agent.skills import WORKSPACE, example_environment, skill_folders, skills
from halteres.agent.table import BY_NAME
from halteres.agent.waiting import Until
from halteres.runs.diagnosis.rules import RULES

from .calls_in_texts import calls_in, check_call, read_call
from .transports import home_of

SOURCE = Path(halteres.__file__).parent
AGENTS = WORKSPACE / "AGENTS.md"
TEXTS = {
    file.parent.name: file.read_text() for file in (*(skill.file for skill in skills()), AGENTS)
}

each_text = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
each_folder = pytest.mark.parametrize("folder", skill_folders(), ids=lambda folder: folder.name)

NOTICES = {"temperature", "stalled"}
"""Alerts that no rule over rows raises."""


def front_of(folder: Path) -> dict[str, Any]:
    text = (folder / "SKILL.md").read_text()
    assert text.startswith("---\n")
    return yaml.safe_load(text.removeprefix("---\n").partition("\n---\n")[0])


def test_the_three_skills_are_there() -> None:
    assert [skill.name for skill in skills()] == [
        "debug-a-run",
        "train-with-rl",
        "write-an-environment",
    ]


@each_folder
def test_front_matter_keeps_to_the_format(folder: Path) -> None:
    """Agent Skills: which fields there may be, and how long they are."""
    front = front_of(folder)
    assert {"name", "description"} <= set(front)
    assert set(front) <= {
        "name",
        "description",
        "license",
        "compatibility",
        "metadata",
        "allowed-tools",
    }
    assert front["name"] == folder.name and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", front["name"])
    assert len(front["name"]) <= 64
    assert 0 < len(front["description"]) <= 1024 and "Use when" in front["description"]
    assert len(front.get("compatibility", "")) <= 500


@each_text
def test_a_text_is_short_enough_to_be_read(text: str) -> None:
    assert len(text) / 4 < 2000


CALLS = sorted({call for text in TEXTS.values() for call in calls_in(text)})


def test_calls_were_found() -> None:
    assert len(CALLS) > 25
    tools = {read_call(call)[0] for call in CALLS}
    assert set(BY_NAME) == tools, "a tool that no text speaks of"


@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_one_that_the_tool_takes(call: str) -> None:
    check_call(call)


@each_text
def test_what_to_wait_for_can_be_waited_for(text: str) -> None:
    for listed in re.findall(r"`until` may be (.*?)\.", text, re.DOTALL):
        for word in re.findall(r'"([^"]+)"', listed):
            Until.parse(word)


async def test_changes_in_a_call_are_changes_that_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home_of(tmp_path, monkeypatch)
    given = [
        arguments["changes"] for _, arguments in map(read_call, CALLS) if "changes" in arguments
    ]
    assert given
    for changes in given:
        told = await Tools().call("rl_select_environment", name="arithmetic", changes=changes)
        assert "error" not in told, told


def codes() -> set[str]:
    """Codes that an error has, or is given."""
    return set(re.findall(r'\bcode(?:, status)?(?:: \w+)? ?= ?"(\w+)"', source(), re.IGNORECASE))


def source() -> str:
    return "\n".join(file.read_text() for file in SOURCE.rglob("*.py"))


def test_codes_and_alerts_are_those_that_there_are() -> None:
    text = TEXTS["debug-a-run"]
    table = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    named = {code for row in table for code in re.findall(r"`(\w+)`", row)}
    named |= set(re.findall(r"code `(\w+)`", text))
    assert len(named) >= 8 and named <= codes(), named - codes()
    known = {rule.name for rule in RULES} | NOTICES
    told = {word for word in re.findall(r"`(\w+)`", text) if word in known}
    assert told == known, "an alert that the skill does not explain"


@each_text
def test_every_name_in_backticks_is_one_that_the_program_knows(text: str) -> None:
    """Fields of answers, settings, metrics, codes: whoever renames one finds the text that still
    has the old name.
    """
    names = set(
        re.findall(
            r"`([a-z]+(?:[_/.][a-z0-9_]+)+)(?:\(.*?\))?`", text.replace("mcp__halteres__", "")
        )
    )
    known = source()
    for name in names:
        for part in name.split("."):
            assert re.search(rf"\b{re.escape(part)}\b", known), name


# The example environment


def loaded() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_loader("example", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(example_environment(), "example.py", "exec"), module.__dict__)  # noqa: S102 - our own text
    return module


def test_the_example_pays_for_right_answers_alone() -> None:
    environment = object.__new__(loaded().SumsEnv)
    right = ["\\boxed{5}", "I think 4 + 4 - 3 is \\boxed{ 5 }.", "\\boxed{4} no, \\boxed{5}"]
    wrong = [
        "",
        "5",
        "\\boxed{}",
        "\\boxed{5 or 6}",
        "\\boxed{5} \\boxed{6}",
        "\\boxed{05.0}",
        environment.prompt((4, 4, 3)),
    ]
    assert [environment.score((4, 4, 3), text) for text in right] == [1.0] * len(right)
    assert [environment.score((4, 4, 3), text) for text in wrong] == [0.0] * len(wrong)
    assert environment.score((4, 4, 3), "\\boxed{" + "9" * 5000 + "}") == 0.0


def test_the_example_holds_its_evaluation_out() -> None:
    module = loaded()
    assert not set(module.TRAINING) & set(module.HELD_OUT)
    assert len(module.HELD_OUT) >= 50
    assert "\\boxed{}." in module.ASK.format(1, 2, 3)


def test_the_example_describes_itself(tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(example_environment())
    ended = subprocess.run(
        [sys.executable, str(file), "describe"], capture_output=True, text=True, check=True
    )
    described = json.loads(ended.stdout)
    assert described["name"] == "sums"


@pytest.mark.runs
async def test_the_built_in_model_can_be_trained_on_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the skill has it: found, selected, tested; both good and bad answers, scored as they ought
    to be.
    """
    home = home_of(tmp_path, monkeypatch)
    (home / "environments").mkdir()
    (home / "environments" / "sums.py").write_text(example_environment())
    tools = Tools()
    found = await tools.call("rl_list_environments", query="sums")
    assert [one["name"] for one in found["environments"]] == ["sums"] and "broken" not in found
    selected = await tools.call("rl_select_environment", name="sums")
    assert selected["file_path"] == found["environments"][0]["file_path"]
    tested = await tools.call("rl_test_inference", num_steps=2, group_size=16)
    while tested["status"] == "running":
        tested = await tools.call("rl_test_inference", test_id=tested["test_id"])
    assert tested["summary"]["trainable"] is True, tested
    assert tested["models_tested"][0]["score_range"] == [0, 1]
    module = await asyncio.to_thread(loaded)
    for sample in tested["samples"]:
        numbers = tuple(map(int, re.findall(r"\d", sample["prompt"])[:3]))
        environment = object.__new__(module.SumsEnv)
        assert environment.score(numbers, sample["best"]) == 1.0
        assert environment.score(numbers, sample["worst"]) == 0.0
