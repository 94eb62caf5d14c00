"""The journal: every accepted request is a row before it is executed.

One SQLite file (WAL, synchronous NORMAL: it survives kill -9), touched by one thread. Transactions
that arrive while another is being committed share the next commit.

requests       id, dedupe key, kind, whom it concerns, seq, body, drawn seeds; later its state and
               outcome
sessions       one client's connection
models         training runs, each with the point from which its adapter can be brought back
samplers       sampling sessions
checkpoints    named weights on disk
burnt          sequence numbers that a refused request used up
gateway_…      gateway sessions, and the groups that they make; their calls are requests
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection, Executable, Table, bindparam, delete, event, select, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from halteres.errors import Conflict, HalteresError, NotReady, ServerError
from halteres.process import steady_time
from halteres.service.keys import LOCAL, Tenant
from halteres.service.wire.bodies import JSON, Drawn

T = TypeVar("T")


log = logging.getLogger(__name__)


FILE = "journal.sqlite"
LAYOUT = 2  # written into the file (PRAGMA user_version); a journal of another layout is refused

SCHEMA = sa.MetaData()

SAMPLE = "sample"
"""The kind whose results are not kept where an engine computes the same again, from the request and
its seed.
"""

GATEWAY = "gateway"
"""The kind of calls within a gateway session, whose outcomes are what was sampled: they are kept as
long as the session is.
"""

KEPT = sa.text(f"kind = '{SAMPLE}' AND state = 'done' AND outcome IS NOT NULL")
"""Samples whose results are kept. Literal: a bound value would keep SQLite from using the index of
these rows.
"""

REQUESTS = Table(
    "requests",
    SCHEMA,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("key", sa.String, nullable=False, unique=True),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("subject", sa.String, nullable=False),  # training run, sampling session or run
    sa.Column("tenant", sa.String, nullable=False),
    sa.Column("seq", sa.BigInteger),
    sa.Column("content_type", sa.String, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),  # as it came, decompressed
    sa.Column("drawn", sa.JSON(none_as_null=True)),  # seeds that the service drew for it
    sa.Column("accepted_at", sa.Float, nullable=False),  # unix s
    sa.Column("state", sa.String, nullable=False),  # accepted, done, or failed_user, failed_server
    sa.Column("settled_at", sa.Float),
    sa.Column("outcome_type", sa.String),
    sa.Column("outcome", sa.LargeBinary),  # null of samples that are drawn again
    sa.Index("requests_of_subject", "subject", "seq"),
    sa.Index("requests_by_settling", "settled_at"),
    sa.Index("requests_open", "state", sqlite_where=sa.Column("state") == "accepted"),
    sa.Index("requests_kept", "tenant", "settled_at", sqlite_where=KEPT),
)

SESSIONS = Table(
    "sessions",
    SCHEMA,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("tenant", sa.String, nullable=False),
    sa.Column("tags", sa.JSON, nullable=False),
    sa.Column("user_metadata", sa.JSON, nullable=False),
    sa.Column("project_id", sa.String),
    sa.Column("display_name", sa.String),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("finished", sa.String),  # its reason
    sa.Column("finished_at", sa.Float),
)

MODELS = Table(
    "models",
    SCHEMA,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("session_id", sa.String, nullable=False, index=True),
    sa.Column("tenant", sa.String, nullable=False),
    sa.Column("base_model", sa.String, nullable=False),
    sa.Column("lora", sa.JSON, nullable=False),
    sa.Column("user_metadata", sa.JSON, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    # number of the request after which its newest restore point was taken
    sa.Column("point", sa.BigInteger),
    # ... up to which no request is needed to bring its adapter back
    sa.Column("covered", sa.BigInteger),
    sa.Column("settled", sa.BigInteger),  # ... and up to which everything was settled then
)

SAMPLERS = Table(
    "samplers",
    SCHEMA,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("session_id", sa.String, nullable=False, index=True),
    sa.Column("tenant", sa.String, nullable=False),
    sa.Column("base_model", sa.String, nullable=False),
    sa.Column("model_path", sa.String),  # of named weights
    sa.Column("model_id", sa.String),  # of unnamed ones: the training run ...
    sa.Column("seq", sa.BigInteger),  # ... the number of the request that published them
    sa.Column("snapshot", sa.String),  # ... and their name in the engine
    sa.Column("version", sa.BigInteger),  # ... and policy version
    sa.Column("inflight", sa.Boolean, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
)

CHECKPOINTS = Table(
    "checkpoints",
    SCHEMA,
    sa.Column("path", sa.String, primary_key=True),
    sa.Column("model_id", sa.String, nullable=False, index=True),
    sa.Column("tenant", sa.String, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("base_model", sa.String, nullable=False),
    sa.Column("lora", sa.JSON, nullable=False),
    sa.Column("user_metadata", sa.JSON, nullable=False),
    sa.Column("public", sa.Boolean, nullable=False),
    sa.Column("request_id", sa.String),  # whose outcome it is
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float),
)

BURNT = Table(
    "burnt",
    SCHEMA,
    sa.Column("model_id", sa.String, primary_key=True),
    sa.Column("seq", sa.BigInteger, primary_key=True),
)

GATEWAY_SESSIONS = Table(
    "gateway_sessions",
    SCHEMA,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("tenant", sa.String, nullable=False),
    sa.Column("key_sha256", sa.String, nullable=False),
    sa.Column("group", sa.String),
    sa.Column("opening", sa.JSON, nullable=False),  # what was asked for when it was opened
    sa.Column("created_at", sa.Float, nullable=False),  # unix s
    sa.Column("expires_at", sa.Float, nullable=False),  # unix s
    sa.Column("state", sa.String, nullable=False),  # open, scored, failed or expired
    sa.Column("verdict", sa.JSON(none_as_null=True)),  # reward, or why there is none
    sa.Column("finished_at", sa.Float),  # unix s
)

GATEWAY_GROUPS = Table(
    "gateway_groups",
    SCHEMA,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("tenant", sa.String, nullable=False),
    sa.Column("run", sa.String),
    sa.Column("size", sa.BigInteger, nullable=False),  # sessions
    sa.Column("deadline_at", sa.Float),  # unix s; null: as long as one of its sessions is open
    sa.Column("created_at", sa.Float, nullable=False),  # unix s
    sa.Column("state", sa.String, nullable=False),  # gathering, pending, posted or dropped
    sa.Column("why", sa.String, nullable=False),
)

State = Literal["accepted", "done", "failed_user", "failed_server", "refused"]
"""A request that was refused never reached its turn; all others that have ended were executed."""

RETRY_S = 1.0  # between two attempts to record what has ended


def new_id() -> str:
    """The id of a request."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A request as the journal takes it."""

    id: str = field(default_factory=new_id)
    key: str  # a request that is sent again has the same
    kind: str
    subject: str  # whom it concerns
    tenant: Tenant = LOCAL
    seq: int | None = None
    content_type: str = JSON
    body: bytes
    drawn: Drawn | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded(Entry):
    """A row: a request, and what became of it so far."""

    state: State
    outcome_type: str | None = None
    outcome: bytes | None = None


# Statements are values: built once, so that SQLAlchemy compiles each of them once.
_ACCEPT = insert(REQUESTS).on_conflict_do_nothing(index_elements=["key"])
_SETTLE = (
    update(REQUESTS)
    .where(REQUESTS.c.id == bindparam("id_"))
    .values({name: bindparam(name) for name in ("state", "settled_at", "outcome_type", "outcome")})
)
_ROWS = select(*(REQUESTS.c[one.name] for one in fields(Recorded)))
_RECALL = _ROWS.where(REQUESTS.c.id == bindparam("recalled_id"))
_OF_SESSION = (
    select(
        *(REQUESTS.c[name] for name in ("id", "key", "drawn", "state", "outcome")),
        sa.func.length(REQUESTS.c.body).label("num_bytes"),
    )
    .where(REQUESTS.c.kind == GATEWAY, REQUESTS.c.subject == bindparam("session"))
    .order_by(REQUESTS.c.accepted_at)
)
_OPEN = _ROWS.where(REQUESTS.c.state == "accepted").order_by(REQUESTS.c.accepted_at)
_REPLAYED = ("create_model", "forward_backward", "optim_step", "save_weights_for_sampler")
"""Kinds that change an adapter, or take weights from it."""
_SINCE = (
    select(*(REQUESTS.c[one.name] for one in fields(Entry)), REQUESTS.c.state)
    .where(REQUESTS.c.subject == bindparam("of"), REQUESTS.c.seq > bindparam("after"))
    .where(REQUESTS.c.state.in_(("done", "failed_user")), REQUESTS.c.kind.in_(_REPLAYED))
    .order_by(REQUESTS.c.seq)
)
_SEQ_OF_RUN = REQUESTS.c.subject.in_(select(MODELS.c.id))
_BY_RUN = select(REQUESTS.c.subject).where(_SEQ_OF_RUN).group_by(REQUESTS.c.subject)
_LAST_SETTLED = _BY_RUN.add_columns(sa.func.max(REQUESTS.c.seq)).where(
    REQUESTS.c.state != "accepted"
)
_FIRST_OPEN = _BY_RUN.add_columns(sa.func.min(REQUESTS.c.seq)).where(REQUESTS.c.state == "accepted")


# one transaction, and who waits for it
Work = tuple[Callable[[Connection], Any], asyncio.Future[Any]]


class Journal:
    """The requests of one service, and the tables beside them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._connection: Connection | None = None
        self._pending: list[Work] = []
        self._writer: asyncio.Task[None] | None = None
        # by id, how a request ended that is not recorded yet, in order
        self._ended: dict[str, dict[str, Any]] = {}
        self._recorded: dict[str, asyncio.Future[None]] = {}  # by id, done when that is recorded
        self._recorder: asyncio.Task[None] | None = None
        self.trouble: NotReady | None = None  # why the file cannot be written now

    async def open(self) -> None:
        """Open or create the file; Conflict where a version of Halteres wrote it whose tables were
        others.
        """
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connect)

    async def close(self) -> None:
        """Record what has ended, commit what is pending and close the file."""
        with suppress(HalteresError):
            await self.flush()
        if self._recorder is not None:
            self._recorder.cancel()
            await asyncio.gather(self._recorder, return_exceptions=True)
        if self._writer is not None:
            await self._writer

        def disconnect() -> None:
            if self._connection is not None:
                self._connection.close()
                self._connection.engine.dispose()
                self._connection = None

        await asyncio.get_running_loop().run_in_executor(self._thread, disconnect)
        self._thread.shutdown()

    # Any table

    async def transact(self, run: Callable[[Connection], T]) -> T:
        """Run `run` in the next transaction; returns once it is committed. NotReady where the file
        cannot be written, ServerError where `run` itself fails: nothing of it is in the file then.
        """
        return await self._submit(run)

    async def change(self, statement: Executable) -> None:
        """Execute one statement in the next transaction; raises as `transact`."""
        await self.transact(lambda connection: connection.execute(statement))

    def post(self, run: Callable[[Connection], Any]) -> None:
        """As `transact`, for records nobody waits for; a failure is logged."""

        def log_failure(done: asyncio.Future[Any]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                log.error("A record could not be made: %s", error)

        self._submit(run).add_done_callback(log_failure)

    async def put(self, table: Table, item: object = None, **values: Any) -> None:
        """Insert or replace a row: the values, and for all other columns the attributes of
        `item`.
        """
        row = {
            name: values[name] if name in values else getattr(item, name)
            for name in (column.name for column in table.columns)
        }
        await self.transact(
            lambda connection: connection.execute(insert(table).prefix_with("OR REPLACE"), row)
        )

    async def rows(self, table: Table) -> list[dict[str, Any]]:
        """Every row of a table, oldest first."""
        query = select(table).order_by(table.c.created_at)
        return await self.transact(
            lambda connection: [dict(row) for row in connection.execute(query).mappings()]
        )

    # Requests

    async def accept(self, entry: Entry) -> str:
        """Record a request; returns the id of the row under its key, which is older if the key was
        used before.
        """

        def accept(connection: Connection) -> str:
            values = {one.name: getattr(entry, one.name) for one in fields(Entry)}
            if connection.execute(
                _ACCEPT, {**values, "accepted_at": steady_time(), "state": "accepted"}
            ).rowcount:
                return entry.id
            return connection.execute(
                select(REQUESTS.c.id).where(REQUESTS.c.key == entry.key)
            ).scalar_one()

        try:
            return await self.transact(accept)
        except NotReady as error:
            raise NotReady(
                f"The request was not accepted. {error.what}", error.why, error.next
            ) from error

    def settle(
        self,
        request_id: str,
        state: State,
        settled_at: float,
        outcome: bytes | None,
        outcome_type: str = JSON,
    ) -> asyncio.Future[None]:
        """Record how a request ended, and when (unix s). What cannot be written now is written with
        the next one, or a second later; the future that is returned is done once it is written.
        """

        async def record() -> None:
            while self._ended:
                try:
                    await self._record_ended()
                except HalteresError as error:
                    log.error(
                        "Outcomes of %d requests are not recorded yet: %s", len(self._ended), error
                    )
                    await asyncio.sleep(RETRY_S)

        ended = {
            "state": state,
            "settled_at": settled_at,
            "outcome_type": outcome_type,
            "outcome": outcome,
        }
        self._ended[request_id] = {"id_": request_id, **ended}
        recorded = self._recorded.setdefault(request_id, asyncio.get_running_loop().create_future())
        if self._recorder is None or self._recorder.done():  # else all of it goes in one statement
            self._recorder = asyncio.create_task(record(), name="journal outcomes")
        return recorded

    async def flush(self) -> None:
        """What has ended is recorded; NotReady where the file cannot be written."""
        while self._ended:
            await self._record_ended()

    async def _record_ended(self) -> None:
        batch = list(self._ended.values())
        await self.transact(lambda connection: connection.execute(_SETTLE, batch))
        for ended in batch:
            if self._ended.get(ended["id_"]) is ended:
                del self._ended[ended["id_"]]
                self._recorded.pop(ended["id_"]).set_result(None)

    async def recall(self, request_id: str) -> Recorded | None:
        """The row of this id."""
        await self.flush()
        found = await self._select(_RECALL, recalled_id=request_id)
        return found[0] if found else None

    async def left_open(self) -> list[Recorded]:
        """Requests that an earlier life of the service accepted and did not settle, oldest
        first.
        """
        return await self._select(_OPEN)

    async def of_session(self, session: str) -> list[dict[str, Any]]:
        """The calls of a gateway session, oldest first: id, key, drawn, state, outcome, and the
        bytes of each body.
        """
        await self.flush()
        return await self.transact(
            lambda connection: [
                dict(row)
                for row in connection.execute(_OF_SESSION, {"session": session}).mappings()
            ]
        )

    async def to_replay(self, run: str, after: int) -> list[Recorded]:
        """The requests of a training run with numbers above `after` that say what became of its
        adapter, in order, without their outcomes.
        """
        await self.flush()
        return await self._select(_SINCE, of=run, after=after)

    async def _select(self, query: Executable, **values: Any) -> list[Recorded]:
        return await self.transact(
            lambda connection: [
                Recorded(**row) for row in connection.execute(query, values).mappings()
            ]
        )

    async def forget(self, before: float) -> int:
        """Delete the requests settled before this time (unix s) that no adapter and no gateway
        session needs; returns how many.
        """
        old = (REQUESTS.c.settled_at < before) & (REQUESTS.c.state != "accepted")
        is_of_session = REQUESTS.c.subject.in_(select(GATEWAY_SESSIONS.c.id))
        old &= sa.or_(REQUESTS.c.kind != GATEWAY, ~is_of_session)
        covered = (
            select(MODELS.c.covered).where(MODELS.c.id == REQUESTS.c.subject).scalar_subquery()
        )
        statement = delete(REQUESTS).where(old, sa.or_(~_SEQ_OF_RUN, REQUESTS.c.seq <= covered))
        return await self.transact(lambda connection: connection.execute(statement).rowcount)

    async def drop_results(
        self,
        finished_before: float,
        most: Callable[[Tenant], int],
        instead: bytes,
        instead_type: str = JSON,
    ) -> int:
        """Replace results of samples that are kept by a failure, `instead`: those of sessions that
        finished before this time (unix s), and of each tenant the oldest beyond so many bytes.
        Returns how many.
        """
        gone = {"state": "failed_server", "outcome": instead, "outcome_type": instead_type}
        ended = select(SAMPLERS.c.id).join(SESSIONS, SESSIONS.c.id == SAMPLERS.c.session_id)
        ended = ended.where(SESSIONS.c.finished_at < finished_before)
        size = sa.func.length(REQUESTS.c.outcome)
        sizes = select(REQUESTS.c.tenant, sa.func.sum(size)).where(KEPT).group_by(REQUESTS.c.tenant)

        def drop(connection: Connection) -> int:
            dropped = connection.execute(
                update(REQUESTS).where(KEPT, REQUESTS.c.subject.in_(ended)).values(gone)
            )
            count = dropped.rowcount
            for tenant, held in connection.execute(sizes).all():
                if held <= most(tenant):
                    continue
                with_newer = (
                    sa.func.sum(size)
                    .over(order_by=REQUESTS.c.settled_at.desc())
                    .label("with_newer")
                )
                ranked = (
                    select(REQUESTS.c.id, with_newer)
                    .where(KEPT, REQUESTS.c.tenant == tenant)
                    .subquery()
                )
                oldest = select(ranked.c.id).where(ranked.c.with_newer > most(tenant))
                count += connection.execute(
                    update(REQUESTS).where(REQUESTS.c.id.in_(oldest)).values(gone)
                ).rowcount
            return count

        return await self.transact(drop)

    async def used_bytes(self) -> int:
        """Of its file, without what is free to be written again."""

        def used(connection: Connection) -> int:
            names = ("page_count", "freelist_count", "page_size")
            pages, free, size = (
                connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in names
            )
            return (pages - free) * size

        return await self.transact(used)

    async def positions(self) -> tuple[dict[str, int], dict[str, int], list[tuple[str, int]]]:
        """Of training runs: the highest number that each has settled, the lowest that it accepted
        and did not settle, and every number that a refused request used up.
        """
        queries = (_LAST_SETTLED, _FIRST_OPEN, select(BURNT.c.model_id, BURNT.c.seq))
        last, first, burnt = await self.transact(
            lambda connection: [
                [(run, seq) for run, seq in connection.execute(query)] for query in queries
            ]
        )
        return dict(last), dict(first), burnt

    # The file and its thread

    def _submit(self, run: Callable[[Connection], T]) -> asyncio.Future[T]:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._pending.append((run, done))
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
            before, self.trouble = (
                self.trouble,
                next((one for one in results if isinstance(one, NotReady)), None),
            )
            if self.trouble is not None and before is None:
                log.error("%s", self.trouble)
            elif self.trouble is None and before is not None:
                log.warning("The journal can be written again.")
            for (_, done), result in zip(group, results, strict=True):
                if done.done():
                    continue  # whoever waited was cancelled; the row stands
                done.set_exception(result) if isinstance(result, Exception) else done.set_result(
                    result
                )

    def _commit(self, group: list[Work]) -> list[Any]:
        try:
            if self._connection is None:
                raise SQLAlchemyError("The journal is closed.")
            with self._connection.begin():
                return [run(self._connection) for run, _ in group]
        except Exception as error:  # whatever it is, everybody who waits must hear of it
            if len(group) > 1:
                return [result for work in group for result in self._commit([work])]
            if isinstance(error, SQLAlchemyError | OverflowError):
                return [_unwritable(error)]
            name = uuid.uuid4().hex[:8]
            log.error("A record could not be made, error id %s.", name, exc_info=error)
            what = f"A record could not be made (error id {name})."
            return [ServerError(what, f"{type(error).__name__}: {error}.", "See the log.")]

    def _connect(self) -> None:
        def configure(connection: Any, _: Any) -> None:
            for pragma in (
                "journal_mode=WAL",
                "synchronous=NORMAL",
                "busy_timeout=5000",
                "temp_store=MEMORY",
            ):
                connection.execute(f"PRAGMA {pragma}")

        try:
            # tenants' prompts are nobody else's
            os.close(os.open(self._file, os.O_CREAT | os.O_RDWR, 0o600))
            engine = sa.create_engine(f"sqlite:///{self._file}")
            event.listen(engine, "connect", configure)
            connection = self._connection = engine.connect()
            with connection.begin():
                found = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
                if connection.dialect.has_table(connection, REQUESTS.name) and found != LAYOUT:
                    raise Conflict(
                        f"The journal {self._file} was written by another version of Halteres.",
                        f"Its tables have layout {found}; this version reads layout {LAYOUT}.",
                        "Rename the state directory, or serve from another one; checkpoint "
                        "folders can be moved over.",
                    )
                SCHEMA.create_all(connection)
                for index in REQUESTS.indexes:  # of a file that an earlier version made, too
                    index.create(connection, checkfirst=True)
                connection.exec_driver_sql(f"PRAGMA user_version = {LAYOUT}")
        except (OSError, SQLAlchemyError) as error:
            why = (
                f"{error.args[0] if isinstance(error, SQLAlchemyError) and error.args else error}."
            )
            raise ServerError(
                f"The journal {self._file} cannot be opened.", why, "Free space, or fix it."
            ) from error


def _unwritable(error: Exception) -> NotReady:
    return NotReady(
        "The journal cannot be written.",
        f"{error.args[0] if error.args else error}.",
        "Free space where the service keeps its state; clients ask again by themselves.",
    )


def copy_without_requests(source: Path, target: Path) -> None:
    """Copy the journal of one state directory into another, without its requests and gateway
    sessions: what was open there is not executed here again, nor are its adapters brought back. A
    journal of another layout is copied as it is; the service that is started on it refuses it.
    """
    # Copied first and opened then: to open the old one would write its write-ahead log into it.
    for name in (FILE, f"{FILE}-wal"):
        if (source / name).is_file():
            shutil.copy2(source / name, target / name)
    if not (target / FILE).is_file():
        return
    engine = sa.create_engine(f"sqlite:///{target / FILE}", isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        emptied = (REQUESTS, BURNT, GATEWAY_SESSIONS, GATEWAY_GROUPS)
        for statement in (*map(delete, emptied), update(MODELS).values(point=None)):
            with suppress(OperationalError):
                connection.execute(statement)
        # whole, also where rows were in its log alone
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    engine.dispose()
