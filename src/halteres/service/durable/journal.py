"""The journal: every accepted request is a row before it is executed.

Owns: the rows of requests in one SQLite file (WAL, synchronous NORMAL: it survives kill -9): recorded, settled, found
again, forgotten.
Never: knows what a request means (`adapters` replays training requests, `sampling` draws samples again).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, bindparam, delete, func, or_, select, update
from sqlalchemy.dialects.sqlite import insert

from halteres.errors import HalteresError, NotReady
from halteres.process import steady_time
from halteres.service.durable.commits import Commits
from halteres.service.durable.tables import BURNT, MODELS, REQUESTS
from halteres.service.tenancy.tenants import LOCAL, Tenant

Drawn = Mapping[str, int | list[int]]
"""What the service drew by lot for a request."""

State = Literal["accepted", "done", "failed_user", "failed_server", "refused"]
"""A request that was refused never reached its turn; all others that have ended were executed."""

RETRY_S = 1.0
"""Between two attempts to record what has ended."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A request as the journal takes it."""

    id: str
    key: str
    kind: str
    subject: str
    tenant: Tenant = LOCAL
    seq: int | None
    content_type: str
    body: bytes
    drawn: Drawn | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded(Entry):
    """A row: a request, and what became of it so far."""

    state: State
    settled_at: float | None = None  # unix s
    outcome_type: str | None = None
    outcome: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a request ended."""

    id: str
    state: State
    settled_at: float  # unix s
    outcome_type: str
    outcome: bytes | None


# Statements are values: built once, so that SQLAlchemy compiles each of them once.
_ACCEPT = insert(REQUESTS).on_conflict_do_nothing(index_elements=["key"])
_SETTLE = (
    update(REQUESTS)
    .where(REQUESTS.c.id == bindparam("id_"))
    .values({name: bindparam(name) for name in ("state", "settled_at", "outcome_type", "outcome")})
)
_ROWS = select(*(REQUESTS.c[field.name] for field in fields(Recorded)))
_RECALL = _ROWS.where(REQUESTS.c.id == bindparam("recalled_id"))
_OPEN = _ROWS.where(REQUESTS.c.state == "accepted").order_by(REQUESTS.c.accepted_at)
_REPLAYED = ("create_model", "forward_backward", "optim_step", "save_weights_for_sampler")
"""Kinds that change an adapter, or take weights from it."""
_SINCE = (
    select(*(REQUESTS.c[field.name] for field in fields(Entry)), REQUESTS.c.state)
    .where(REQUESTS.c.subject == bindparam("of"), REQUESTS.c.seq > bindparam("after"))
    .where(REQUESTS.c.state.in_(("done", "failed_user")), REQUESTS.c.kind.in_(_REPLAYED))
    .order_by(REQUESTS.c.seq)
)


class Journal(Commits):
    """The requests of one service."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self._ended: dict[str, Ended] = {}  # not recorded yet, in order
        self._recorder: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Record what has ended, commit what is pending and close the file."""
        with suppress(HalteresError):
            await self.caught_up()
        if self._recorder is not None:
            self._recorder.cancel()
            await asyncio.gather(self._recorder, return_exceptions=True)
        await super().close()

    async def accept(self, entry: Entry) -> str:
        """Record a request; returns the id of the row under its key, which is older if the key was used before.

        Raises:
            NotReady: the file cannot be written; the request was not accepted.
        """
        try:
            return await self.transact(lambda connection: _accept(connection, entry))
        except NotReady as error:
            raise NotReady(f"The request was not accepted. {error.what}", error.why, error.next) from error

    def settle(self, ended: Ended) -> None:
        """Record how a request ended. What cannot be written now is written with the next one, or a second later."""
        self._ended[ended.id] = ended
        self._write_ended()

    async def caught_up(self) -> None:
        """Every request that has ended is recorded.

        Raises:
            NotReady: the file cannot be written.
        """
        while self._ended:
            await self._record_ended()

    def _write_ended(self) -> None:
        """Start to record what has ended, unless somebody is about to: all of it goes in one statement."""
        if self._recorder is None or self._recorder.done():
            self._recorder = asyncio.create_task(self._keep_recording(), name="journal outcomes")

    async def _keep_recording(self) -> None:
        while self._ended:
            try:
                await self._record_ended()
            except HalteresError as error:
                log.error("Outcomes of %d requests are not recorded yet: %s", len(self._ended), error)
                await asyncio.sleep(RETRY_S)

    async def _record_ended(self) -> None:
        batch = list(self._ended.values())
        await self.transact(lambda connection: connection.execute(_SETTLE, [_values(ended) for ended in batch]))
        for ended in batch:
            self._ended.pop(ended.id, None)

    async def recall(self, request_id: str) -> Recorded | None:
        """The row of this id."""
        await self.caught_up()
        found = await self._select(_RECALL, recalled_id=request_id)
        return found[0] if found else None

    async def left_open(self) -> list[Recorded]:
        """Requests that an earlier life of the service accepted and did not settle, oldest first."""
        return await self._select(_OPEN)

    async def to_replay(self, run: str, after: int) -> list[Recorded]:
        """The requests of a training run with numbers above `after` that say what became of its adapter, in order,
        without their outcomes."""
        await self.caught_up()
        return await self._select(_SINCE, of=run, after=after)

    async def settled_samples(self, sampler: str, after: float) -> list[Recorded]:
        """The samples of a sampling session that were settled after this time (unix s), in order."""
        await self.caught_up()
        query = _ROWS.where(REQUESTS.c.subject == sampler, REQUESTS.c.settled_at > after)
        return await self._select(query.order_by(REQUESTS.c.settled_at))

    async def forget(self, before: float) -> int:
        """Delete the requests settled before this time (unix s) that no adapter needs; returns how many."""
        old = (REQUESTS.c.settled_at < before) & (REQUESTS.c.state != "accepted")
        covered = select(MODELS.c.covered).where(MODELS.c.id == REQUESTS.c.subject).scalar_subquery()
        others = REQUESTS.c.subject.notin_(select(MODELS.c.id))
        statement = delete(REQUESTS).where(old, or_(others, REQUESTS.c.seq <= covered))
        return await self.transact(lambda connection: connection.execute(statement).rowcount)

    async def used_bytes(self) -> int:
        """Of its file, without what is free to be written again."""

        def used(connection: Connection) -> int:
            pages, free, size = (
                connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
                for name in ("page_count", "freelist_count", "page_size")
            )
            return (pages - free) * size

        return await self.transact(used)

    async def _select(self, query: Any, **values: Any) -> list[Recorded]:
        return await self.transact(
            lambda connection: [Recorded(**row) for row in connection.execute(query, values).mappings()]
        )

    async def burn(self, model_id: str, seq: int) -> None:
        """Record that a refused request used up this number."""
        await self.added(BURNT, model_id=model_id, seq=seq)

    async def last_settled(self) -> dict[str, int]:
        """The highest sequence number that each training run has settled."""
        settled = select(REQUESTS.c.subject, func.max(REQUESTS.c.seq)).where(REQUESTS.c.state != "accepted")
        query = settled.where(REQUESTS.c.subject.in_(select(MODELS.c.id))).group_by(REQUESTS.c.subject)
        return dict(await self.transact(lambda connection: [(run, seq) for run, seq in connection.execute(query)]))

    async def first_open(self) -> dict[str, int]:
        """The lowest number of each training run that was accepted and is not settled."""
        query = select(REQUESTS.c.subject, func.min(REQUESTS.c.seq)).where(REQUESTS.c.state == "accepted")
        query = query.where(REQUESTS.c.subject.in_(select(MODELS.c.id))).group_by(REQUESTS.c.subject)
        return dict(await self.transact(lambda connection: [(run, seq) for run, seq in connection.execute(query)]))

    async def burnt(self) -> list[tuple[str, int]]:
        """Every number that a refused request used up, with its training run."""
        query = select(BURNT.c.model_id, BURNT.c.seq)
        return await self.transact(lambda connection: [(run, seq) for run, seq in connection.execute(query)])


def _accept(connection: Connection, entry: Entry) -> str:
    values = {field.name: getattr(entry, field.name) for field in fields(Entry)}
    values |= {"accepted_at": steady_time(), "state": "accepted"}
    if connection.execute(_ACCEPT, values).rowcount:
        return entry.id
    return connection.execute(select(REQUESTS.c.id).where(REQUESTS.c.key == entry.key)).scalar_one()


def _values(ended: Ended) -> dict[str, Any]:
    values = {field.name: getattr(ended, field.name) for field in fields(Ended)}
    return {**values, "id_": values.pop("id")}
