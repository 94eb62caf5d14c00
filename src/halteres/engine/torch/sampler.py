"""All sampling of an engine: requests in, rows of their snapshot's batch, answers out.

Owns: who enters when, first come first served per snapshot; the bounds on rows and cache; turns between snapshots.
Never: runs on more than one thread.

A request that waits when a step begins enters before that step, whatever else is being decoded: the requests that
many environments send within a few milliseconds decode together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from halteres.engine.torch.adapter import Snapshot
from halteres.engine.torch.cache import SlotCache
from halteres.engine.torch.decode import DecodeBatch
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.requests import SampleRequest
from halteres.errors import HalteresError, ServerError, boundary


class Sampler:
    """The waiting requests and the running batches."""

    def __init__(self, base: BaseModel, limits: Limits) -> None:
        self._base, self._limits = base, limits
        self._waiting: deque[SampleRequest] = deque()
        self._batches: deque[DecodeBatch] = deque()
        self._spare: list[SlotCache] = []

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
        if self._waiting:
            for batch, entries in self._admissible().items():
                with self._failing(batch, [request for request, _ in entries]):
                    batch.admit(entries)
            self._drop_empty()
        if self._batches:
            batch = self._batches[0]
            with self._failing(batch):
                batch.step()
            self._batches.rotate(-1)
            self._drop_empty()

    def fail_all(self, error: HalteresError) -> None:
        """Answer everything with an error."""
        for request in [*self._waiting, *(r for batch in self._batches for r in batch.requests)]:
            request.fail(error)
        self._waiting.clear()
        self._batches.clear()

    def _admissible(self) -> dict[DecodeBatch, list[tuple[SampleRequest, int]]]:
        """Waiting requests that fit, in order; one that fits in part gets some of its rows now, the others later."""
        found: dict[DecodeBatch, list[tuple[SampleRequest, int]]] = {}
        rows = self._limits.decode_rows - sum(len(batch.rows) for batch in self._batches)
        room = self._limits.cache_bytes - sum(map(self._bytes, self._batches))
        while self._waiting:
            request = self._waiting[0]
            each = request.full_length * self._base.cache_bytes_per_token
            count = min(request.waiting, rows, room // each)
            if count < 1:
                if found or any(batch.rows for batch in self._batches):
                    break
                count = 1  # larger than the cache's bound, but alone: it runs
            found.setdefault(self._batch(request.snapshot), []).append((request, count))
            rows, room = rows - count, room - count * each
            if count < request.waiting:
                break
            self._waiting.popleft()
        return found

    def _batch(self, snapshot: Snapshot) -> DecodeBatch:
        for batch in self._batches:
            if batch.snapshot is snapshot:
                return batch
        cache = self._spare.pop() if self._spare else SlotCache(self._base)
        self._batches.append(DecodeBatch(self._base, snapshot, self._limits, cache))
        return self._batches[-1]

    def _bytes(self, batch: DecodeBatch) -> int:
        return sum(row.request.full_length for row in batch.rows) * self._base.cache_bytes_per_token

    def _forget_answered(self) -> None:
        """Callers that went away free their rows; a request that failed needs no further ones."""
        if any(request.future.done() for request in self._waiting):
            self._waiting = deque(request for request in self._waiting if not request.future.done())
        for batch in self._batches:
            gone = {request for request in batch.requests if request.future.done()}
            if gone:
                batch.forget(gone)

    def _drop_empty(self) -> None:
        """Batches without rows end; one sound cache is kept, since fresh memory costs a page fault per 4 KiB."""
        for batch in [batch for batch in self._batches if not batch.rows]:
            self._batches.remove(batch)
            if not self._spare and batch.sound:
                self._spare.append(batch.cache)

    @contextmanager
    def _failing(self, batch: DecodeBatch, entering: Iterable[SampleRequest] = ()) -> Iterator[None]:
        """What goes wrong inside fails this batch's requests, and nobody else's."""
        try:
            with boundary(ServerError, "A decode step"):
                yield
        except HalteresError as error:
            batch.sound = False
            for request in batch.requests.union(entering):
                request.fail(error)
            batch.forget(batch.requests)
