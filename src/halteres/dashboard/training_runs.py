"""Training runs that scripts of the Tinker SDK made in this user's services, as the page shows
them: the list of all, one with its checkpoints, its curves.

Owns: which folders are looked at. Never: asks a service, or lists what a run of ours has trained:
that has its own place on the page.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from halteres.dashboard.curves import curves_of, spark_of
from halteres.errors import NotFound, boundary
from halteres.files import NOT_JSON, UnreadableFile, read_json, tail
from halteres.redaction import Redactor
from halteres.runs.directory import UNREADABLE, known_runs
from halteres.runs.state import is_locked
from halteres.service.keys import LOCAL
from halteres.service.running_services import read_cards, state_folders
from halteres.service.training_metrics import metrics_file
from halteres.service.training_run_records import (
    JournalUnreadable,
    TrainingRunRecord,
    read_training_runs,
)
from halteres.service.training_runs import RUN_KEY
from halteres.short_texts import clipped

MOST = 200  # that are listed; the newest
MOST_METADATA, LENGTH = 8, 60  # of one; characters of each, and of a name
IDLE_S = 600.0  # without a request

FINISHED = {"success": "completed", "errored": "failed", "interrupted": "stopped"}
"""What a client says when its session ends -> the state that the page shows."""


class _ServiceFile(msgspec.Struct, frozen=True):
    """STATE/service.json, of which this is a part."""

    url: str


@dataclass(frozen=True, slots=True)
class Service:
    """A state directory, and the service on it."""

    folder: Path
    url: str | None  # None: none runs

    @classmethod
    def of(cls, folder: Path) -> Service:
        """As it is now. The lock tells, not a pid: the service may run in another container."""
        url = None
        if is_locked(folder / "lock"):
            url = "starting"
            with suppress(UnreadableFile):
                url = read_json(folder / "service.json", _ServiceFile).url
        return cls(folder, url)


def rows_of_training_runs() -> list[dict[str, Any]]:
    """The newest training runs of all services as rows of the list of runs (`list_of_runs`), and a
    row for each service whose folder cannot be read.
    """
    found: list[tuple[Service, TrainingRunRecord]] = []
    unreadable: list[dict[str, Any]] = []
    for folder in state_folders():
        try:
            # whatever is wrong with one folder, the others stay
            with boundary(JournalUnreadable, f"Reading {folder}"):
                service = Service.of(folder)
                found += [(service, run) for run in _foreign(read_training_runs(folder))]
        except JournalUnreadable as error:
            unreadable.append(_unreadable_row(folder, error))
    found.sort(key=lambda pair: pair[1].created_at, reverse=True)
    return [*unreadable, *(_row(service, run) for service, run in found[:MOST])]


def view_of_training_run(training_run: str) -> dict[str, Any]:
    """One with its checkpoints, the newest first.

    Raises:
        NotFound: no service of this user has one of this id.
        JournalUnreadable: none of those that can be read; there are others.
    """
    service, run = _find(training_run)
    return {
        "id": run.id,
        "name": _name(run),
        "model": run.base_model,
        "rank": run.rank,
        "owner": _owner(run),
        "said": [*run.tags, *_metadata(run)],
        "status": _status(service, run),
        "service": service.url,
        "folder": str(service.folder),
        "created_at": run.created_at,
        "last_request_at": run.last_request_at,
        "step": _last_step(service, run),
        "checkpoints": [asdict(one) for one in reversed(run.checkpoints)],
        "now": time.time(),
    }


def training_metrics(
    training_run: str, names: Collection[str], within: tuple[int, int]
) -> dict[str, Any]:
    """Its curves, as `Curves.columns` has them. Raises as `view_of_training_run`."""
    service, run = _find(training_run)
    file, inode = metrics_file(service.folder, run.id), None
    with suppress(OSError):
        inode = os.stat(file).st_ino
    return curves_of(file, inode).columns(names, within=within)


def service_stamps() -> Iterator[object]:
    """Something that differs once a service of this user has recorded anything, began or ended."""
    yield from (card.is_live for card in read_cards())
    for folder in state_folders():
        for name in ("journal.sqlite", "journal.sqlite-wal", "service.json"):
            with suppress(OSError):
                facts = os.stat(folder / name)
                yield from (str(folder), name, facts.st_mtime_ns, facts.st_size)


def _find(training_run: str) -> tuple[Service, TrainingRunRecord]:
    unreadable: JournalUnreadable | None = None
    for folder in state_folders():
        try:
            for run in read_training_runs(folder, only=training_run):
                return Service.of(folder), run
        except JournalUnreadable as error:
            unreadable = error
    if unreadable is not None:
        raise unreadable
    raise NotFound(
        f"There is no training run '{clipped(training_run, LENGTH)}' in your services.",
        "Its service kept its state elsewhere, or the folder is gone.",
    )


def _foreign(runs: Collection[TrainingRunRecord]) -> list[TrainingRunRecord]:
    """Those that no run of this home has made."""
    named = {run.id: run.session_metadata.get(RUN_KEY) for run in runs}
    ours = set[str]()
    if any(named.values()):
        ours = {run.run_id for run in known_runs()}
    return [run for run in runs if named[run.id] not in ours]


_ROW: Mapping[str, Any] = {
    "environment": "Tinker script",
    "kind": "script",
    "phase": None,
    "total_steps": 0,
    "evaluation": None,
    "alerts": [],
    "error": None,
}
"""What is the same in every row."""


def _row(service: Service, run: TrainingRunRecord) -> dict[str, Any]:
    status = _status(service, run)
    ended_at = None
    if status != "running":
        ended_at = run.last_request_at
    about = [f"rank {run.rank or '?'}", *_metadata(run)]
    if _owner(run) is not None:
        about.insert(1, f"of {_owner(run)}")
    if run.display_name:
        about.insert(0, run.base_model)
    spark = spark_of(metrics_file(service.folder, run.id), "sft")
    return {
        **_ROW,
        "run_id": run.id,
        "name": _name(run),
        "model": " · ".join(about),
        "status": status,
        "step": _last_step(service, run),
        "created_at": run.created_at,
        "ended_at": ended_at,
        "reward": spark.reward,
        "curve": [float(f"{value:.4g}") for value in spark.rewards],
        "tags": list(run.tags),
    }


def _unreadable_row(folder: Path, error: JournalUnreadable) -> dict[str, Any]:
    changed_at = 0.0
    with suppress(OSError):
        changed_at = folder.stat().st_mtime
    return {
        **_ROW,
        "run_id": str(folder),
        "name": str(folder),
        "model": "a service's state",
        "status": UNREADABLE,
        "step": None,
        "created_at": changed_at,
        "ended_at": changed_at,
        "reward": None,
        "curve": [],
        "tags": [],
        "error": error.sentence,
    }


def _name(run: TrainingRunRecord) -> str:
    return clipped(run.display_name or run.base_model, LENGTH)


def _owner(run: TrainingRunRecord) -> str | None:
    """The tenant; None on a service without keys."""
    if run.tenant == LOCAL:
        return None
    return run.tenant


def _status(service: Service, run: TrainingRunRecord) -> str:
    if run.finished is not None:
        return FINISHED.get(run.finished, run.finished)
    if service.url is None:
        return "service ended"
    if time.time() - run.last_request_at > IDLE_S:
        return "idle"
    return "running"


def _metadata(run: TrainingRunRecord) -> list[str]:
    """What its client says of it and of its session."""
    # by its name a value may be a secret
    metadata = Redactor.of_this_process().json({**run.session_metadata, **run.user_metadata})
    said = [f"{name}: {value}" for name, value in metadata.items()]
    return [clipped(text, LENGTH) for text in said[:MOST_METADATA]]


def _last_step(service: Service, run: TrainingRunRecord) -> int | None:
    """Optimiser steps behind its weights, as far as anything was recorded of them."""
    with suppress(*NOT_JSON, AttributeError):
        for line in tail(metrics_file(service.folder, run.id), 1):
            step = json.loads(line).get("step")
            if type(step) is int:
                return step
    return max((one.version for one in run.checkpoints), default=None)
