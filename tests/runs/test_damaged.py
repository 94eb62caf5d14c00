"""A run whose files were damaged is there all the same, and says which file it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec import structs

from halteres.config.settings import Settings
from halteres.errors import InvalidConfig, NotFound
from halteres.runs.directory import RunDirectory, find_run, known_runs, list_runs
from halteres.runs.reading.named_weights import adapter_of, weights_of
from halteres.runs.servers import Server, Servers, servers_of
from halteres.runs.state import RunState, RunUnreadable, write_state
from halteres.runs.supervision.controller import POLICY, Budget
from halteres.runs.supervision.run_processes import engine_of

RUN, OTHER = "3fa9c1d2", "3fa0aaaa"


def run_of(home: Path, run_id: str) -> RunDirectory:
    """A run that has completed."""
    path = home / "runs" / run_id
    path.mkdir(parents=True)
    state = RunState(
        run_id=run_id,
        name=f"arithmetic-{run_id}",
        environment="arithmetic",
        environment_file="/nowhere.py",
        interpreter="/python",
        base_model="halteres/tiny",
        tokenizer="/nowhere",
        total_steps=1,
        created_at=1.0,
        status="completed",
    )
    write_state(path / "run.json", state)
    return RunDirectory(path)


@pytest.fixture
def run(home: Path) -> RunDirectory:
    run_of(home, OTHER)
    return run_of(home, RUN)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"run_id": 3}', b"\xff\xfe", b'{"step": "many"}']
)
def test_a_run_with_a_damaged_run_json_is_listed_and_names_the_file(
    run: RunDirectory, content: bytes
) -> None:
    file = run.path / "run.json"
    file.write_bytes(content)
    assert {entry.run_id: entry.facts.status for entry in known_runs()} == {
        RUN: "unreadable",
        OTHER: "completed",
    }
    for asked in (RUN, "3fa9"):
        with pytest.raises(RunUnreadable, match=str(file)) as caught:
            find_run(asked).state()
        assert caught.value.code == "run_unreadable"
        assert "did_you_mean" not in caught.value.details
    assert [one.run_id for one in list_runs()] == [OTHER]


def test_a_folder_without_run_json_is_no_run(run: RunDirectory) -> None:
    (run.path / "run.json").unlink()
    assert [entry.run_id for entry in known_runs()] == [OTHER]
    with pytest.raises(NotFound) as caught:
        run.state()
    assert caught.value.code == "not_found"


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"trainer": {"total_steps": "many"}}'])
def test_damaged_settings_name_their_file_without_the_library_that_reads_them(
    run: RunDirectory, content: str
) -> None:
    file = run.path / "settings.json"
    file.write_text(content)
    with pytest.raises(RunUnreadable) as caught:
        run.settings()
    assert str(file) in caught.value.sentence
    assert "pydantic" not in caught.value.sentence.lower()


@pytest.mark.parametrize("content", ["[]", "env: 3", "{", "a: b: c"])
def test_a_damaged_config_names_its_file(run: RunDirectory, content: str) -> None:
    (run.path / "config.yaml").write_text(content)
    with pytest.raises(RunUnreadable, match=str(run.path / "config.yaml")):
        run.environment_config()


def test_rows_that_are_no_checkpoints_are_passed_over(run: RunDirectory) -> None:
    good = {
        "name": "step_5",
        "step": 5,
        "state_path": "tinker://x/weights/step_5",
        "sampler_path": None,
    }
    odd = [
        {},
        {"step": "5", "state_path": "a"},
        {"step": None},
        {"step": 6, "state_path": 7},
        {"state_path": "b"},
    ]
    rows = [good, *odd]
    (run.path / "checkpoints.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in rows) + "[1]\n3\n{\n"
    )
    assert run.checkpoints() == [good]
    assert run.newest_checkpoint() == good


def test_a_run_is_named_also_where_a_folder_of_its_name_is(
    run: RunDirectory, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(here)
    (here / RUN).mkdir()
    row = {"sampler_path": f"tinker://{RUN}:0/sampler_weights/a", "step": 1}
    (run.path / "checkpoints.jsonl").write_text(json.dumps(row))
    (run.path / "settings.json").write_text(Settings().model_dump_json())
    (run.path / "adapter").mkdir()
    (run.path / "adapter" / "adapter_config.json").write_text("{}")
    assert weights_of(RUN).run == run
    assert adapter_of(RUN).folder == run.path / "adapter"
    for path in (f"./{RUN}", str(here)):
        with pytest.raises(NotFound, match="belongs to no run"):
            weights_of(path)
    monkeypatch.chdir(run.path)
    assert weights_of(".").run == run


@pytest.mark.parametrize(
    "content",
    [
        b'{"extra": ' + b"[" * 100_000,
        b'{"api_url": "http://["}',
        b'{"api_url": "x"}',
        b'{"api_key": 3}',
        None,
    ],
)
def test_a_run_whose_wiring_is_damaged_has_servers_without_a_key(
    run: RunDirectory, content: bytes | None
) -> None:
    """`None`: it is a FIFO, which nobody writes into."""
    wiring, urls = (
        run.path / "wiring.json",
        {"service": "http://127.0.0.1:1", "api": "http://127.0.0.1:2"},
    )
    write_state(run.path / "run.json", structs.replace(run.state(), urls=urls))
    wiring.write_bytes(content) if content is not None else os.mkfifo(wiring)
    known = servers_of(run)
    service = Server(url=urls["service"])
    assert known == Servers(service=service, trajectories=Server(url=urls["api"]), sampling=service)


def test_what_a_supervisor_reads_of_its_run_is_never_waited_for(run: RunDirectory) -> None:
    for name in (POLICY, "service.json"):
        os.mkfifo(run.path / name)
    assert engine_of(run.path) is None
    with pytest.raises(InvalidConfig, match="no regular file"):
        Budget.of(run, run.state())


def test_a_run_that_an_earlier_version_named_otherwise_can_be_read(run: RunDirectory) -> None:
    """Names of a new run hold no such character."""
    name = "two\u200djoined"
    settings = {"run": {"name": name, "tags": ["a\nb"]}}
    (run.path / "settings.json").write_text(json.dumps(settings))
    assert run.settings().run.name == name
