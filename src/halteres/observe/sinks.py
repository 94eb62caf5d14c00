"""Metrics where people look: `python -m halteres.observe.sinks RUN` forwards a run's to W&B,
trackio and TensorBoard.

In a process of its own each sink follows metrics.jsonl by itself; the run waits for none of them.
sinks.json says where each is, or why not and what to do. A row has the same names everywhere; a
resumed run's old rows come first.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from halteres import process
from halteres.config import environ
from halteres.config.settings import Settings, SinkName
from halteres.errors import HalteresError, boundary
from halteres.files import NOT_JSON, read_regular, replace_file
from halteres.observe.metrics import Row, Tail, WriteFailed, append_row, merge_by_step
from halteres.redaction import Redactor

FILE = "sinks.json"
POLL_S = 1.0
# for W&B's server to answer first (then the run is kept offline), and to take the last rows
SERVER_WITHIN_S = 12.0
# for what the sinks have not written yet once the run has ended
FLUSH_WITHIN_S = SERVER_WITHIN_S + 5
PACKAGES: Mapping[SinkName, str] = {
    "wandb": "wandb",
    "trackio": "trackio",
    "tensorboard": "tensorboardX",
}

_log = logging.getLogger("halteres.observe.sinks")


class SinkFailed(HalteresError):
    """A sink could not be opened or written; the run goes on without it."""

    code = "sink_failed"


class SinkReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sink, as sinks.json tells of it."""

    # offline: on this disk; off: by its own settings
    state: Literal["starting", "online", "offline", "off", "failed"]
    url: str | None = None
    folder: str | None = None
    is_complete: bool = False  # the run has ended, and all of its rows were written
    note: str | None = None  # how to look at it; of one that is not online, why and what to do

    @property
    def line(self) -> str:
        """State, and where it is or what is wrong with it."""
        detail = self.url if self.state == "online" else self.note
        return f"{self.state}: {detail}" if detail else self.state


class Reports:
    """The writer of sinks.json and of the events of the sinks."""

    def __init__(self, run: Path) -> None:
        self._run, self._lock, self._redactor = run, threading.Lock(), Redactor.of_this_process()

    def put(self, name: SinkName, report: SinkReport) -> None:
        """Say how a sink is now. What the disk does not take is logged."""
        facts = self._redactor.json(msgspec.to_builtins(report))
        _log.info("%s: %s", name, facts)
        with self._lock:
            try:
                reports = {**read_reports(self._run), name: facts}
                replace_file(
                    self._run / FILE,
                    msgspec.json.format(msgspec.json.encode(reports), indent=1) + b"\n",
                )
                if report.state != "starting" and not report.is_complete:
                    append_row(
                        self._run / "events.jsonl",
                        {"t": time.time(), "type": "sink", "sink": name, **facts},
                    )
            except (OSError, WriteFailed) as error:
                _log.warning("%s", error)

    def failed(self, name: SinkName, why: str) -> None:
        """Say that a sink has failed. What it had written is kept; where W&B's is, that can be
        uploaded later.
        """
        before = read_reports(self._run).get(name, SinkReport(state="starting"))
        next = (
            f" Upload what it kept: wandb sync {before.folder}"
            if name == "wandb" and before.folder
            else ""
        )
        self.put(name, msgspec.structs.replace(before, state="failed", note=f"{why}{next}"))


def read_reports(run: Path) -> dict[SinkName, SinkReport]:
    """The sinks of the run in this folder; none where it has none, or where they cannot be read."""
    try:
        return msgspec.json.decode(read_regular(run / FILE), type=dict[SinkName, SinkReport])
    except (OSError, *NOT_JSON):
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The run whose metrics are forwarded."""

    path: Path
    settings: Settings

    @property
    def name(self) -> str:
        """What the sinks call it."""
        return self.settings.run.default_name(self.path.name)

    @property
    def config(self) -> dict[str, Any]:
        """Its settings, by section; those that are named like secrets are struck out."""
        return Redactor.of_this_process().json(self.settings.model_dump(mode="json"))


class Wandb:
    """One W&B run: online where W&B finds a key and its server answers, else in
    RUN/wandb/offline-run-*.

    Rows carry the training step as the metric `step`, which is the axis of all others: W&B's own
    counter only rises, and an evaluation's row may come many steps late.
    """

    def __init__(self, job: Job) -> None:
        import wandb

        self._wandb = wandb
        settings = wandb.Settings(
            init_timeout=SERVER_WITHIN_S,
            finish_timeout=SERVER_WITHIN_S,
            finish_timeout_raises=True,
            console="off",
            silent=True,
            disable_git=True,
        )
        facts: dict[str, Any] = {
            "project": job.settings.run.project,
            "entity": job.settings.run.wandb_entity or environ.wandb_entity(),
            "name": job.name,
            "id": job.path.name,
            "dir": str(job.path),
            "tags": list(job.settings.run.tags),
            "config": job.config,
            "settings": settings,
        }
        why = "W&B's own settings say so (WANDB_MODE)"
        try:
            self._run = wandb.init(**facts)
        except wandb.Error as error:
            why = str(error).partition("\n")[0].rstrip(".")
            wandb.teardown()  # it would take the id for one that is in use
            self._run = wandb.init(**facts, mode="offline")
        folder = str(Path(self._run.dir).parent)
        self.report = SinkReport(
            state="offline", folder=folder, note=f"{why}. Upload it: wandb sync {folder}"
        )
        if self._run.disabled:
            self.report = SinkReport(state="off", note=f"{why}.")
        elif self._run.url:
            self.report = SinkReport(state="online", url=self._run.url, folder=folder)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Row) -> None:
        """Log one row, under the time at which it was written."""
        figures = {name: value for name, value in row.items() if value is not None and name != "t"}
        self._run.log({**figures, **({"_timestamp": row["t"]} if "t" in row else {})})

    def close(self) -> None:
        """Upload what is not uploaded yet, for a while."""
        try:
            self._run.finish()
        except TimeoutError:
            raise SinkFailed(
                f"W&B's server did not take the last rows within {SERVER_WITHIN_S:.0f} s."
            ) from None
        finally:
            self._wandb.teardown()  # returns when its process has written the run's file whole


class Trackio:
    """A run in trackio's local database: TRACKIO_DIR, or RUN/trackio."""

    def __init__(self, job: Job) -> None:
        folder = environ.trackio_dir(job.path / "trackio")
        trackio: Any = importlib.import_module("trackio")
        self._run = trackio.init(
            project=job.settings.run.project, name=job.name, config=job.config, embed=False
        )
        note = f'TRACKIO_DIR={folder} trackio show --project "{job.settings.run.project}"'
        self.report = SinkReport(state="offline", folder=str(folder), note=note)

    def write(self, row: Row) -> None:
        """Log one row; its names of `step` and time are trackio's own."""
        figures = {
            name: value
            for name, value in row.items()
            if value is not None and name not in ("step", "t")
        }
        self._run.log(figures, step=row["step"])

    def close(self) -> None:
        """Write what is queued."""
        self._run.finish()


class TensorBoard:
    """TensorBoard's event files in RUN/tensorboard; numbers alone."""

    def __init__(self, job: Job) -> None:
        folder = str(job.path / "tensorboard")
        self._writer: Any = importlib.import_module("tensorboardX").SummaryWriter(folder)
        self.report = SinkReport(
            state="offline", folder=folder, note=f"tensorboard --logdir {folder}"
        )

    def write(self, row: Row) -> None:
        """Write each number as a scalar."""
        for name, value in row.items():
            if isinstance(value, int | float) and name not in ("step", "t"):
                self._writer.add_scalar(name, value, row["step"], walltime=row.get("t"))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


SINKS: Mapping[SinkName, Callable[[Job], Wandb | Trackio | TensorBoard]] = {
    "wandb": Wandb,
    "trackio": Trackio,
    "tensorboard": TensorBoard,
}
"""Each imports its package when it is opened; whatever it raises ends it alone."""


def forward(job: Job, ending: threading.Event) -> None:
    """Forward rows until `ending` is set, or no sink is left; then give them FLUSH_WITHIN_S.

    Each sink has a thread of its own: one that hangs holds up no other.
    """
    reports = Reports(job.path)
    threads: dict[SinkName, threading.Thread] = {}
    for name in job.settings.sinks:
        threads[name] = threading.Thread(
            target=_follow, args=(name, job, reports, ending), name=name, daemon=True
        )
        threads[name].start()
    while any(thread.is_alive() for thread in threads.values()) and not ending.wait(POLL_S):
        pass
    ends = time.monotonic() + FLUSH_WITHIN_S
    for name, thread in threads.items():
        thread.join(max(0.0, ends - time.monotonic()))
        if thread.is_alive():
            reports.failed(
                name, f"It did not finish within {FLUSH_WITHIN_S:.0f} s of the run's end."
            )


def _follow(name: SinkName, job: Job, reports: Reports, ending: threading.Event) -> None:
    try:
        with boundary(SinkFailed, name):
            try:
                sink = SINKS[name](job)
            except ModuleNotFoundError as error:
                package = PACKAGES[name]
                if error.name != package:
                    raise
                next = f"pip install 'halteres[{name}]'"
                raise SinkFailed(
                    f"The package {package} is not installed here.", next=next
                ) from None
            reports.put(name, sink.report)
            tail = Tail(job.path / "metrics.jsonl")
            is_last = False
            while not is_last:
                # before the look: nothing that was written by then is missed
                is_last = ending.wait(POLL_S)
                for row in merge_by_step(tail.fresh()):
                    sink.write(row)
            sink.close()
            reports.put(name, msgspec.structs.replace(sink.report, is_complete=True))
    except HalteresError as error:
        _log.warning("%s", error.sentence, exc_info=error)
        reports.failed(name, error.sentence)


def main(arguments: Sequence[str] | None = None) -> None:
    """Forward the metrics of the run in this folder, until SIGTERM."""
    process.begin("sinks")
    (folder,) = sys.argv[1:] if arguments is None else arguments
    run = Path(folder).absolute()
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    forward(
        Job(path=run, settings=Settings.model_validate_json(read_regular(run / "settings.json"))),
        ending,
    )
    sys.stdout.flush()
    # what a package registered for the exit would wait for a server that does not answer
    os._exit(0)


if __name__ == "__main__":
    main()
