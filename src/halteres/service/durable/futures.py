"""Futures: a request id given at once, redeemed by long poll.

    accepted (a row in the journal) ─▶ settled: a result | a failure
         └── the service ends ─▶ adopted by the next one, under the same id

A result that no engine would compute again (`Outcome.repeatable` is false) is given to a client
only once the journal has it, and a sample of that kind stays there: so each request has one answer,
the first.

unload_model is settled before it is answered. Its work is done before the row is in the journal,
and may be repeated: a row that is open when the service ends tells of work that was done.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from halteres.errors import (
    HalteresError,
    NotReady,
    ServerError,
    UserError,
    as_failed_future,
    size_text,
)
from halteres.process import steady_time
from halteres.service.durable.journal import SAMPLE, Entry, Journal, Recorded, State
from halteres.service.keys import Tenant
from halteres.service.wire.bodies import JSON, PROTOBUF

POLL_S = 30.0  # how long a poll is held; the SDK gives up after 45 s
# how long settled outcomes stay in memory, and how much of it they may take
KEEP_S, KEEP_BYTES = 900.0, 256 * 2**20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a poll is answered with."""

    body: bytes
    content_type: str = JSON
    status: int = 200
    state: State = "done"
    repeatable: bool = True  # the same request, executed again, has the same outcome


LOST_SAMPLE = Outcome(
    b'{"detail":"This sample is lost; the client submits it again by itself."}',
    status=410,
    state="failed_server",
)


def result(value: Any) -> Outcome:
    """A JSON result."""
    return Outcome(msgspec.json.encode(value))


def binary_result(body: bytes) -> Outcome:
    """A protobuf result."""
    return Outcome(body, PROTOBUF)


def failure(error: HalteresError) -> Outcome:
    """A typed failure: the client raises RequestFailedError of its category."""
    state: State = "failed_user" if isinstance(error, UserError) else "failed_server"
    return Outcome(msgspec.json.encode(as_failed_future(error)), state=state)


@dataclass(frozen=True, slots=True)
class Place:
    """What an open request waits for."""

    reason: str = ""
    stuck: bool = False  # for another request, which may never come


@dataclass(slots=True, kw_only=True, eq=False)
class Future:
    """One accepted request."""

    request_id: str
    key: str
    kind: str
    subject: str  # training run or sampling session
    tenant: Tenant
    seq: int | None
    size: int = 0  # bytes of its body
    place: Callable[[], Place] = Place  # for a client whose poll ends before it is settled
    outcome: Outcome | None = None
    outcome_recorded: bool = False  # the journal has it; asked only where it is not repeatable
    # the journal has its row, or refused it
    recorded: asyncio.Event = field(default_factory=asyncio.Event)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    settled_at: float = 0.0  # unix s

    @property
    def answer(self) -> Outcome | None:
        """The outcome, once a client may have it."""
        if self.outcome is None or self.outcome.repeatable or self.outcome_recorded:
            return self.outcome
        return None

    @classmethod
    def of(cls, entry: Entry, request_id: str) -> Future:
        """The future of a request, under the id that its row has."""
        return cls(
            request_id=request_id,
            key=entry.key,
            kind=entry.kind,
            subject=entry.subject,
            tenant=entry.tenant,
            seq=entry.seq,
            size=len(entry.body),
        )


class Futures:
    """All futures that are open, and those settled of late."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.poll_s, self._keep_s = POLL_S, KEEP_S
        self._by_id: dict[str, Future] = {}
        self._by_key: dict[str, Future] = {}
        self._settled: deque[Future] = deque()  # oldest first
        self._settled_bytes = 0
        self._unrecorded_bytes = 0  # of outcomes that the journal is to have, and has not yet
        self._open_bytes: Counter[Tenant] = Counter()
        self.closing = False
        # executes a settled sample once more
        self.redraw: Callable[[Recorded], Awaitable[Future]] | None = None

    def known(self, key: str) -> Future | None:
        """The future that this key was given."""
        return self._by_key.get(key)

    async def accept(self, entry: Entry) -> tuple[Future, bool]:
        """Record a request; returns its future, and whether it is new and now to be executed.
        NotReady where the journal cannot be written, or lacks so many outcomes that memory is full
        of them: the request was not accepted.
        """
        while (future := self._by_key.get(entry.key)) is not None:
            await future.recorded.wait()  # an id may be given only once its row is there
            if self._by_key.get(entry.key) is future:
                return future, False
        if self._unrecorded_bytes > KEEP_BYTES:
            raise NotReady(
                "The request was not accepted. The journal cannot be written.",
                f"{size_text(self._unrecorded_bytes)} of outcomes wait in memory to be recorded.",
                "Free space where the service keeps its state; clients ask again by themselves.",
            )
        future = self._enter(entry)
        try:
            recorded_id = await self._journal.accept(entry)
        except BaseException:
            self._forget(future)
            raise
        else:
            if recorded_id == future.request_id:
                return future, True
            self._forget(future)  # its key was used in an earlier life of the service
            return Future.of(entry, recorded_id), False
        finally:
            # a repetition that waited goes on: with this future, or for itself
            future.recorded.set()

    def adopt(self, row: Entry) -> Future:
        """The future of a row of the journal that is to be executed, now or again."""
        future = self._enter(row)
        future.recorded.set()
        return future

    def settle(self, future: Future, outcome: Outcome) -> None:
        """Give the outcome to everybody who waits. A service that ends leaves what is open to its
        successor.
        """
        if self.closing or future.outcome is not None:
            return
        future.outcome = outcome
        self._open_bytes[future.tenant] -= future.size
        future.settled_at = steady_time()
        self._settled.append(future)
        self._settled_bytes += len(outcome.body)
        is_drawn_again = future.kind == SAMPLE and outcome.state == "done" and outcome.repeatable
        body = None if is_drawn_again else outcome.body
        recorded = self._journal.settle(
            future.request_id, outcome.state, future.settled_at, body, outcome.content_type
        )
        num_bytes = len(body or b"")
        self._unrecorded_bytes += num_bytes
        recorded.add_done_callback(lambda _: self._give(future, num_bytes))
        if outcome.repeatable:
            future.wake.set()
        oldest = steady_time() - self._keep_s
        # What was settled after it is recorded after it, too, and waits behind it.
        while (
            self._settled
            and self._settled[0].answer is not None
            and (self._settled[0].settled_at < oldest or self._settled_bytes > KEEP_BYTES)
        ):
            gone = self._settled.popleft()
            self._settled_bytes -= len(gone.outcome.body) if gone.outcome else 0
            self._forget(gone)

    async def redeem(self, request_id: str, tenant: Tenant) -> Future | Outcome | None:
        """The outcome; the future, if it is still open after `poll_s`; None for an id that this
        tenant never got.
        """
        future = self._by_id.get(request_id)
        if future is None:
            recorded = await self._journal.recall(request_id)
            if recorded is None or recorded.tenant != tenant:
                return None
            if recorded.outcome is not None:
                return Outcome(
                    recorded.outcome, recorded.outcome_type or JSON, state=recorded.state
                )
            future = self._by_id.get(request_id)  # somebody else recalled it meanwhile
            if future is None:
                if recorded.kind != SAMPLE or self.redraw is None:
                    return LOST_SAMPLE
                future = await self.redraw(recorded)
        if future.tenant != tenant:
            return None
        if not future.wake.is_set() and not self.closing:
            try:
                async with asyncio.timeout(self.poll_s):
                    await future.wake.wait()
            except TimeoutError:
                return future
        return future.answer or future

    def find(self, request_id: str, tenant: Tenant) -> Future | None:
        """The future of this id, if it is open or was settled of late."""
        found = self._by_id.get(request_id)
        return found if found is not None and found.tenant == tenant else None

    def open(self) -> Iterator[Future]:
        """Those not settled yet."""
        return (future for future in self._by_id.values() if future.outcome is None)

    def open_bytes(self, tenant: Tenant) -> int:
        """Of the bodies of a tenant's requests that are not settled yet."""
        return self._open_bytes[tenant]

    def close(self) -> None:
        """End every poll now; the client asks again, of whoever comes next."""
        self.closing = True
        for future in self._by_id.values():
            if future.answer is None:
                future.wake.set()

    def _give(self, future: Future, num_bytes: int) -> None:
        """The journal has the outcome."""
        self._unrecorded_bytes -= num_bytes
        future.outcome_recorded = True
        if future.outcome is not None and not future.outcome.repeatable:
            future.wake.set()

    def _enter(self, entry: Entry) -> Future:
        future = self._by_id[entry.id] = self._by_key[entry.key] = Future.of(entry, entry.id)
        self._open_bytes[future.tenant] += future.size
        return future

    def _forget(self, future: Future) -> None:
        if future.outcome is None:
            self._open_bytes[future.tenant] -= future.size
        self._by_id.pop(future.request_id, None)
        self._by_key.pop(future.key, None)


UNLOAD_MODEL = "unload_model"


async def settled_at_once(futures: Futures, entry: Entry, work: Awaitable[Outcome]) -> Future:
    """Do the work; the future of its outcome."""
    try:
        outcome = await work
    except HalteresError as error:
        outcome = failure(error)
    future, new = await futures.accept(entry)
    if new:
        futures.settle(future, outcome)
    return future


def unloaded(model_id: str) -> Outcome:
    """Of unload_model."""
    return result({"type": UNLOAD_MODEL, "model_id": model_id.removesuffix("/unload")})


async def outcome_of(future: Future, work: Awaitable[Outcome]) -> Outcome:
    """The outcome of a request; what foreign code raises becomes a typed failure with an id that is
    also in the log.
    """
    try:
        return await work
    except HalteresError as error:
        return failure(error)
    except Exception as error:  # the boundary: a bug in one request must not stop its model's queue
        name = uuid.uuid4().hex[:8]
        log.exception("Request %s failed, error id %s.", future.request_id, name)
        why = f"{type(error).__name__}: {error}."
        return failure(
            ServerError(f"The {future.kind} request failed (error id {name}).", why, "See the log.")
        )
