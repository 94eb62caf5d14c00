"""Reading run directories that no supervisor holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from halteres.errors import NotFound
from halteres.runs.directory import RunDirectory, find_run, list_runs, runs_home
from halteres.runs.state import RunState, write_state
from halteres.runs.tail import Tail


def make(run_id: str, created_at: float, name: str = "") -> RunDirectory:
    """A completed run."""
    path = runs_home() / run_id
    path.mkdir(parents=True)
    state = RunState(
        run_id=run_id,
        name=name or f"arithmetic-{run_id}",
        environment="arithmetic",
        environment_file="/nowhere.py",
        interpreter="/python",
        base_model="halteres/tiny",
        tokenizer="/nowhere",
        total_steps=1,
        created_at=created_at,
        status="completed",
    )
    write_state(path / "run.json", state)
    return RunDirectory(path)


@pytest.fixture
def runs(home: Path) -> list[RunDirectory]:
    made = [make("aaaa1111", 1.0), make("aaaa2222", 3.0, name="mine"), make("bbbb3333", 2.0)]
    (runs_home() / ".new-cccc4444").mkdir()
    (runs_home() / "stranger").mkdir()
    return made


def test_runs_are_listed_newest_first_and_nothing_else_is(runs: list[RunDirectory]) -> None:
    assert [run.run_id for run in list_runs()] == ["aaaa2222", "bbbb3333", "aaaa1111"]


def test_no_runs_are_no_error(home: Path) -> None:
    assert list_runs() == []


@pytest.mark.parametrize(
    ("asked", "found"), [("bbbb3333", "bbbb3333"), ("b", "bbbb3333"), ("aaaa2", "aaaa2222"), ("mine", "aaaa2222")]
)
def test_a_run_is_found_by_id_beginning_or_name(runs: list[RunDirectory], asked: str, found: str) -> None:
    assert find_run(asked).run_id == found


def test_an_unknown_run_offers_the_nearest(runs: list[RunDirectory]) -> None:
    with pytest.raises(NotFound, match=r"Run 'bbbb3334' not found\. Did you mean bbbb3333\?"):
        find_run("bbbb3334")


def test_an_ambiguous_beginning_lists_what_fits(runs: list[RunDirectory]) -> None:
    with pytest.raises(NotFound, match=r"'aaaa' fits 2 runs\. They are aaaa2222 \(mine\), aaaa1111"):
        find_run("aaaa")


@pytest.mark.parametrize("asked", ["", "../etc", "*"])
def test_strange_names_are_not_found(runs: list[RunDirectory], asked: str) -> None:
    with pytest.raises(NotFound):
        find_run(asked)


def test_a_tail_gives_each_whole_line_once_and_leaves_out_broken_ones(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    tail = Tail(file)
    assert tail.fresh() == []
    file.write_text('{"step": 1}\nnot json\n{"step": 2}\n{"st')
    assert tail.fresh() == [{"step": 1}, {"step": 2}]
    with file.open("a") as stream:
        stream.write('ep": 3}\n')
    assert tail.fresh() == [{"step": 3}]
    assert tail.fresh() == []
