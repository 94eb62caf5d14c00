"""The one thread on which torch runs.

Owns: the order of calls and the turns between them and sampling.
Never: blocks the event loop; runs two calls at once.

The rule of turns: while calls wait, one slice of the oldest (a micro-batch of a pass, or a whole short call), then up
to `turn_steps` decode steps, and so on. So a training call never waits for a decode to end, nor a decode for a pass.
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

from halteres.engine.protocol import EngineGone
from halteres.engine.torch.memory import attempt
from halteres.engine.torch.requests import SampleRequest
from halteres.engine.torch.sampler import Sampler
from halteres.errors import HalteresError

Slices = Generator[None, None, Any]
"""A call in slices; its return value is the answer."""


@dataclass(slots=True, eq=False)
class Call:
    """A call that waits or runs."""

    name: str
    begin: Callable[[], Slices]
    future: Future[Any]
    slices: Slices | None = None

    def advance(self) -> bool:
        """Run the next slice; True once the call is answered."""
        try:
            if self.slices is None:
                self.slices = self.begin()
            next(self.slices)
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

    def __init__(self, sampler: Sampler, threads: int, turn_steps: int) -> None:
        self._sampler, self._threads, self._turn_steps = sampler, threads, turn_steps
        self._inbox: deque[Call | SampleRequest] = deque()
        self._calls: deque[Call] = deque()
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
            if self._calls:
                self._run_slice(self._calls[0])
            steps = 0
            while self._sampler.busy and not self._closed and (not self._calls or steps < self._turn_steps):
                self._decode_step()
                steps += 1
                self._take_inbox()
        self._fail_all()

    def _wait_for_work(self) -> bool:
        """False once closed."""
        with self._news:
            while not (self._closed or self._inbox or self._calls or self._sampler.busy):
                self._news.wait()
        self._take_inbox()
        return not self._closed

    def _take_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, SampleRequest):
                self._sampler.add(item)
            else:
                self._calls.append(item)

    def _decode_step(self) -> None:
        with torch.inference_mode():
            failure = attempt("sampling", self._sampler.step)
        if isinstance(failure, HalteresError):  # the sampler itself is broken: nobody may wait for ever
            self._sampler.fail_all(failure)

    def _run_slice(self, call: Call) -> None:
        """One slice of the oldest call. A call that has begun runs to its end, also if its caller went away."""
        outcome = attempt(call.name, call.advance)
        if outcome is not False:
            self._calls.popleft()
        if isinstance(outcome, HalteresError):
            call.slices = None  # a broken pass holds its tensors no longer
            with suppress(InvalidStateError):  # cancelled
                call.future.set_exception(outcome)

    def _fail_all(self) -> None:
        self._take_inbox()
        for call in self._calls:
            with suppress(InvalidStateError):
                call.future.set_exception(closed_error())
        self._sampler.fail_all(closed_error())
