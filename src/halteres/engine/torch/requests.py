"""A sampling request on its way: the rows it still needs, the sequences it has.

Owns: when a row ends, and when the request is answered.
Never: touches a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from halteres.engine.protocol import SampleResult, SamplingParams, Sequence
from halteres.engine.torch.adapter import Snapshot

Decode = Callable[[list[int]], str]
"""The text of tokens, special ones by name."""


@dataclass(slots=True, kw_only=True, eq=False)
class SampleRequest:
    """One call of `sample`."""

    snapshot: Snapshot
    prompt: bytes  # int32
    tokens: np.ndarray  # the same, int64
    num_samples: int
    params: SamplingParams
    limit: int  # new tokens per sequence
    stop_tokens: frozenset[int]
    decode: Decode
    wants_prompt_logprobs: bool
    future: Future[SampleResult]
    prompt_logprobs: bytes | None = None
    started: int = 0  # samples that have, or had, a row
    finished: dict[int, Sequence] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """Samples that have no row yet."""
        return self.num_samples - self.started

    @property
    def full_length(self) -> int:
        """Positions a sequence may take."""
        return len(self.tokens) + self.limit

    def finish(self, sample: int, sequence: Sequence) -> None:
        """One sequence is complete; the last one answers the request."""
        self.finished[sample] = sequence
        if len(self.finished) == self.num_samples:
            sequences = tuple(self.finished[i] for i in range(self.num_samples))
            result = SampleResult(
                sequences=sequences, version=self.snapshot.version, prompt_logprobs=self.prompt_logprobs
            )
            with suppress(InvalidStateError):  # cancelled
                self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        """Answer with an error, if nothing was answered yet."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class Row:
    """One sequence that is being sampled."""

    request: SampleRequest
    sample: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def take(self, token: int, logprob: float) -> bool:
        """Add a token; True if the row ended with it (its request has the sequence then)."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        request = self.request
        stopped = token in request.stop_tokens or (bool(request.params.stop_strings) and self._ends_in_stop())
        if not stopped and len(self.tokens) < request.limit:
            return False
        request.finish(
            self.sample,
            Sequence(
                tokens=np.array(self.tokens, dtype="<i4").tobytes(),
                logprobs=np.array(self.logprobs, dtype="<f4").tobytes(),
                stop_reason="stop" if stopped else "length",
            ),
        )
        return True

    def _ends_in_stop(self) -> bool:
        """A stop string ends in the newest token. Only a tail is decoded: a token holds at least one byte of text."""
        stops = self.request.params.stop_strings
        tail = max(len(stop.encode()) for stop in stops) + 4
        text = self.request.decode(self.tokens[-tail:])
        return any(stop in text for stop in stops)
