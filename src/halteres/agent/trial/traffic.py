"""What went between one environment and its model, in figures.

Owns: the noun `Traffic`.
Never: sends anything, looks at what was said.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

from halteres.agent.trial import wire


class Traffic(msgspec.Struct, kw_only=True):
    """Counts of one model, so far."""

    asked: int = 0  # completions that the environment asked for
    completions: int = 0  # that came
    tokens: int = 0  # of them
    truncated: int = 0  # cut off by the limit of tokens
    retries: int = 0
    errors: dict[str, int] = {}  # what was given up on: status -> how often
    last_error: str = ""
    over: Literal["", "model", "budget"] = ""  # why nothing more is sent: the model fails for good, or enough was spent
    in_flight: int = 0
    busy_s: float = 0.0  # during which anything was in flight
    busy_since: float = 0.0  # monotonic

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """One request of the environment's, inside."""
        if self.in_flight == 0:
            self.busy_since = time.monotonic()
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self.busy_s += time.monotonic() - self.busy_since

    def answered(self, answer: Any) -> None:
        """Take in a model's answer."""
        self.completions += len(wire.items(answer))
        self.truncated += sum(wire.finish(item) == "length" for item in wire.items(answer))
        self.tokens += wire.tokens(answer)

    def failed(self, status: int, why: str) -> None:
        """A request was given up."""
        self.errors[str(status)] = self.errors.get(str(status), 0) + 1
        self.last_error = why

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all answers, over the time in which any was waited for."""
        return self.tokens / self.busy_s if self.busy_s > 0 and self.tokens else None
