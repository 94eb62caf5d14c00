"""How much of an item's time was spent on sampling: what is left is the environment's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True)
class SamplingClock:
    """Runs while at least one request of an item is under way: its rollouts ask at once."""

    now: Callable[[], float] = time.monotonic
    seconds: float = 0.0
    _under_way: int = 0
    _since: float = field(default=0.0)

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request is under way."""
        if self._under_way == 0:
            self._since = self.now()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if self._under_way == 0:
                self.seconds += self.now() - self._since


_clock: ContextVar[SamplingClock | None] = ContextVar("halteres_sampling_clock", default=None)


@contextmanager
def sampling_measured() -> Iterator[SamplingClock]:
    """Inside, the requests of this task and of the tasks that it starts are measured."""
    clock = SamplingClock()
    token = _clock.set(clock)
    try:
        yield clock
    finally:
        _clock.reset(token)


@contextmanager
def sampling() -> Iterator[None]:
    """A request is under way."""
    if (clock := _clock.get()) is None:
        yield
        return
    with clock.request():
        yield
