"""The one thread on which torch runs: calls and sampling take turns.

Turns: while calls can go on, one slice of one of them (a micro-batch of a pass, or a whole short
call), then up to `turn_steps` decode steps, and so on. So a training call never waits for a decode
to end, nor a decode for a pass. Where the slice is a micro-batch with room for more, those of other
calls that could have a turn, too, are computed with it: as many as fit, so that no slice is longer
than the longest pass's.

Order: each call says which adapters, snapshots and folders it reads or changes. Calls that have one
in common run one after the other, as they came; of the others, the one goes on whose first subject
had its last slice longest ago. So no adapter's pass stops another adapter. A call that waits for a
file gives its slices away.

Sampling: a request that waits when a step begins enters before that step, whatever else is being
decoded, and decodes together with all others, of whatever snapshots. Where the cache is full the
youngest rows make way. Where the machine's memory ends, the request that needs most of those
concerned fails, alone; the others begin again, and give the same bits. Any other failure of the
batch fails its requests.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch

from halteres.engine.checks import EngineOutOfMemory
from halteres.engine.protocol import EngineGone
from halteres.engine.torch.cache import POSITION_STEP, CacheMemory, PrefixCache, slot_length
from halteres.engine.torch.decode import DecodeBatch
from halteres.engine.torch.limits import IDLE_S, FreedMemory, Limits, attempt
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.passes import PendingBatch, compute_together
from halteres.engine.torch.rows import Row, SampleRequest
from halteres.errors import HalteresError

Slices = Generator[Future[Any] | PendingBatch | None, None, Any]
"""A call in slices; after one that yields a future it goes on once that is done; a micro-batch may
be computed with others' before it goes on. Its return value is the answer.
"""


@dataclass(slots=True, eq=False)
class Call:
    """A call that waits or runs."""

    name: str
    # adapters, snapshots and folders that it reads or changes, the foremost first
    subjects: tuple[str, ...]
    begin: Callable[[], Slices]
    future: Future[Any]
    batches: bool = False  # its slices are micro-batches, which may be computed with others'
    slices: Slices | None = None
    awaited: Future[Any] | None = None  # it goes on once this is done
    pending: PendingBatch | None = None  # what its next slice computes

    def advance(self) -> bool:
        """Run the next slice; True once the call is answered."""
        try:
            if self.slices is None:
                self.slices = self.begin()
            found = next(self.slices)
            self.awaited = found if isinstance(found, Future) else None
            self.pending = found if isinstance(found, PendingBatch) else None
        except StopIteration as end:
            with suppress(InvalidStateError):  # cancelled
                self.future.set_result(end.value)
            return True
        return False


class Worker:
    """Runs calls and decode steps until closed."""

    def __init__(self, sampler: Scheduler, threads: int, limits: Limits) -> None:
        self._sampler, self._threads, self._turn_steps = sampler, threads, limits.turn_steps
        # of micro-batches computed together, as far as there is memory
        self._most_together = limits.pass_tokens
        self._inbox: deque[Call | SampleRequest] = deque()
        self._calls: list[Call] = []  # in the order in which they came
        self._freed = FreedMemory()
        self._slices = 0  # run so far
        # number of the newest one of each subject that calls are about
        self._last_slices: dict[str, int] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="torch", daemon=True)
        self._thread.start()

    def submit(self, item: Call | SampleRequest) -> None:
        """Queue a call or a sampling request; its future is answered from the worker's thread.

        Raises:
            EngineGone: the engine is closed.
        """
        with self._changed:
            if self._closed:
                raise _closed_error()
            self._inbox.append(item)
            self._changed.notify()

    def close(self) -> None:
        """End after the current slice; what has no answer yet fails with EngineGone."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        while True:
            with self._changed:
                there_is_work = self._changed.wait_for(
                    lambda: bool(
                        self._closed or self._inbox or self._sampler.busy or self._free_calls()
                    ),
                    IDLE_S,
                )
            if not there_is_work:
                self._freed.look(idle=True)
                continue
            self._take_inbox()
            if self._closed:
                break
            if calls := self._free_calls():
                self._run_slice(calls[0])
            steps = 0
            while (
                self._sampler.busy
                and not self._closed
                and (steps < self._turn_steps or not self._free_calls())
            ):
                with torch.inference_mode():
                    failure = attempt("sampling", self._sampler.step)
                # the sampler itself is broken: nobody may wait for ever
                if isinstance(failure, HalteresError):
                    self._sampler.fail_all(failure)
                steps += 1
                self._take_inbox()
        for call in self._calls:
            with suppress(InvalidStateError):
                call.future.set_exception(_closed_error())
        self._sampler.fail_all(_closed_error())

    def _free_calls(self) -> list[Call]:
        """The calls that can go on and wait for no older one; the subject that has waited longest
        first.
        """
        taken: set[str] = set()
        free: list[Call] = []
        for call in self._calls:
            if (call.awaited is None or call.awaited.done()) and taken.isdisjoint(call.subjects):
                free.append(call)
            taken.update(call.subjects)
        return sorted(free, key=lambda call: self._last_slices.get(call.subjects[0], 0))

    def _take_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, SampleRequest):
                self._sampler.add(item)
            else:
                self._calls.append(item)
                # before others' next turns, not for ever
                self._last_slices.setdefault(item.subjects[0], self._slices)

    def _run_slice(self, call: Call) -> None:
        """The next slice of a call, and of those that are computed with it."""
        together = [call] if not call.batches or self._has_begun(call) else []
        pending = [one.pending for one in together if one.pending is not None]
        if pending and pending[0].batch.size < self._most_together:
            for other in [
                other for other in self._free_calls() if other.batches and other is not call
            ]:
                begun = self._has_begun(other)
                if (
                    begun
                    and other.pending is not None
                    and other.pending.fits(pending, self._most_together)
                ):
                    together.append(other)
                    pending.append(other.pending)
        if len(together) > 1:
            # where it fails, each tries alone
            failure = attempt("several passes", lambda: compute_together(pending))
            if isinstance(failure, EngineOutOfMemory):
                self._most_together = sum(one.batch.size for one in pending) // 2
        for one in together:
            self._advance(one)

    def _has_begun(self, call: Call) -> bool:
        """Bring a pass to its first micro-batch; False if that answered it."""
        if call.slices is None:
            self._advance(call)
        return call.slices is not None

    def _advance(self, call: Call) -> None:
        """A call goes on. One that has begun runs to its end, also if its caller went away."""
        self._slices += 1
        self._last_slices[call.subjects[0]] = self._slices
        outcome = attempt(call.name, call.advance)
        if outcome is False:
            if call.awaited is not None:
                call.awaited.add_done_callback(self._wake)
            return
        self._calls.remove(call)
        waiting = {call.subjects[0] for call in self._calls}
        self._last_slices = {
            name: last for name, last in self._last_slices.items() if name in waiting
        }
        if isinstance(outcome, HalteresError):
            with suppress(InvalidStateError):  # cancelled
                call.future.set_exception(outcome)
        call.slices = call.pending = None  # a broken pass holds its tensors no longer
        self._freed.look(idle=False)

    def _wake(self, _: Future[Any]) -> None:
        with self._changed:
            self._changed.notify()


def _closed_error() -> HalteresError:
    return EngineGone("The engine is closed.", next="Start another.")


class Scheduler:
    """All sampling of an engine: the waiting requests, in the order in which they came, and the
    running batch.
    """

    def __init__(self, base: BaseModel, limits: Limits) -> None:
        self._base, self._limits = base, limits
        self._numbers = count()
        self._unanswered: list[SampleRequest] = []
        self._waiting: deque[SampleRequest] = deque()  # for slots of all their rows
        self.memory = CacheMemory(base, limits.cache_bytes, limits.prefixes)
        self._batch = DecodeBatch(base, limits, self.memory)
        self._rows = self._batch.rows

    @property
    def busy(self) -> bool:
        """There is something to decode."""
        return bool(self._unanswered)

    @property
    def num_rows(self) -> int:
        """Sequences that are in decode."""
        return len(self._rows)

    @property
    def prefixes(self) -> PrefixCache:
        """What ended sequences left behind."""
        return self.memory.prefixes

    def add(self, request: SampleRequest) -> None:
        """Let a request wait for rows."""
        request.number = next(self._numbers)
        self._unanswered.append(request)
        self._waiting.append(request)

    def step(self) -> None:
        """Admit who waits, then one decode step of all rows."""
        self._forget_answered()
        if self.num_rows:
            self._run(self._make_way)
        while self._waiting:
            request = self._waiting[0]
            self._run(partial(self._enter, request), [request])
            if request.waiting and not request.future.done():
                break  # it fits in part: some of its rows now, the others later
            self._waiting.remove(request)
        if self._batch.has_entered:
            self._run(self._batch.prefill)
        if self.num_rows:
            self._run(self._batch.step)
        self._forget_answered()

    def fail_all(self, error: HalteresError) -> None:
        """Answer everything with an error."""
        for request in self._unanswered:
            request.fail(error)
        self._unanswered.clear()
        self._waiting.clear()
        self._batch.abandon()

    def _forget_answered(self) -> None:
        if answered := {request for request in self._unanswered if request.future.done()}:
            self._unanswered = [request for request in self._unanswered if request not in answered]
            self._waiting = deque(request for request in self._waiting if request not in answered)
            self._batch.forget(answered)  # rows of callers that went away

    def _enter(self, request: SampleRequest) -> None:
        """As many rows of the request as fit; slots of one length at a time."""
        while request.waiting:
            lengths = [self._length(row) for row in request.waiting]
            length = lengths[0]
            alike = next((i for i, other in enumerate(lengths) if other != length), len(lengths))
            count = min(alike, self._limits.decode_rows - self.num_rows)
            count = self._make_room(length, count) if count > 0 else 0
            if not count:
                return
            self._batch.enter(request, length, count)

    def _length(self, row: Row) -> int:
        """Of the slot that a row enters with: what it has, and a little more."""
        return slot_length(
            min(row.length + POSITION_STEP, row.request.full_length), self._base.context
        )

    def _make_room(self, length: int, count: int) -> int:
        """Slots for this many rows or, if there are fewer, for those."""
        found = self._rows.make_room(length, count)
        if found < count and self._rows.vacant:
            self._rows.trim()
            found = self._rows.make_room(length, count)
        return found or self._rows.make_room(length, 1, forced=not self.num_rows)

    def _make_way(self) -> None:
        """Rows that have filled their slots get longer ones. The youngest lose theirs to them,
        before anything is allocated, which may fail.
        """
        while self._missing() > 0 and self.num_rows > 1:
            row = max(self._rows, key=lambda row: row.age)
            self._rows.leave([row])
            self._requeue(row.request, [row])
        while self._rows.grown:
            if not self._rows.move_on():
                self._rows.trim()
                self._rows.move_on(forced=True)

    def _missing(self) -> int:
        """Positions that are too few for all rows that have filled their slots. One by one, a row
        leaves its old slot behind for the next.
        """
        grown = {length: len(rows) for length, rows in self._rows.grown.items()}
        if not grown:
            return 0
        more = sum(
            (slot_length(length + 1, self._base.context) - length) * count
            for length, count in grown.items()
        )
        return more + max(grown) - self.memory.free - self._rows.vacant

    def _requeue(self, request: SampleRequest, rows: Iterable[Row]) -> None:
        """These rows have no slots any more; requests wait in the order in which they came."""
        request.wait_for_slots([row for row in rows if row.sample not in request.finished])
        if request not in self._waiting:
            self._waiting = deque(
                sorted([*self._waiting, request], key=lambda waiting: waiting.number)
            )

    def _run(self, work: Callable[[], None], entering: Iterable[SampleRequest] = ()) -> None:
        """What goes wrong inside concerns the batch's requests, and nobody else."""
        failure = attempt("a decode step", work)
        if not isinstance(failure, HalteresError):
            return
        lost = self._batch.abandon()
        concerned = list(dict.fromkeys((*lost, *entering)))
        failed = concerned
        if isinstance(failure, EngineOutOfMemory):
            failed = [max(concerned, key=lambda request: request.needs)]
        for request in failed:
            request.fail(failure)
        for request in concerned:
            if request not in failed:
                self._requeue(request, lost.get(request, ()))
