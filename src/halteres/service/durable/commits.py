"""Group commits: one SQLite file, and the one thread that touches it.

Owns: the connection; that transactions which arrive while another is being committed share the next commit; what a
failed one means for those that shared it.
Never: knows what a record means.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Table, create_engine, event, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import SQLAlchemyError

from halteres.errors import Conflict, NotReady, ServerError
from halteres.service.durable.tables import LAYOUT, REQUESTS, SCHEMA

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Work:
    """One transaction that somebody waits for."""

    run: Callable[[Connection], Any]
    done: asyncio.Future[Any]


class Commits:
    """One file, one writer."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._pending: list[_Work] = []
        self._writer: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        self.trouble: NotReady | None = None  # why the file cannot be written now

    async def open(self) -> None:
        """Open or create the file.

        Raises:
            Conflict: it was written by a version of Halteres whose tables were others.
            ServerError: it cannot be opened or made.
        """
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connect)

    async def close(self) -> None:
        """Commit what is pending and close the file."""
        if self._writer is not None:
            await self._writer
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown()

    async def transact(self, run: Callable[[Connection], T]) -> T:
        """Run `run` in the next transaction; returns once it is committed.

        Raises:
            NotReady: the file cannot be written; nothing of this call is in it.
            ServerError: `run` itself failed; nothing of it is in the file.
        """
        return await self._submit(run)

    def post(self, run: Callable[[Connection], Any]) -> None:
        """As `transact`, for records nobody waits for; a failure is logged."""
        self._submit(run).add_done_callback(_log_failure)

    async def added(self, table: Table, **values: Any) -> None:
        """Insert or replace a row."""
        await self.transact(lambda connection: connection.execute(insert(table).prefix_with("OR REPLACE"), values))

    async def rows(self, table: Table) -> list[dict[str, Any]]:
        """Every row of a table, oldest first."""
        query = select(table).order_by(table.c.created_at)
        return await self.transact(lambda connection: [dict(row) for row in connection.execute(query).mappings()])

    def _submit(self, run: Callable[[Connection], T]) -> asyncio.Future[T]:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._pending.append(_Work(run, done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write(), name="journal writer")
        return done

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            group, self._pending = self._pending, []
            results: list[Any]
            try:
                results = await loop.run_in_executor(self._thread, self._commit, group)
            except RuntimeError as error:  # the thread has ended
                results = [_unwritable(error)] * len(group)
            self._note(results)
            for work, result in zip(group, results, strict=True):
                if work.done.done():
                    continue  # whoever waited was cancelled; the row stands
                if isinstance(result, Exception):
                    work.done.set_exception(result)
                else:
                    work.done.set_result(result)

    def _note(self, results: list[Any]) -> None:
        """Say once that the file cannot be written, and once that it can again."""
        before, self.trouble = self.trouble, next((one for one in results if isinstance(one, NotReady)), None)
        if self.trouble is not None and before is None:
            log.error("%s", self.trouble)
        elif self.trouble is None and before is not None:
            log.warning("The journal can be written again.")

    def _commit(self, group: list[_Work]) -> list[Any]:
        try:
            return self._together(group)
        except Exception as error:  # noqa: BLE001  whatever it is, everybody who waits must hear of it
            if len(group) == 1:
                return [_unwritable(error) if isinstance(error, SQLAlchemyError | OverflowError) else _broken(error)]
            return [result for work in group for result in self._commit([work])]

    def _together(self, group: list[_Work]) -> list[Any]:
        if self._connection is None:
            raise SQLAlchemyError("The journal is closed.")
        with self._connection.begin():
            return [work.run(self._connection) for work in group]

    def _connect(self) -> None:
        try:
            os.close(os.open(self._file, os.O_CREAT | os.O_RDWR, 0o600))  # tenants' prompts are nobody else's
            engine = create_engine(f"sqlite:///{self._file}")
            event.listen(engine, "connect", _configure)
            self._connection = engine.connect()
            with self._connection.begin():
                self._lay_out(self._connection)
        except (OSError, SQLAlchemyError) as error:
            why = f"{error.args[0] if isinstance(error, SQLAlchemyError) and error.args else error}."
            raise ServerError(f"The journal {self._file} cannot be opened.", why, "Free space, or mend it.") from error

    def _lay_out(self, connection: Connection) -> None:
        found = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
        if connection.dialect.has_table(connection, REQUESTS.name) and found != LAYOUT:
            raise _of_another_version(self._file, found)
        SCHEMA.create_all(connection)
        connection.exec_driver_sql(f"PRAGMA user_version = {LAYOUT}")

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection.engine.dispose()
            self._connection = None


def _configure(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=5000", "temp_store=MEMORY"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _of_another_version(file: Path, layout: int) -> Conflict:
    return Conflict(
        f"The journal {file} was written by another version of Halteres.",
        f"Its tables have layout {layout}; this version reads layout {LAYOUT}.",
        "Move the state directory aside, or serve from another one; checkpoint folders can be moved over.",
    )


def _unwritable(error: Exception) -> NotReady:
    return NotReady(
        "The journal cannot be written.",
        f"{error.args[0] if error.args else error}.",
        "Free space where the service keeps its state; clients ask again by themselves.",
    )


def _broken(error: Exception) -> ServerError:
    name = uuid.uuid4().hex[:8]
    log.error("A record could not be made, error id %s.", name, exc_info=error)
    return ServerError(
        f"A record could not be made (error id {name}).", f"{type(error).__name__}: {error}.", "See the log."
    )


def _log_failure(done: asyncio.Future[Any]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("A record could not be made: %s", error)
