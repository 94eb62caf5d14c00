"""The one thread on which torch runs.

Owns: the order of calls and the turns between them and sampling.
Never: blocks the event loop; runs two calls at once.

The rule of turns: while calls can go on, one slice of one of them (a micro-batch of a pass, or a whole short call),
then up to `turn_steps` decode steps, and so on. So a training call never waits for a decode to end, nor a decode for a
pass.

Where the slice is a micro-batch with room for more, those of other calls that could have a turn, too, are computed with
it: as many as fit, so that no slice is longer than the longest pass's.

The rule of order: each call says which adapters, snapshots and folders it reads or changes. Calls that have one in
common run one after the other, as they came; of the others, the one goes on whose first subject had its last slice
longest ago. So no adapter's pass stops another adapter. A call that waits for a file gives its slices away.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from halteres.engine.checks import EngineOutOfMemory
from halteres.engine.protocol import EngineGone
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.memory import IDLE_S, FreedMemory, attempt
from halteres.engine.torch.passes import PendingBatch, compute_together
from halteres.engine.torch.requests import SampleRequest
from halteres.engine.torch.scheduler import Scheduler
from halteres.errors import HalteresError

Slices = Generator[Future[Any] | PendingBatch | None, None, Any]
"""A call in slices; after one that yields a future it goes on once that is done; a micro-batch may be computed with
others' before it goes on. Its return value is the answer."""


@dataclass(slots=True, eq=False)
class Call:
    """A call that waits or runs."""

    name: str
    subjects: tuple[str, ...]  # adapters, snapshots and folders that it reads or changes, the foremost first
    begin: Callable[[], Slices]
    future: Future[Any]
    batches: bool = False  # its slices are micro-batches, which may be computed with others'
    slices: Slices | None = None
    awaited: Future[Any] | None = None  # it goes on once this is done
    pending: PendingBatch | None = None  # what its next slice computes

    @property
    def ready(self) -> bool:
        """It could go on."""
        return self.awaited is None or self.awaited.done()

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


def closed_error() -> HalteresError:
    """What calls of a closed engine get."""
    return EngineGone("The engine is closed.", next="Start another.")


class Worker:
    """Runs calls and decode steps until closed."""

    def __init__(self, sampler: Scheduler, threads: int, limits: Limits) -> None:
        self._sampler, self._threads, self._turn_steps = sampler, threads, limits.turn_steps
        self._most_together = (
            limits.pass_tokens
        )  # of micro-batches that are computed together, as far as there is memory
        self._inbox: deque[Call | SampleRequest] = deque()
        self._calls: list[Call] = []  # in the order in which they came
        self._freed = FreedMemory()
        self._slices = 0  # run so far
        self._last_slices: dict[str, int] = {}  # number of the newest one of each subject that calls are about
        self._news = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="torch", daemon=True)
        self._thread.start()

    def submit(self, item: Call | SampleRequest) -> None:
        """Queue a call or a sampling request; its future is answered from the worker's thread.

        Raises:
            EngineGone: the engine is closed.
        """
        with self._news:
            if self._closed:
                raise closed_error()
            self._inbox.append(item)
            self._news.notify()

    def close(self) -> None:
        """End after the current slice; what has no answer yet fails with EngineGone."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        while self._wait_for_work():
            if (call := self._next_call()) is not None:
                self._run_slice(call)
            steps = 0
            while self._sampler.busy and not self._closed and (steps < self._turn_steps or not self._next_call()):
                self._decode_step()
                steps += 1
                self._take_inbox()
        self._fail_all()

    def _wait_for_work(self) -> bool:
        """False once closed."""
        while not self._has_work():
            self._freed.look(idle=True)
        self._take_inbox()
        return not self._closed

    def _has_work(self) -> bool:
        """False if there is none for a while."""
        with self._news:
            return self._news.wait_for(
                lambda: bool(self._closed or self._inbox or self._sampler.busy or self._next_call()), IDLE_S
            )

    def _next_call(self) -> Call | None:
        """Of the calls that can go on, that whose subject has waited longest."""
        return next(iter(self._free_calls()), None)

    def _free_calls(self) -> list[Call]:
        """The calls that can go on and wait for no older one; the subject that has waited longest first."""
        taken: set[str] = set()
        free: list[Call] = []
        for call in self._calls:
            if call.ready and taken.isdisjoint(call.subjects):
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
                self._last_slices.setdefault(item.subjects[0], self._slices)  # before others' next turns, not for ever

    def _decode_step(self) -> None:
        with torch.inference_mode():
            failure = attempt("sampling", self._sampler.step)
        if isinstance(failure, HalteresError):  # the sampler itself is broken: nobody may wait for ever
            self._sampler.fail_all(failure)

    def _run_slice(self, call: Call) -> None:
        """The next slice of a call, and of those that are computed with it."""
        together = self._together(call)
        if len(together) > 1:
            pending = [one.pending for one in together if one.pending is not None]
            failure = attempt("several passes", lambda: compute_together(pending))  # where it fails, each tries alone
            if isinstance(failure, EngineOutOfMemory):
                self._most_together = sum(one.batch.size for one in pending) // 2
        for one in together:
            self._advance(one)

    def _together(self, call: Call) -> list[Call]:
        """The call, and others with room beside its micro-batch; passes that have not begun begin."""
        found = [call] if not call.batches or self._has_begun(call) else []
        pending = [one.pending for one in found if one.pending is not None]
        if not pending or pending[0].batch.size >= self._most_together:
            return found
        for other in [other for other in self._free_calls() if other.batches and other is not call]:
            if (
                self._has_begun(other)
                and other.pending is not None
                and other.pending.fits(pending, self._most_together)
            ):
                found.append(other)
                pending.append(other.pending)
        return found

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
        if outcome is not False:
            self._calls.remove(call)
            waiting = {call.subjects[0] for call in self._calls}
            self._last_slices = {name: last for name, last in self._last_slices.items() if name in waiting}
        elif call.awaited is not None:
            call.awaited.add_done_callback(lambda _: self._wake())
        if isinstance(outcome, HalteresError):
            with suppress(InvalidStateError):  # cancelled
                call.future.set_exception(outcome)
        if outcome is not False:
            call.slices = call.pending = None  # a broken pass holds its tensors no longer
            self._freed.look(idle=False)

    def _wake(self) -> None:
        with self._news:
            self._news.notify()

    def _fail_all(self) -> None:
        self._take_inbox()
        for call in self._calls:
            with suppress(InvalidStateError):
                call.future.set_exception(closed_error())
        self._sampler.fail_all(closed_error())
