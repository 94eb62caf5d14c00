"""Reading run directories that no supervisor holds."""

from __future__ import annotations

import fcntl
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from halteres.errors import NotFound
from halteres.observe.metrics import Tail, append_row
from halteres.runs.directory import RunAmbiguous, RunDirectory, find_run, list_runs, runs_home
from halteres.runs.reading.evaluations import before_and_after
from halteres.runs.state import RunState, is_locked, lock_taken, read_state, write_state
from halteres.runs.supervision.supervisor import export_adapter


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
    ("asked", "found"),
    [("bbbb3333", "bbbb3333"), ("b", "bbbb3333"), ("aaaa2", "aaaa2222"), ("mine", "aaaa2222")],
)
def test_a_run_is_found_by_id_beginning_or_name(
    runs: list[RunDirectory], asked: str, found: str
) -> None:
    assert find_run(asked).run_id == found


def test_an_unknown_run_offers_the_nearest(runs: list[RunDirectory]) -> None:
    with pytest.raises(
        NotFound,
        match=r"Run 'bbbb3334' not found\. Did you mean bbbb3333 \(arithmetic, completed\)\?",
    ):
        find_run("bbbb3334")


def test_an_ambiguous_beginning_lists_what_fits(runs: list[RunDirectory]) -> None:
    with pytest.raises(
        NotFound, match=r"'aaaa' fits 2 runs\. They are aaaa2222 \(mine\), aaaa1111"
    ):
        find_run("aaaa")


def test_of_runs_that_go_on_from_each_other_under_one_name_the_newest_is_meant(
    runs: list[RunDirectory],
) -> None:
    parent = None
    for number, run in enumerate(runs):
        state = read_state(run.path / "run.json")
        changed = structs.replace(
            state, name="sums", resumed_from=parent, created_at=1000.0 + number
        )
        write_state(run.path / "run.json", changed)
        parent = run.run_id
    assert find_run("sums").run_id == runs[-1].run_id
    state = read_state(runs[-1].path / "run.json")
    write_state(runs[-1].path / "run.json", structs.replace(state, resumed_from=None))
    with pytest.raises(RunAmbiguous):
        find_run("sums")


@pytest.mark.parametrize("asked", ["", "../etc", "*"])
def test_strange_names_are_not_found(runs: list[RunDirectory], asked: str) -> None:
    with pytest.raises(NotFound):
        find_run(asked)


def running(run: RunDirectory, **changes: Any) -> RunDirectory:
    """The run as it stands while it is under way, its supervisor being process 1 of another
    container.
    """
    supervisor = {"pid": 2**22 + 1, "start_time": 1, "boot_id": "elsewhere"}
    state = read_state(run.path / "run.json")
    write_state(
        run.path / "run.json",
        structs.replace(state, status="running", supervisor=supervisor, **changes),
    )
    return run


def test_a_run_whose_lock_is_held_is_alive_though_nobody_here_knows_its_pid(
    runs: list[RunDirectory],
) -> None:
    run = running(runs[0])
    with lock_taken(run.path / "lock"):
        assert run.state().status == "running"
    assert run.state().code == "supervisor_lost"


def test_a_reader_that_holds_the_lock_for_an_instant_is_no_supervisor(
    runs: list[RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = running(runs[0])
    with ExitStack() as verdict:
        verdict.enter_context(lock_taken(run.path / "lock"))
        monkeypatch.setattr("halteres.runs.directory.time.sleep", lambda _: verdict.close())
        assert not run.supervised


def test_readers_do_not_take_each_other_for_a_supervisor(runs: list[RunDirectory]) -> None:
    run = running(runs[0])
    (run.path / "lock").touch()
    with (run.path / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not is_locked(run.path / "lock")


def test_events_are_counted_by_their_lines(runs: list[RunDirectory]) -> None:
    file = runs[0].path / "events.jsonl"
    file.write_text('{"type": "a"}\n{"type": "b"}\n{"ty')
    assert runs[0].events() == [{"type": "a", "seq": 1}, {"type": "b", "seq": 2}]


def test_the_copied_adapter_is_as_open_as_its_run(runs: list[RunDirectory]) -> None:
    run = runs[0]
    source = run.path / "service" / "checkpoints" / "x_0" / "sampler_weights" / "final"
    source.mkdir(parents=True)
    (source / "adapter_config.json").write_text("{}")
    source.chmod(0o700)
    (source / "adapter_config.json").chmod(0o600)
    run.path.chmod(0o755)
    row = {"step": 1, "final": True, "sampler_path": "tinker://x:0/sampler_weights/final"}
    append_row(run.path / "checkpoints.jsonl", row)
    adapter = export_adapter(run)
    assert stat.S_IMODE(adapter.stat().st_mode) == 0o755
    assert stat.S_IMODE((adapter / "adapter_config.json").stat().st_mode) == 0o644


def test_an_evaluation_without_answers_is_passed_over(runs: list[RunDirectory]) -> None:
    run = runs[0]
    for step, score in ((0, 0.0), (2, 1.0), (10, None)):
        folder = run.path / "evals" / f"step_{step}"
        folder.mkdir(parents=True)
        if score is not None:
            append_row(
                folder / "samples.jsonl",
                {"prompt": "q", "completion": f"at {step}", "score": score},
            )
    (task,) = before_and_after(run)
    assert (task.before, task.after, task.learnt) == ("at 0", "at 2", True)


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
