"""One damaged file of one run takes no list away, and a look at that run is answered."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halteres.cli.main import app
from halteres.config.environ import read_stop_request
from halteres.config.resolution import resolve_settings
from halteres.dashboard.events import SERVICES, stamps
from halteres.dashboard.runs import list_of_runs
from halteres.errors import InvalidConfig
from halteres.runs.directory import RunDirectory

from .run_fixtures import RUN, add_alert, change, make_run, replied, told
from .run_results import add_group, completion, trained

OTHER = "3fa0aaaa"
WITHIN_S = 20

FILES = (
    *(
        "run.json",
        "settings.json",
        "config.yaml",
        "config.resolved.json",
        "results.json",
        "sinks.json",
    ),
    *(
        "metrics.jsonl",
        "events.jsonl",
        "checkpoints.jsonl",
        "rollouts/step_1.jsonl",
        "logs/trainer.log",
    ),
)

DEEP = b'{"step": 1, "type": "alert", "odd": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
LINES: dict[str, bytes] = {
    "nesting": DEEP,
    "numbers": (
        b'{"type": "alert", "step": 1e300, "reward/mean": 1e300, "eval/percent_correct": '
        b'1e308, "t": 1e300}\n'
    ),
    "long numbers": b'{"step": %s, "reward/mean": %s}\n' % (b"9" * 5000, b"9" * 400),
    "NUL": b'{"step": 1, "type": "alert", "rule": "\\u0000", "reward/mean": "\\u0000"}\n\x00\x00\n',
    "a huge line": b'{"step": 1, "text": "' + b"x" * 5_000_000 + b'"}\n',
}


def as_line(line: bytes) -> Callable[[Path], None]:
    """The line stands before what the file holds; a file that is one value becomes this one."""

    def damage(file: Path) -> None:
        kept = file.read_bytes() if file.suffix in (".jsonl", ".log") and file.exists() else b""
        file.write_bytes(line + kept)

    return damage


def as_fifo(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def as_folder(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.mkdir()


DAMAGE: dict[str, Callable[[Path], None]] = {
    **{name: as_line(line) for name, line in LINES.items()},
    "a FIFO": as_fifo,
    "a folder": as_folder,
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    make_run(OTHER, created_at=1.0, ended_at=2.0)
    run = trained(RUN, steps=3, created_at=3.0, ended_at=4.0)
    add_group(run, 1, completion("42", 1.0), completion("41"))
    add_alert(run)
    run.log("trainer").write_text("one line\n")
    return run


@pytest.mark.runs
@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", FILES)
async def test_a_damaged_file_leaves_every_list_and_every_look_an_answer(
    run: RunDirectory, name: str, kind: str
) -> None:
    DAMAGE[kind](run.path / name)
    async with asyncio.timeout(WITHIN_S):
        runs = {row["run_id"]: row for row in (await told("rl_list_runs"))["runs"]}
        page = {row["run_id"]: row for row in (await asyncio.to_thread(list_of_runs))["runs"]}
        watched = set(await asyncio.to_thread(stamps)) - {SERVICES}
        assert set(runs) == set(page) == watched == {RUN, OTHER}
        assert (runs[OTHER]["status"], page[OTHER]["status"]) == ("completed", "completed")
        if name == "run.json":
            assert runs[RUN]["status"] == page[RUN]["status"] == "unreadable"
            assert "run.json" in runs[RUN]["error"]
        shown = await asyncio.to_thread(CliRunner().invoke, app, ["runs", "list"])
        assert (shown.exit_code, RUN in shown.output, OTHER in shown.output) == (0, True, True), (
            shown.output
        )
        for tool in ("rl_check_status", "rl_get_results", "rl_get_rollouts", "rl_get_logs"):
            answer = (await replied(tool, run_id=RUN)).body
            assert answer.get("code") != "internal", (tool, answer)
        assert (await replied("rl_compare_runs", run_ids=[RUN, OTHER])).body.get(
            "code"
        ) != "internal"


@pytest.mark.parametrize("changes", [{"created_at": 1e300}, {"ended_at": 1e300}, {"name": "a\0b"}])
async def test_a_run_of_impossible_facts_is_listed_beside_the_others(
    run: RunDirectory, changes: dict[str, object]
) -> None:
    change(run, **changes)
    assert {row["run_id"] for row in (await told("rl_list_runs"))["runs"]} == {RUN, OTHER}
    assert {row["run_id"] for row in list_of_runs()["runs"]} == {RUN, OTHER}


async def test_a_run_that_no_code_foresaw_is_listed_with_its_error(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever reading one run raises, the others are told."""

    def broken(run: RunDirectory) -> float:
        if run.run_id == RUN:
            raise ZeroDivisionError("a new kind of damage")
        return 1.0

    monkeypatch.setattr("halteres.agent.status.last_reward", broken)
    rows = {row["run_id"]: row for row in (await told("rl_list_runs"))["runs"]}
    assert "a new kind of damage" in rows[RUN]["error"]
    assert rows[OTHER]["reward"] == 1.0
    shutil.rmtree(run.path)


@pytest.mark.parametrize("kind", DAMAGE)
async def test_a_damaged_draft_counts_as_empty_and_can_be_selected_anew(
    run: RunDirectory, tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "drafts" / "default.json"
    file.parent.mkdir(exist_ok=True)
    DAMAGE[kind](file)
    async with asyncio.timeout(WITHIN_S):
        answer = (await replied("rl_get_current_config", detail="brief")).body
    assert answer["code"] == "no_environment"


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_request_to_stop_is_one(tmp_path: Path, kind: str) -> None:
    DAMAGE[kind](tmp_path / "stop.json")
    assert read_stop_request(tmp_path / "stop.json") == "now"


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("edits", [(), ("trainer.total_steps=2",)])
def test_a_damaged_config_file_is_refused_by_name(
    tmp_path: Path, kind: str, edits: tuple[str, ...]
) -> None:
    file = tmp_path / "config.yaml"
    DAMAGE[kind](file)
    with pytest.raises(InvalidConfig) as refused:
        resolve_settings("arithmetic", file, edits)
    assert kind == "numbers" or str(file) in refused.value.sentence
