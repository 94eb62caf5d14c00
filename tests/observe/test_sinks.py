"""A run's metrics elsewhere: the real W&B client, offline and against a stand-in of its server;
TensorBoard's files.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from deadlines import wait_until

from halteres.config.settings import RunSettings, Settings
from halteres.observe import sinks
from halteres.observe.metrics import append_row, read_rows
from halteres.observe.sinks import Job, SinkReport, forward, read_reports

pytestmark = pytest.mark.runs

RUN_ID = "3fa9c1d2"
KEY = "a1b2c3d4" * 5
WITHIN_S = 60
LATE = "W&B's server did not take the last rows within 5 s."

STEPS = [
    {"step": 0, "t": 100.0, "src": "eval", "eval/percent_correct": 0.25},
    {
        "step": 1,
        "t": 101.0,
        "src": "trainer",
        "train/loss": None,
        "reward/mean": 0.5,
        "logprobs/diff": 0.0,
    },
    {"step": 1, "t": 102.0, "src": "env", "train/percent_correct": 0.5, "mine/words": 3},
]
LATER = [
    {"step": 3, "t": 104.0, "src": "trainer", "train/loss": -1.5, "reward/mean": 0.75},
    {"step": 2, "t": 105.0, "src": "eval", "eval/percent_correct": 0.5},
]
MERGED = [
    {"step": 0, "eval/percent_correct": 0.25},
    {
        "step": 1,
        "reward/mean": 0.5,
        "logprobs/diff": 0.0,
        "train/percent_correct": 0.5,
        "mine/words": 3,
    },
    {"step": 2, "eval/percent_correct": 0.5},
    {"step": 3, "train/loss": -1.5, "reward/mean": 0.75},
]


def run_with(folder: Path, *names: Any, rows: list[dict[str, Any]] = STEPS) -> Path:
    """The folder of a run that has these sinks and has written these rows."""
    run = folder / RUN_ID
    run.mkdir()
    settings = Settings(
        run=RunSettings(sinks=names, tags=("a", "b"), wandb_entity="team", wandb_project="sums")
    )
    (run / "settings.json").write_text(settings.model_dump_json())
    write(run, rows)
    return run


def write(run: Path, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        append_row(run / "metrics.jsonl", row)


@contextmanager
def forwarding(run: Path, *, server_s: float = 10, **variables: str) -> Iterator[None]:
    """The process, until the run has ended and it has finished."""
    patience = f"sinks.SERVER_WITHIN_S, sinks.FLUSH_WITHIN_S = {server_s}, {WITHIN_S}"
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "NETRC"))
    }
    alone = {
        "HOME": str(run.parent),
        "WANDB_ERROR_REPORTING": "false",
        "NO_PROXY": "127.0.0.1",
        **variables,
    }
    with (run / "sinks.log").open("ab") as log:
        command = [
            sys.executable,
            "-c",
            f"from halteres.observe import sinks; {patience}; sinks.main()",
            str(run),
        ]
        child = subprocess.Popen(command, env={**inherited, **alone}, stdout=log, stderr=log)
    try:
        yield
        child.terminate()
        assert child.wait(WITHIN_S) == 0, (run / "sinks.log").read_text()
    finally:
        child.kill()
        child.wait()


def opened(run: Path, name: Any) -> SinkReport:
    """The report of a sink, once it is known how it is."""

    def known() -> SinkReport | None:
        report = read_reports(run).get(name)
        return report if report and report.state != "starting" else None

    report = wait_until(known, WITHIN_S, str(run / "sinks.log"))
    assert report is not None
    return report


def inspected(folder: str, *options: str) -> list[dict[str, Any]]:
    """What W&B's own reader finds in a run's folder, or its history without W&B's own names."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *options, folder]
    output = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=WITHIN_S
    ).stdout
    if options:
        return [json.loads(output)]
    records = map(json.loads, output.splitlines())
    return [
        _metrics(record["history"]["item"]) for record in records if record["type"] == "history"
    ]


def _metrics(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith("_")}


class WandbServer(ThreadingHTTPServer):
    """As much of W&B's server as its client needs to believe in it: runs are created, histories
    taken.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rows: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        # until then nothing is answered but that a run was created
        self.goes_on = threading.Event()
        self.is_complete = threading.Event()
        self.goes_on.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def handle(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a client that gave up
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = json.loads(
            gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        )
        self.server.keys.add(self.headers.get("Authorization"))
        if "upsertBucket" in asked.get("query", ""):
            return self._answer(
                {
                    "data": {
                        "upsertBucket": {"bucket": self._run(asked["variables"]), "inserted": True}
                    }
                }
            )
        self.server.goes_on.wait(WITHIN_S)
        history = asked.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
        self.server.rows += [_metrics(json.loads(line)) for line in history]
        if asked.get("complete"):
            self.server.is_complete.set()
        files = {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": []}}
        return self._answer({"data": files if "createRunFiles" in asked.get("query", "") else {}})

    def _run(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.server.runs.append(asked)
        project = {
            "id": "p",
            "name": asked["project"],
            "entity": {"id": "e", "name": asked["entity"]},
        }
        return {
            "id": "1",
            "name": asked["name"],
            "displayName": asked["displayName"],
            "project": project,
        }

    def _answer(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def wandb_server() -> Iterator[WandbServer]:
    server = WandbServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.goes_on.set()
    server.shutdown()
    server.server_close()


@contextmanager
def silent_server() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_without_a_key_wandb_keeps_every_row_under_its_own_name_in_the_runs_folder(
    tmp_path: Path,
) -> None:
    run = run_with(tmp_path, "wandb")
    with forwarding(run):
        report = opened(run, "wandb")
        write(run, LATER)
    assert (report.state, report.url) == ("offline", None)
    (folder,) = (run / "wandb").glob("offline-run-*")
    assert report.folder == str(folder) and (folder / f"run-{RUN_ID}.wandb").is_file()
    assert (
        report.note is not None
        and "API key" in report.note
        and report.note.endswith(f"wandb sync {folder}")
    )
    assert inspected(str(folder)) == MERGED
    (summary,) = inspected(str(folder), "--summary")
    assert (summary["name"], summary["project"], summary["tags"]) == (
        f"arithmetic-{RUN_ID}",
        "sums",
        ["a", "b"],
    )
    assert summary["state"] == "finished"
    assert summary["config"]["trainer"]["learning_rate"] == Settings().trainer.learning_rate


def test_with_a_key_the_rows_arrive_at_wandbs_server_and_its_url_is_told(
    tmp_path: Path, wandb_server: WandbServer
) -> None:
    run = run_with(tmp_path, "wandb")
    with forwarding(run, WANDB_API_KEY=KEY, WANDB_BASE_URL=wandb_server.url):
        report = opened(run, "wandb")
        assert (report.state, report.url) == (
            "online",
            f"{wandb_server.url}/team/sums/runs/{RUN_ID}",
        )
        write(run, LATER)
    assert wandb_server.is_complete.is_set()
    assert wandb_server.rows == MERGED
    first = wandb_server.runs[0]
    assert (first["entity"], first["project"], first["displayName"]) == (
        "team",
        "sums",
        f"arithmetic-{RUN_ID}",
    )
    assert all(wandb_server.keys), "the key is sent"
    assert KEY not in (run / "sinks.json").read_text() + (run / "events.jsonl").read_text()


@pytest.mark.parametrize("dead", ["refuses", "never answers"])
def test_a_dead_wandb_server_leaves_the_rows_to_be_uploaded_later(
    tmp_path: Path, dead: str
) -> None:
    run = run_with(tmp_path, "wandb", "tensorboard")
    with silent_server() as silent:
        url = silent if dead == "never answers" else "http://127.0.0.1:9"
        with forwarding(run, server_s=2, WANDB_API_KEY=KEY, WANDB_BASE_URL=url):
            assert opened(run, "tensorboard").state == "offline"
            report = opened(run, "wandb")
    assert report.state == "offline" and report.folder is not None
    assert inspected(report.folder) == MERGED[:2]


def test_a_wandb_server_that_dies_later_holds_nothing_up_and_what_it_missed_is_kept(
    tmp_path: Path, wandb_server: WandbServer
) -> None:
    wandb_server.goes_on.clear()
    run = run_with(tmp_path, "wandb")
    with forwarding(run, server_s=5, WANDB_API_KEY=KEY, WANDB_BASE_URL=wandb_server.url):
        online = opened(run, "wandb")
    report = read_reports(run)["wandb"]
    assert (online.state, report.state, report.url) == ("online", "failed", online.url)
    assert (
        report.note == f"{LATE} Upload what it kept: wandb sync {report.folder}" and report.folder
    )
    assert inspected(report.folder) == MERGED[:2]


def test_tensorboard_gets_the_numbers_of_every_step(tmp_path: Path) -> None:
    run = run_with(tmp_path, "tensorboard")
    with forwarding(run):
        report = opened(run, "tensorboard")
        write(run, [*LATER, {"step": 4, "t": 106.0, "src": "env", "mine/text": "no number"}])
    assert (report.state, report.note) == ("offline", f"tensorboard --logdir {run / 'tensorboard'}")
    (file,) = (run / "tensorboard").iterdir()
    content = file.read_bytes()
    assert all(name in content for name in (b"reward/mean", b"eval/percent_correct", b"mine/words"))
    assert b"mine/text" not in content


class Recorded:
    """A sink that keeps what it is given."""

    report = SinkReport(state="offline")

    def __init__(self, job: Job) -> None:
        self.rows: list[Any] = []
        self.is_closed = False

    def write(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.is_closed = True


def job(run: Path) -> Job:
    return Job(
        path=run, settings=Settings.model_validate_json((run / "settings.json").read_bytes())
    )


def over() -> threading.Event:
    """A run that has ended."""
    event = threading.Event()
    event.set()
    return event


def test_a_sink_that_is_not_installed_or_breaks_is_told_with_its_remedy_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Recorded] = []

    def absent(job: Job) -> Any:
        raise ModuleNotFoundError("No module named 'trackio'", name="trackio")

    def breaks(job: Job) -> Any:
        sink = Recorded(job)
        sink.write = lambda row: 1 / 0  # type: ignore[assignment]
        return sink

    def works(job: Job) -> Any:
        kept.append(Recorded(job))
        return kept[0]

    monkeypatch.setattr(sinks, "SINKS", {"trackio": absent, "wandb": breaks, "tensorboard": works})
    run = run_with(tmp_path, "wandb", "trackio", "tensorboard")
    forward(job(run), over())
    reports = read_reports(run)
    assert [reports[name].state for name in ("wandb", "trackio", "tensorboard")] == [
        "failed",
        "failed",
        "offline",
    ]
    assert (
        reports["trackio"].note
        == "The package trackio is not installed here. pip install 'halteres[trackio]'"
    )
    assert reports["wandb"].note == "wandb raised ZeroDivisionError: division by zero."
    assert [row["step"] for row in kept[0].rows] == [0, 1] and kept[0].is_closed
    events = read_rows(run / "events.jsonl")
    assert {(it["sink"], it["state"]) for it in events if it["type"] == "sink"} >= {
        ("wandb", "failed"),
        ("trackio", "failed"),
        ("tensorboard", "offline"),
    }


def test_a_sink_that_hangs_holds_up_neither_the_others_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, kept = threading.Event(), list[Recorded]()

    def hangs(job: Job) -> Any:
        answered.wait(WITHIN_S)

    def works(job: Job) -> Any:
        kept.append(Recorded(job))
        return kept[0]

    monkeypatch.setattr(sinks, "SINKS", {"wandb": hangs, "tensorboard": works})
    monkeypatch.setattr(sinks, "FLUSH_WITHIN_S", 0.5)
    run = run_with(tmp_path, "wandb", "tensorboard")
    try:
        forward(job(run), over())
        assert read_reports(run)["wandb"].state == "failed"
        assert [row["step"] for row in kept[0].rows] == [0, 1] and kept[0].is_closed
    finally:
        answered.set()
