"""Promises: a request id given at once, redeemed by long poll.

Owns: which request has which id, that the same dedupe key gets the same promise, outcomes for a while after they are
settled (so that a retried poll gets the same bytes), waking those who wait.
Never: executes anything; sleeps to find out whether something is done.

    accepted (a row in the journal) ─▶ settled: a result | a failure | lost
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from halteres.errors import HalteresError, NotReady, as_promise
from halteres.service.journal import Drawn, Entry, Journal
from halteres.service.wire.codec import JSON, PROTOBUF

POLL_S = 30.0
"""How long a poll is held; the SDK gives up after 45 s."""

SAMPLE = "sample"
"""The one kind whose outcome is not kept in the journal: a lost sample is drawn again by the client."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a poll is answered with."""

    body: bytes
    content_type: str = JSON
    status: int = 200


LOST_SAMPLE = Outcome(b'{"detail":"This sample is lost; the client submits it again by itself."}', status=410)


def result(value: Any) -> Outcome:
    """A JSON result."""
    return Outcome(msgspec.json.encode(value))


def binary_result(body: bytes) -> Outcome:
    """A protobuf result."""
    return Outcome(body, PROTOBUF)


def failure(error: HalteresError) -> Outcome:
    """A typed failure: the client raises RequestFailedError of its category."""
    return result(as_promise(error))


@dataclass(slots=True, kw_only=True, eq=False)
class Promise:
    """One accepted request."""

    request_id: str
    key: str
    kind: str
    subject: str  # training run or sampling session
    waits_for: str = ""  # told to a client whose poll ends before it is settled
    outcome: Outcome | None = None
    recorded: asyncio.Event = field(default_factory=asyncio.Event)  # the journal has its row, or refused it
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    settled_at: float = 0.0  # monotonic


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
        self._closing = False

    def known(self, key: str) -> Promise | None:
        """The promise that this key was given."""
        return self._by_key.get(key)

    async def accept(
        self,
        kind: str,
        key: str,
        subject: str,
        *,
        seq: int | None,
        body: bytes,
        content_type: str = JSON,
        drawn: Drawn | None = None,
    ) -> tuple[Promise, bool]:
        """Record a request; returns its promise, and whether it is new and now to be executed.

        Raises:
            NotReady: the journal cannot be written. The request was not accepted.
        """
        while (promise := self._by_key.get(key)) is not None:
            await promise.recorded.wait()  # an id may be given only once its row is there
            if self._by_key.get(key) is promise:
                return promise, False
        promise = Promise(request_id=uuid.uuid4().hex, key=key, kind=kind, subject=subject)
        self._by_id[promise.request_id] = self._by_key[key] = promise
        entry = Entry(
            id=promise.request_id,
            key=key,
            kind=kind,
            subject=subject,
            seq=seq,
            content_type=content_type,
            body=body,
            drawn=drawn,
        )
        try:
            recorded_id = await self._journal.accept(entry)
        except BaseException:
            self._forget(promise)
            raise
        else:
            if recorded_id == promise.request_id:
                return promise, True
            self._forget(promise)  # its key was used in an earlier life of the service
            return Promise(request_id=recorded_id, key=key, kind=kind, subject=subject), False
        finally:
            promise.recorded.set()  # a repetition that waited goes on: with this promise, or for itself

    def settle(self, promise: Promise, outcome: Outcome) -> None:
        """Give the outcome to everybody who waits."""
        promise.outcome = outcome
        promise.settled_at = time.monotonic()
        promise.wake.set()
        self._settled.append(promise)
        self._settled_bytes += len(outcome.body)
        kept = None if promise.kind == SAMPLE else outcome.body
        self._journal.settle(promise.request_id, outcome.content_type, kept)
        self._sweep()

    async def redeem(self, request_id: str) -> Promise | Outcome | None:
        """Wait up to `poll_s`.

        Returns:
            The outcome; or the promise, still open; or None for an id that was never given.
        """
        promise = self._by_id.get(request_id)
        if promise is None:
            return await self._recall(request_id)
        if not promise.wake.is_set() and not self._closing:
            try:
                async with asyncio.timeout(self.poll_s):
                    await promise.wake.wait()
            except TimeoutError:
                return promise
        return promise.outcome or promise

    def open(self) -> Iterator[Promise]:
        """Those not settled yet."""
        return (promise for promise in self._by_id.values() if promise.outcome is None)

    def close(self) -> None:
        """End every poll now; the client asks again, of whoever comes next."""
        self._closing = True
        for promise in self.open():
            promise.wake.set()

    async def _recall(self, request_id: str) -> Outcome | None:
        recorded = await self._journal.recall(request_id)
        if recorded is None:
            return None
        if recorded.outcome is not None:
            return Outcome(recorded.outcome, recorded.outcome_type or JSON)
        if recorded.kind == SAMPLE:
            return LOST_SAMPLE
        return failure(
            NotReady(
                f"This {recorded.kind} request of {recorded.subject} was lost when the service stopped.",
                "Its adapter lived in the engine's memory.",
                "Resume from the newest checkpoint: create_training_client_from_state_with_optimizer(path).",
            )
        )

    def _sweep(self) -> None:
        oldest = time.monotonic() - self._keep_s
        while self._settled and (self._settled[0].settled_at < oldest or self._settled_bytes > self._keep_bytes):
            promise = self._settled.popleft()
            self._settled_bytes -= len(promise.outcome.body) if promise.outcome else 0
            self._forget(promise)

    def _forget(self, promise: Promise) -> None:
        self._by_id.pop(promise.request_id, None)
        self._by_key.pop(promise.key, None)
