"""What a run of the environment `agent` needs, found before anything of the run is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halteres.cli.main import app
from halteres.config.resolution import resolve_settings
from halteres.errors import HalteresError, InvalidConfig
from halteres.runs.directory import runs_home
from halteres.runs.planning.plan import plan_run

TASKS = '{"question": "1 + 1", "answer": "2"}\n{"question": "1 + 2", "answer": "3"}\n'

REWARDS = {
    "good.py": "def reward(folder, answer, **_):\n    return [0.0 for _ in folder]\n",
    "typo.py": "def reward(folder, anser, **_):\n    return [0.0 for _ in folder]\n",
    "broken.py": "import a_module_that_is_not_there\n",
    "ending.py": "import sys\nsys.exit(7)\n",
    "number.py": "reward = 3\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's files lie."""
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "home"))
    (tmp_path / "tasks.jsonl").write_text(TASKS, encoding="utf-8")
    (tmp_path / "one.jsonl").write_text(TASKS.partition("\n")[0], encoding="utf-8")
    (tmp_path / "list.jsonl").write_text("[]\n", encoding="utf-8")
    for name, text in REWARDS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"tasks": ""}, "env.tasks", "There are no tasks."),
        ({"tasks": "{folder}/nowhere.jsonl"}, "env.tasks", "nowhere.jsonl cannot be read"),
        ({"tasks": "~nobody_here/tasks.jsonl"}, "env.tasks", "tasks.jsonl cannot be read"),
        ({"tasks": "/" + 300 * "x"}, "env.tasks", "File name too long"),
        ({"tasks": "{folder}/list.jsonl"}, "env.tasks", "A task is a JSON object."),
        ({"command": "a_program_of_nobody"}, "env.command", "'a_program_of_nobody' is not found"),
        ({"command": "true {quest}"}, "env.command", "The tasks' fields are question."),
        ({"command": "true {answer}"}, "env.command", "env.hidden keeps it"),
        ({"workspace": "{folder}/nowhere"}, "env.workspace", "There is no folder"),
        ({"workspace": "~nobody_here"}, "env.workspace", "There is no folder"),
        ({"workspace": "/" + 300 * "x"}, "env.workspace", "There is no folder"),
        ({"reward": "{folder}/nowhere.py:reward"}, "env.reward", "there is no file"),
        ({"reward": "{folder}/good.py:rewrd"}, "env.reward", "Did you mean 'reward'?"),
        ({"reward": "{folder}/number.py:reward"}, "env.reward", "It defines none."),
        ({"reward": "{folder}/typo.py:reward"}, "env.reward", "takes anser"),
        ({"reward": "{folder}/broken.py:reward"}, "env.reward", "a_module_that_is_not_there"),
        ({"reward": "{folder}/ending.py:reward"}, "env.reward", "with code 7"),
        ({"reward": "good"}, "env.reward", "names no function"),
    ],
)
def test_what_a_program_lacks_is_a_refusal_of_the_plan(
    folder: Path, changes: dict[str, str], field: str, words: str
) -> None:
    given = {"tasks": "{folder}/tasks.jsonl", "command": "true {{question}}", **changes}
    placed = {name: value.replace("{folder}", str(folder)) for name, value in given.items()}
    placed["command"] = placed["command"].replace("{{question}}", "{question}")
    edits = [f"env.{name}={value}" for name, value in placed.items()]
    refusal = plan_run(resolve_settings("agent", None, edits)).refusal
    assert refusal is not None
    assert words in refusal.sentence
    assert refusal.details["field"] == field


def test_a_program_that_has_all_it_needs_is_no_warning(folder: Path) -> None:
    edits = [
        f"env.tasks={folder / 'tasks.jsonl'}",
        "env.command=true {question}",
        f"env.reward={folder / 'good.py'}:reward",
        f"env.workspace={folder}",
    ]
    plan = plan_run(resolve_settings("agent", None, edits))
    assert plan.refusal is None
    assert [one for one in plan.warnings if "held-out" in one] == []


def test_a_function_that_prints_until_its_process_ends_is_taken(folder: Path) -> None:
    text = "import atexit, os\nos.write(1, b'begun')\natexit.register(print, 7)\n"
    (folder / "loud.py").write_text(text + REWARDS["good.py"], encoding="utf-8")
    assert checked_reward(folder, "loud.py") is None


def test_a_function_is_imported_with_the_keys_that_its_environment_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_JUDGE_KEY", "sk-1")
    text = f"import os\nos.environ['MY_JUDGE_KEY']\n{REWARDS['good.py']}"
    (folder / "keyed.py").write_text(text, encoding="utf-8")
    judge = {"base_url": "http://127.0.0.1:9/v1", "key_variable": "MY_JUDGE_KEY"}
    rewards = json.dumps([{"name": "judge", "judge": judge}])
    assert checked_reward(folder, "keyed.py", f"env.rewards={rewards}") is None
    refusal = checked_reward(folder, "keyed.py")
    assert refusal is not None
    assert "KeyError" in refusal.sentence


def test_fields_of_any_number_and_name_are_checked(folder: Path) -> None:
    """More than a command line has room for, and one that it cannot have."""
    fields = dict.fromkeys(["answer", "a\0b", *(f"{'x' * 500}{one}" for one in range(6000))], "")
    (folder / "tasks.jsonl").write_text(f"{json.dumps({'question': '', **fields})}\n")
    assert checked_reward(folder, "good.py") is None
    refusal = checked_reward(folder, "typo.py")
    assert refusal is not None
    assert "takes anser" in refusal.sentence


def checked_reward(folder: Path, file: str, *more: str) -> HalteresError | None:
    """The refusal of a plan with this file's function."""
    edits = [
        f"env.tasks={folder / 'tasks.jsonl'}",
        "env.command=true {question}",
        f"env.reward={folder / file}:reward",
        *more,
    ]
    return plan_run(resolve_settings("agent", None, edits)).refusal


def test_no_held_out_task_in_a_folder_is_a_warning_too(folder: Path) -> None:
    (folder / "train.jsonl").write_text(TASKS, encoding="utf-8")
    (folder / "test.jsonl").touch()
    edits = [f"env.tasks={folder}", "env.command=true {question}"]
    plan = plan_run(resolve_settings("agent", None, edits))
    assert plan.refusal is None
    [warning] = [one for one in plan.warnings if "held-out" in one]
    assert "None of the tasks in env.tasks is held out" in warning
    assert "test.jsonl" in warning


def test_one_task_alone_is_a_warning_with_what_to_do(folder: Path) -> None:
    edits = [f"env.tasks={folder / 'one.jsonl'}", "env.command=true {question}"]
    plan = plan_run(resolve_settings("agent", None, edits))
    assert plan.refusal is None
    [warning] = [one for one in plan.warnings if "held-out" in one]
    assert "None of the tasks in env.tasks is held out" in warning
    assert "add a task" in warning


def test_gateway_run_leaves_no_run_behind_where_its_inputs_are_bad(folder: Path) -> None:
    words = ["--tasks", str(folder / "tasks.jsonl"), "--reward", str(folder / "broken.py")]
    ended = CliRunner().invoke(app, ["gateway", "run", *words, "--", "true", "{question}"])
    assert isinstance(ended.exception, InvalidConfig)
    assert "a_module_that_is_not_there" in ended.exception.sentence
    assert not runs_home().exists()
