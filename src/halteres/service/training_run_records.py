"""Training runs as a service's journal records them, for other processes: read only, whether the
service runs or not.

Owns: what is read of the journal from outside. Never: writes into a state directory, reads a
request's body, or a key.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import Connection, select
from sqlalchemy.exc import SQLAlchemyError

from halteres.errors import ServerError
from halteres.service.durable.journal import (
    CHECKPOINTS,
    FILE,
    LAYOUT,
    MODELS,
    REQUESTS,
    SESSIONS,
)
from halteres.service.keys import Tenant

BUSY_S = 2.0  # how long a file that another process repairs is waited for


class JournalUnreadable(ServerError):
    """A journal that cannot be read, or that another version of Halteres wrote."""

    code = "journal_unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """Named weights."""

    path: str  # tinker://…
    version: int  # optimiser steps behind them
    size_bytes: int
    public: bool
    created_at: float  # unix s
    expires_at: float | None  # unix s


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRunRecord:
    """One training run, and its client's session."""

    id: str
    tenant: Tenant
    base_model: str
    rank: int | None  # None until its adapter is made
    # what its client says of it, and of the session
    user_metadata: Mapping[str, Any]
    session_metadata: Mapping[str, Any]
    tags: tuple[str, ...]
    display_name: str | None
    created_at: float  # unix s
    last_request_at: float  # unix s
    finished: str | None  # success, errored or interrupted; None: its client did not say
    checkpoints: tuple[CheckpointRecord, ...]  # oldest first


# Not the highest time: of a table with bodies of megabytes that would read every row.
_LAST_REQUEST = (
    select(REQUESTS.c.accepted_at)
    .where(REQUESTS.c.subject == MODELS.c.id)
    .order_by(REQUESTS.c.seq.desc())
    .limit(1)
    .scalar_subquery()
)
_TRAINING_RUNS = (
    select(
        *(MODELS.c[name] for name in ("id", "tenant", "base_model", "lora", "user_metadata")),
        MODELS.c.created_at,
        SESSIONS.c.user_metadata.label("session_metadata"),
        *(SESSIONS.c[name] for name in ("tags", "display_name", "finished", "finished_at")),
        _LAST_REQUEST.label("last_request_at"),
    )
    .outerjoin_from(MODELS, SESSIONS, SESSIONS.c.id == MODELS.c.session_id)
    .order_by(MODELS.c.created_at)
)
_CHECKPOINTS = select(
    *(CHECKPOINTS.c[name] for name in ("model_id", "path", "version", "size_bytes")),
    *(CHECKPOINTS.c[name] for name in ("public", "created_at", "expires_at")),
).order_by(CHECKPOINTS.c.created_at)


def read_training_runs(state: Path, only: str | None = None) -> list[TrainingRunRecord]:
    """The training runs of a state directory, oldest first; none where no service has been.

    Args:
        state: the directory.
        only: the id of the one that is wanted.

    Raises:
        JournalUnreadable: the journal is damaged, not ours to read, or of another version.
    """
    file = state / FILE
    if not file.is_file():
        return []
    runs, checkpoints = _TRAINING_RUNS, _CHECKPOINTS
    if only is not None:
        runs = runs.where(MODELS.c.id == only)
        checkpoints = checkpoints.where(CHECKPOINTS.c.model_id == only)
    engine = sa.create_engine("sqlite://", creator=lambda: _opened(file), poolclass=sa.NullPool)
    try:
        with engine.connect() as connection:
            _check_layout(connection)
            rows = connection.execute(runs).mappings().all()
            saved = connection.execute(checkpoints).mappings().all()
    except (SQLAlchemyError, sqlite3.Error, ValueError) as error:
        raise JournalUnreadable(
            f"The journal {file} cannot be read.",
            f"{error.args[0] if error.args else error}.",
            "See that it is yours to read. A service that is started on it says more.",
        ) from error
    of_run: dict[str, list[CheckpointRecord]] = {}
    for row in saved:
        facts = dict(row)
        of_run.setdefault(facts.pop("model_id"), []).append(CheckpointRecord(**facts))
    return [_record(dict(row), of_run.get(row["id"], [])) for row in rows]


def _opened(file: Path) -> sqlite3.Connection:
    """A connection that changes nothing. Beside a journal that its service has closed there is no
    write-ahead log, and a reader would leave one there, unless it takes the file as it is.
    """
    options = "mode=ro"
    if not file.with_name(f"{file.name}-wal").exists():
        options += "&immutable=1"
    return sqlite3.connect(
        f"file:{quote(str(file.absolute()))}?{options}",
        uri=True,
        timeout=BUSY_S,
        check_same_thread=False,
    )


def _check_layout(connection: Connection) -> None:
    found = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
    if found != LAYOUT:
        raise ValueError(f"its tables have layout {found}; this version reads layout {LAYOUT}")


def _record(row: dict[str, Any], checkpoints: list[CheckpointRecord]) -> TrainingRunRecord:
    now = time.time()
    there = tuple(one for one in checkpoints if one.expires_at is None or one.expires_at > now)
    lora = row.pop("lora")
    # the journal forgets requests; what they left stays
    times = [row["created_at"], row.pop("finished_at"), row.pop("last_request_at")]
    times += [one.created_at for one in there]
    return TrainingRunRecord(
        id=row["id"],
        tenant=row["tenant"],
        base_model=row["base_model"],
        rank=lora and lora["rank"],
        user_metadata=row["user_metadata"],
        session_metadata=row["session_metadata"] or {},
        tags=tuple(row["tags"] or ()),
        display_name=row["display_name"],
        created_at=row["created_at"],
        last_request_at=max(time for time in times if time is not None),
        finished=row["finished"],
        checkpoints=there,
    )
