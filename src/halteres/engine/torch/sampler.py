"""All sampling of an engine: requests in, rows of their snapshot's batch, answers out.

Owns: when requests enter, in the order in which they came; turns between snapshots; who is told what went wrong.
Never: runs on more than one thread.

A request that waits when a step begins enters before that step, whatever else is being decoded: the requests that
many environments send within a few milliseconds decode together.

Where memory ends, the request that needs most of those concerned fails, alone; the others begin again, and give the
same bits. Any other failure of a batch fails its requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from halteres.engine.failures import EngineOutOfMemory
from halteres.engine.torch.admission import Admission, CachePool, Entries
from halteres.engine.torch.decode import DecodeBatch
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.memory import attempt
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.requests import SampleRequest
from halteres.errors import HalteresError


class Sampler:
    """The waiting requests and the running batches."""

    def __init__(self, base: BaseModel, limits: Limits) -> None:
        self._base, self._limits = base, limits
        self._waiting: deque[SampleRequest] = deque()
        self._batches: deque[DecodeBatch] = deque()
        self._pool = CachePool(base, limits)

    @property
    def busy(self) -> bool:
        """There is something to decode."""
        return bool(self._waiting or self._batches)

    def add(self, request: SampleRequest) -> None:
        """Let a request wait for rows."""
        self._waiting.append(request)

    def step(self) -> None:
        """Admit who waits, then one decode step of the snapshot whose turn it is."""
        self._forget_answered()
        self._drop_empty()
        if self._waiting:
            for batch, entries in self._admitted().items():
                self._run(batch, partial(batch.admit, entries), [request for request, _ in entries])
            self._drop_empty()
        if self._batches:
            batch = self._batches[0]
            self._run(batch, batch.step)
            self._batches.rotate(-1)
            self._drop_empty()

    def fail_all(self, error: HalteresError) -> None:
        """Answer everything with an error."""
        for request in [*self._waiting, *(r for batch in self._batches for r in batch.requests)]:
            request.fail(error)
        self._waiting.clear()
        self._batches.clear()

    def _admitted(self) -> Entries:
        return Admission(self._batches, self._base, self._pool, self._limits).fill(self._waiting)

    def _forget_answered(self) -> None:
        """Callers that went away free their rows; a request that failed needs no further ones."""
        if any(request.future.done() for request in self._waiting):
            self._waiting = deque(request for request in self._waiting if not request.future.done())
        for batch in self._batches:
            gone = {request for request in batch.requests if request.future.done()}
            if gone:
                batch.forget(gone)

    def _drop_empty(self) -> None:
        """Batches without rows end; a sound cache may serve another one."""
        for batch in [batch for batch in self._batches if not batch.rows]:
            self._batches.remove(batch)
            if batch.sound:
                self._pool.give_back(batch.cache, [other.extent for other in self._batches])

    def _run(self, batch: DecodeBatch, work: Callable[[], None], entering: Iterable[SampleRequest] = ()) -> None:
        """What goes wrong inside concerns this batch's requests, and nobody else."""
        failure = attempt("a decode step", work)
        if not isinstance(failure, HalteresError):
            return
        lost = batch.abandon()
        concerned = list(dict.fromkeys((*lost, *entering)))
        failed = concerned
        if isinstance(failure, EngineOutOfMemory):
            failed, self._pool.spare = [max(concerned, key=lambda request: request.needs)], None
        for request in failed:
            request.fail(failure)
        for request in reversed(concerned):
            if request not in failed:
                request.begin_again(lost.get(request, ()))
                if request not in self._waiting:
                    self._waiting.appendleft(request)
