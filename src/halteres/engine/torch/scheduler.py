"""All sampling of an engine: requests in, rows of the batch, answers out.

Owns: when requests enter, in the order in which they came; who gets slots of the cache, and who makes way where memory
ends: the youngest; who is told what went wrong.
Never: runs on more than one thread.

A request that waits when a step begins enters before that step, whatever else is being decoded, and decodes together
with all others, of whatever snapshots.

Where the machine's memory ends, the request that needs most of those concerned fails, alone; the others begin again,
and give the same bits. Any other failure of the batch fails its requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count

from halteres.engine.checks import EngineOutOfMemory
from halteres.engine.torch.cache import POSITION_STEP, CacheMemory, PrefixCache, slot_length
from halteres.engine.torch.decode import DecodeBatch
from halteres.engine.torch.decode_slots import Rows
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.memory import attempt
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.requests import Row, SampleRequest
from halteres.errors import HalteresError


class Admission:
    """The batch, and its memory."""

    def __init__(self, base: BaseModel, limits: Limits) -> None:
        self._base, self._limits = base, limits
        self.memory = CacheMemory(base, limits.cache_bytes, limits.prefixes)
        self.batch = DecodeBatch(base, limits, self.memory)

    @property
    def num_rows(self) -> int:
        """Of the batch."""
        return len(self._rows)

    @property
    def _rows(self) -> Rows:
        return self.batch.rows

    def enter(self, request: SampleRequest) -> None:
        """As many rows of the request as fit."""
        while request.waiting:
            count = min(self._alike(request), self._limits.decode_rows - self.num_rows)
            length = self._length(request.waiting[0])
            count = self._room(length, count) if count > 0 else 0
            if not count:
                return
            self.batch.enter(request, length, count)

    def make_way(self) -> Iterator[Row]:
        """Rows that have filled their slots get longer ones; each row that lost its slot to them, before anything is
        allocated, which may fail."""
        while self._missing > 0 and self.num_rows > 1:
            row = max(self._rows, key=lambda row: row.age)
            self._rows.leave([row])
            yield row
        while self._rows.grown:
            if not self._rows.move_on():
                self._rows.trim()
                self._rows.move_on(forced=True)

    @property
    def _missing(self) -> int:
        """Positions that are too few for all rows that have filled their slots. One by one, a row leaves its old slot
        behind for the next."""
        lengths = {length: (self._longer(length), len(rows)) for length, rows in self._rows.grown.items()}
        if not lengths:
            return 0
        more = sum((longer - length) * count for length, (longer, count) in lengths.items())
        return more + max(lengths) - self.memory.free - self._rows.vacant

    def _room(self, length: int, count: int) -> int:
        """Slots for this many rows or, if there are fewer, for those."""
        found = self._rows.make_room(length, count)
        if found < count and self._rows.vacant:
            self._rows.trim()
            found = self._rows.make_room(length, count)
        return found or self._rows.make_room(length, 1, forced=not self.num_rows)

    def _alike(self, request: SampleRequest) -> int:
        """How many of the first rows need slots of one length."""
        first = self._length(request.waiting[0])
        return next((i for i, row in enumerate(request.waiting) if self._length(row) != first), len(request.waiting))

    def _length(self, row: Row) -> int:
        """Of the slot that a row enters with: what it has, and a little more."""
        return slot_length(min(row.length + POSITION_STEP, row.request.full_length), self._base.context)

    def _longer(self, length: int) -> int:
        return slot_length(length + 1, self._base.context)


class Scheduler:
    """The waiting requests and the running batch."""

    def __init__(self, base: BaseModel, limits: Limits) -> None:
        self._arrivals = count()
        self._waiting: deque[SampleRequest] = deque()
        self._admission = Admission(base, limits)
        self._batch = self._admission.batch

    @property
    def busy(self) -> bool:
        """There is something to decode."""
        return bool(self._waiting or self.num_rows)

    @property
    def num_rows(self) -> int:
        """Sequences that are in decode."""
        return self._admission.num_rows

    @property
    def prefixes(self) -> PrefixCache:
        """What ended sequences left behind."""
        return self._admission.memory.prefixes

    def add(self, request: SampleRequest) -> None:
        """Let a request wait for rows."""
        request.arrival = next(self._arrivals)
        self._waiting.append(request)

    def step(self) -> None:
        """Admit who waits, then one decode step of all rows."""
        self._forget_answered()
        if self.num_rows:
            self._run(self._make_way)
        self._admit()
        if self._batch.has_entered:
            self._run(self._batch.prefill)
        if self.num_rows:
            self._run(self._batch.step)

    def fail_all(self, error: HalteresError) -> None:
        """Answer everything with an error."""
        for request in [*self._waiting, *self._batch.requests]:
            request.fail(error)
        self._waiting.clear()
        self._batch.abandon()

    def _make_way(self) -> None:
        for row in self._admission.make_way():
            self._wait_again(row.request, [row])

    def _admit(self) -> None:
        """Waiting requests that fit, in order; one that fits in part gets some of its rows now, the others later."""
        while self._waiting:
            request = self._waiting[0]
            self._run(partial(self._admission.enter, request), [request])
            if request.waiting and not request.future.done():
                break
            self._waiting.remove(request)

    def _wait_again(self, request: SampleRequest, rows: Iterable[Row]) -> None:
        """These rows have no slots any more; requests wait in the order in which they came."""
        request.begin_again([row for row in rows if row.sample not in request.finished])
        if request not in self._waiting:
            self._waiting = deque(sorted([*self._waiting, request], key=lambda waiting: waiting.arrival))

    def _forget_answered(self) -> None:
        """Callers that went away free their rows; a request that failed needs no further ones."""
        if any(request.future.done() for request in self._waiting):
            self._waiting = deque(request for request in self._waiting if not request.future.done())
        gone = {request for request in self._batch.requests if request.future.done()}
        if gone:
            self._batch.forget(gone)

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
                self._wait_again(request, lost.get(request, ()))
