"""The order of one model's training requests.

Owns: strict execution by sequence number, whatever order requests arrive in (of parallel chunks the first comes last);
numbers that a refused request used up; late ones.
Never: knows what a request does. Models are served fairly because each has one request in the engine at a time.

    put(7) put(8)      gap at 6: both wait
    put(6)             6, 7, 8 run, one after the other
    burn(9) put(10)    9 was refused with a 4xx: 10 runs
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from halteres.errors import HalteresError, InvalidData, NotReady, ServerError, boundary
from halteres.service.durable.futures import Future, Futures, Outcome, Place, failure
from halteres.service.wire.training import Request

MAX_WAITING = 4096
"""Requests of one model that may wait for an earlier one."""

GAP_S = 900.0
"""How long requests wait for one before them that does not arrive: the SDK gives up sending it long before."""

log = logging.getLogger(__name__)


class Numbered(Protocol):
    """What a lane puts in order."""

    @property
    def request(self) -> Request:
        """What is asked, and its number."""
        ...

    @property
    def future(self) -> Future:
        """Given for it."""
        ...


J = TypeVar("J", bound=Numbered)
J_contra = TypeVar("J_contra", bound=Numbered, contravariant=True)


class Executor(Protocol[J_contra]):
    """Who does the work of a lane."""

    async def execute(self, job: J_contra) -> Outcome:
        """What the future is settled with."""
        ...

    async def afterwards(self, job: J_contra) -> None:
        """What may follow before the next job begins."""
        ...


class Lane(Generic[J]):
    """One model's requests, by sequence number."""

    def __init__(self, futures: Futures, tasks: asyncio.TaskGroup, work: Executor[J], next_seq: int = 0) -> None:
        self._futures, self._tasks, self._work = futures, tasks, work
        self._next = next_seq
        self._waiting: dict[int, J] = {}
        self._burnt: set[int] = set()
        self._running = False
        self._gap: asyncio.TimerHandle | None = None  # until those that wait are given up

    def put(self, job: J) -> None:
        """Execute the job once every earlier number was executed or burnt."""
        seq = job.request.seq
        if seq < self._next or seq in self._burnt:
            late = replace(failure(_late(seq, self._next)), state="refused")  # never executed, never replayed
            self._futures.settle(job.future, late)
            return
        self._waiting[seq] = job
        job.future.place = partial(self._place, seq)
        self._go_on()
        self._mind_the_gap()

    def burn(self, seq: int) -> None:
        """This number will never be put: its request was refused. A number that was put already is none."""
        if seq >= self._next and not self.holds(seq):
            self._burnt.add(seq)
            self._go_on()

    def holds(self, seq: int) -> bool:
        """A request of this number runs or waits."""
        return seq in self._waiting or (self._running and seq == self._next)

    @property
    def settled(self) -> int:
        """The highest number below which every one is settled or burnt; -1 where none is."""
        return self._next - 1

    @property
    def idle(self) -> bool:
        """Nothing of this model runs or waits."""
        return not self._running and not self._waiting

    def refuse_if_full(self, seq: int) -> None:
        """Raise NotReady rather than hold more requests than a client can mean; the one they wait for is let in."""
        if len(self._waiting) >= MAX_WAITING and seq != self._next and not self.holds(seq):
            raise NotReady(
                f"{len(self._waiting)} requests of this model wait.",
                f"Request {self._next} has not arrived, and they come after it.",
                "Send it, or make a new training client.",
            )

    def _go_on(self) -> None:
        self._skip_burnt()
        if not self._running and self._next in self._waiting:
            self._running = True
            self._tasks.create_task(self._drain(), name="training lane")

    def _place(self, seq: int) -> Place:
        if self._running:
            first = f"request {self._next} of this model is executed first"
            return Place("it is being executed" if seq == self._next else first)
        return Place(f"request {self._next} of this model comes first, and has not arrived", stuck=True)

    def _mind_the_gap(self) -> None:
        """Requests wait for one that has not arrived: not for ever."""
        missing = bool(self._waiting) and not self._running
        if missing and self._gap is None:
            self._gap = asyncio.get_running_loop().call_later(GAP_S, self._give_up, self._next)
        elif not missing and self._gap is not None:
            self._gap.cancel()
            self._gap = None

    def _give_up(self, missing: int) -> None:
        self._gap = None
        if self._running or self._next != missing:
            self._mind_the_gap()
            return
        log.warning("Request %d of a training run did not arrive in %g s; %d fail.", missing, GAP_S, len(self._waiting))
        jobs, self._waiting = self._waiting, {}
        self._next = max(jobs) + 1
        for job in jobs.values():
            self._futures.settle(job.future, replace(failure(_missing(missing)), state="refused"))

    def _skip_burnt(self) -> None:
        while self._next in self._burnt:
            self._burnt.discard(self._next)
            self._next += 1

    async def _drain(self) -> None:
        try:
            while not self._futures.closing and (job := self._waiting.pop(self._next, None)) is not None:
                outcome = await outcome_of(job.future, lambda job=job: self._work.execute(job))
                self._futures.settle(job.future, outcome)
                await self._afterwards(job)
                self._next += 1
                self._skip_burnt()
        finally:
            self._running = False
            self._mind_the_gap()

    async def _afterwards(self, job: J) -> None:
        """Whatever goes wrong now has no future to fail, and must not stop the lane."""
        try:
            with boundary(ServerError, "What follows a request"):
                await self._work.afterwards(job)
        except HalteresError as error:
            log.error("After request %s: %s", job.future.request_id, error)


async def outcome_of(future: Future, run: Callable[[], Awaitable[Outcome]]) -> Outcome:
    """The outcome of a request; what foreign code raises becomes a typed failure with an id that is also in the log."""
    try:
        return await run()
    except HalteresError as error:
        return failure(error)
    except Exception as error:  # the boundary: a bug in one request must not stop its model's lane
        name = uuid.uuid4().hex[:8]
        log.exception("Request %s failed, error id %s.", future.request_id, name)
        why = f"{type(error).__name__}: {error}."
        return failure(ServerError(f"The {future.kind} request failed (error id {name}).", why, "See the log."))


def _missing(seq: int) -> InvalidData:
    return InvalidData(
        f"Request {seq} of this model never arrived, and this one comes after it.",
        "Its client gave its number away and did not send it: an error was raised there before.",
        "Make a new training client, from a checkpoint if there is one.",
    )


def _late(seq: int, expected: int) -> InvalidData:
    return InvalidData(
        f"Request {seq} of this model comes too late.",
        f"It was refused or lost before, and request {expected} is next.",
        "Make a new training client, from a checkpoint if there is one.",
    )
