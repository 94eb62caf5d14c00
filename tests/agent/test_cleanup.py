"""What is kept in HALTERES_HOME, and what is removed when something new is begun."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from halteres.agent.call import DAY_S, PICTURES, TESTS, clean_up
from halteres.agent.drafts import choose, drafts_folder, editing, lock_of
from halteres.agent.table import BY_NAME
from halteres.agent.tool import Caller
from halteres.agent.trial.folder import all_folders, new_folder
from halteres.runs.directory import runs_home
from halteres.runs.state import lock_taken

from .draft_fixtures import told
from .run_fixtures import change, make_run, supervised


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    return tmp_path


def aged(path: Path, days: float) -> Path:
    then = time.time() - days * DAY_S
    os.utime(path, (then, then))
    return path


def test_the_newest_tests_are_kept_and_those_under_way() -> None:
    for number in range(TESTS + 3):
        test = new_folder()
        (test.path / "request.json").write_text("{}")
        test.lock.touch()
        aged(test.path, 100 - number)
    oldest = sorted(all_folders(), key=lambda test: test.path.stat().st_mtime)[:3]
    half_gone = oldest[0].path.with_name(".gone-t-00000000")
    half_gone.mkdir()
    with lock_taken(oldest[1].lock):
        clean_up()
    left = [test.test_id for test in all_folders()]
    assert len(left) == TESTS + 1
    assert [test.test_id in left for test in oldest] == [False, True, False]
    assert not half_gone.exists()


def test_drafts_that_nobody_named_go_after_a_month_and_those_with_names_stay() -> None:
    for handle in ("mcp-0000aaaa", "mcp-1111bbbb", "mcp-2222cccc", "page-0000aaaa", "mine"):
        choose(Caller(draft=handle), None, "arithmetic", {})
        aged(drafts_folder() / f"{handle}.json", 29 if handle == "mcp-1111bbbb" else 31)
    with editing(Caller(draft="mcp-2222cccc"), None):
        clean_up()
    assert {file.stem for file in drafts_folder().glob("*.json")} == {
        "mcp-1111bbbb",
        "mcp-2222cccc",
        "mine",
    }
    assert not lock_of(drafts_folder() / "mcp-0000aaaa.json").exists()


def test_looks_stay_as_long_as_their_run_goes_on(home: Path) -> None:
    ended = make_run("aaaa1111")
    change(ended, status="completed")
    (home / "looks").mkdir()
    for run_id in ("aaaa1111", "bbbb2222", "cccc3333"):
        (home / "looks" / f"{run_id}.json").touch()
    with supervised(make_run("bbbb2222")):
        clean_up()
    assert [file.stem for file in (home / "looks").glob("*.json")] == ["bbbb2222"]


def test_the_newest_pictures_are_kept(home: Path) -> None:
    cache = home / "cache"
    cache.mkdir()
    (cache / "engine_speeds.json").touch()
    for number in range(PICTURES + 2):
        (cache / f"compare-{number}.png").touch()
        aged(cache / f"compare-{number}.png", number)
    clean_up()
    left = {file.name for file in cache.iterdir()}
    assert left == {"engine_speeds.json", *(f"compare-{number}.png" for number in range(PICTURES))}


def test_what_a_killed_start_left_goes_after_a_day_and_no_run_ever_does() -> None:
    run = make_run("aaaa1111")
    aged(run.path, 1000)
    for name, days in ((".new-1", 2), (".new-2", 0.5), (".new-3", 2)):
        folder = runs_home() / name
        folder.mkdir()
        (folder / "lock").touch()
        aged(folder, days)
    with lock_taken(runs_home() / ".new-3" / "lock"):
        clean_up()
    assert {entry.name for entry in runs_home().iterdir()} == {"aaaa1111", ".new-2", ".new-3"}


def test_a_home_that_cannot_be_looked_through_fails_nobody(home: Path) -> None:
    for name in ("tests", "drafts", "looks", "cache", "runs"):
        (home / name).write_text("no folder")
    clean_up()


async def test_selecting_an_environment_tidies(home: Path) -> None:
    (home / "looks").mkdir()
    (home / "looks" / "cccc3333.json").touch()
    await told("rl_select_environment", name="arithmetic")
    assert not list((home / "looks").iterdir())


async def test_a_look_tidies_nothing(home: Path) -> None:
    (home / "looks").mkdir()
    (home / "looks" / "cccc3333.json").touch()
    await told("rl_list_runs")
    assert list((home / "looks").iterdir())


@pytest.mark.parametrize(
    "name",
    [
        "rl_test_inference",
        "rl_evaluate",
        "rl_evaluate_reward_model",
        "rl_start_training",
        "rl_train_reward_model",
    ],
)
def test_what_begins_something_new_is_no_look(name: str) -> None:
    assert not BY_NAME[name].hints.read_only
