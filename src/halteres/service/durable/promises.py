"""Promises: a request id given at once, redeemed by long poll.

Owns: which request has which id, that the same dedupe key gets the same promise, outcomes for a while after they are
settled (so that a retried poll gets the same bytes), waking those who wait.
Never: executes anything; sleeps to find out whether something is done.

    accepted (a row in the journal) ─▶ settled: a result | a failure
         └── the service ends ─▶ adopted by the next one, under the same id
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from halteres.errors import HalteresError, UserError, as_promise
from halteres.process import steady_time
from halteres.service.durable.journal import Ended, Entry, Journal, Recorded, State
from halteres.service.tenancy.tenants import Tenant
from halteres.service.wire.codec import JSON, PROTOBUF

POLL_S = 30.0
"""How long a poll is held; the SDK gives up after 45 s."""

SAMPLE = "sample"
"""The one kind whose results are not kept in the journal: a sample is drawn again from its request and seed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a poll is answered with."""

    body: bytes
    content_type: str = JSON
    status: int = 200
    state: State = "done"


LOST_SAMPLE = Outcome(
    b'{"detail":"This sample is lost; the client submits it again by itself."}', status=410, state="failed_server"
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
    return Outcome(msgspec.json.encode(as_promise(error)), state=state)


@dataclass(frozen=True, slots=True)
class Place:
    """What an open request waits for."""

    reason: str = ""
    stuck: bool = False  # for another request, which may never come


@dataclass(slots=True, kw_only=True, eq=False)
class Promise:
    """One accepted request."""

    request_id: str
    key: str
    kind: str
    subject: str  # training run or sampling session
    tenant: Tenant
    seq: int | None
    size: int = 0  # bytes of its body
    place: Callable[[], Place] = Place  # told to a client whose poll ends before it is settled
    outcome: Outcome | None = None
    recorded: asyncio.Event = field(default_factory=asyncio.Event)  # the journal has its row, or refused it
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    settled_at: float = 0.0  # unix s, no two the same


class Listener(Protocol):
    """Who hears of promises."""

    def settled(self, promise: Promise) -> None:
        """A promise was settled."""
        ...

    def closing(self) -> None:
        """The service ends."""
        ...


class Promises:
    """All promises that are open, and those settled of late."""

    def __init__(self, journal: Journal, *, keep_s: float = 900.0, keep_bytes: int = 256 * 2**20) -> None:
        self._journal = journal
        self.poll_s = POLL_S
        self._keep_s, self._keep_bytes = keep_s, keep_bytes
        self._by_id: dict[str, Promise] = {}
        self._by_key: dict[str, Promise] = {}
        self._settled: deque[Promise] = deque()
        self._settled_bytes = 0
        self._open_bytes: Counter[Tenant] = Counter()
        self._last_settled_at = 0.0
        self._closing = False
        self._redraw: Callable[[Recorded], Awaitable[Promise]] | None = None
        self._listener: Listener | None = None

    def listen(self, listener: Listener) -> None:
        """Tell somebody of every promise that is settled, and of the end."""
        self._listener = listener

    def draw_again_by(self, redraw: Callable[[Recorded], Awaitable[Promise]]) -> None:
        """Who executes a settled sample once more when its result is asked for after it left the memory."""
        self._redraw = redraw

    def known(self, key: str) -> Promise | None:
        """The promise that this key was given."""
        return self._by_key.get(key)

    async def accept(self, entry: Entry) -> tuple[Promise, bool]:
        """Record a request; returns its promise, and whether it is new and now to be executed.

        Raises:
            NotReady: the journal cannot be written. The request was not accepted.
        """
        while (promise := self._by_key.get(entry.key)) is not None:
            await promise.recorded.wait()  # an id may be given only once its row is there
            if self._by_key.get(entry.key) is promise:
                return promise, False
        promise = self._enter(entry)
        try:
            recorded_id = await self._journal.accept(entry)
        except BaseException:
            self._forget(promise)
            raise
        else:
            if recorded_id == promise.request_id:
                return promise, True
            self._forget(promise)  # its key was used in an earlier life of the service
            return _promise(entry, recorded_id), False
        finally:
            promise.recorded.set()  # a repetition that waited goes on: with this promise, or for itself

    def adopt(self, row: Entry) -> Promise:
        """The promise of a row of the journal that is to be executed, now or again."""
        promise = self._enter(row)
        promise.recorded.set()
        return promise

    def settle(self, promise: Promise, outcome: Outcome) -> None:
        """Give the outcome to everybody who waits. A service that ends leaves what is open to its successor."""
        if self._closing or promise.outcome is not None:
            return
        promise.outcome = outcome
        self._open_bytes[promise.tenant] -= promise.size
        promise.settled_at = self._last_settled_at = max(steady_time(), self._last_settled_at + 1e-6)
        promise.wake.set()
        self._settled.append(promise)
        self._settled_bytes += len(outcome.body)
        kept = None if promise.kind == SAMPLE and outcome.state == "done" else outcome.body
        ended = Ended(
            id=promise.request_id,
            state=outcome.state,
            settled_at=promise.settled_at,
            outcome_type=outcome.content_type,
            outcome=kept,
        )
        self._journal.settle(ended)
        if self._listener is not None:
            self._listener.settled(promise)
        self._sweep()

    async def redeem(self, request_id: str, tenant: Tenant) -> Promise | Outcome | None:
        """Wait up to `poll_s`.

        Returns:
            The outcome; or the promise, still open; or None for an id that was never given to this tenant.
        """
        promise = self._by_id.get(request_id)
        if promise is None:
            recalled = await self._recall(request_id, tenant)
            if not isinstance(recalled, Promise):
                return recalled
            promise = recalled
        if promise.tenant != tenant:
            return None
        if not promise.wake.is_set() and not self._closing:
            try:
                async with asyncio.timeout(self.poll_s):
                    await promise.wake.wait()
            except TimeoutError:
                return promise
        return promise.outcome or promise

    def find(self, request_id: str, tenant: Tenant) -> Promise | None:
        """The promise of this id, if it is open or was settled of late."""
        found = self._by_id.get(request_id)
        return found if found is not None and found.tenant == tenant else None

    def open(self) -> Iterator[Promise]:
        """Those not settled yet."""
        return (promise for promise in self._by_id.values() if promise.outcome is None)

    def open_bytes(self, tenant: Tenant) -> int:
        """Of the bodies of a tenant's requests that are not settled yet."""
        return self._open_bytes[tenant]

    @property
    def closing(self) -> bool:
        """The service ends."""
        return self._closing

    def close(self) -> None:
        """End every poll now; the client asks again, of whoever comes next."""
        self._closing = True
        for promise in self.open():
            promise.wake.set()
        if self._listener is not None:
            self._listener.closing()

    async def _recall(self, request_id: str, tenant: Tenant) -> Outcome | Promise | None:
        recorded = await self._journal.recall(request_id)
        if recorded is None or recorded.tenant != tenant:
            return None
        if recorded.outcome is not None:
            return Outcome(recorded.outcome, recorded.outcome_type or JSON, state=recorded.state)
        known = self._by_id.get(request_id)  # somebody else recalled it meanwhile
        return known or (await self._redraw(recorded) if recorded.kind == SAMPLE and self._redraw else LOST_SAMPLE)

    def _enter(self, entry: Entry) -> Promise:
        promise = self._by_id[entry.id] = self._by_key[entry.key] = _promise(entry, entry.id)
        self._open_bytes[promise.tenant] += promise.size
        return promise

    def _sweep(self) -> None:
        oldest = steady_time() - self._keep_s
        while self._settled and (self._settled[0].settled_at < oldest or self._settled_bytes > self._keep_bytes):
            promise = self._settled.popleft()
            self._settled_bytes -= len(promise.outcome.body) if promise.outcome else 0
            self._forget(promise)

    def _forget(self, promise: Promise) -> None:
        if promise.outcome is None:
            self._open_bytes[promise.tenant] -= promise.size
        self._by_id.pop(promise.request_id, None)
        self._by_key.pop(promise.key, None)


def _promise(entry: Entry, request_id: str) -> Promise:
    return Promise(
        request_id=request_id,
        key=entry.key,
        kind=entry.kind,
        subject=entry.subject,
        tenant=entry.tenant,
        seq=entry.seq,
        size=len(entry.body),
    )


def new_id() -> str:
    """The id of a request."""
    return uuid.uuid4().hex
