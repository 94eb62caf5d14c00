"""A sampling request on its way: the rows it still needs, the sequences it has.

Owns: when a row ends, when the request is answered, what a stream has been told.
Never: touches a tensor.

A row that loses its slot goes on from its prompt and the tokens it has, bit for bit: its draws are a function of (seed,
sample, position).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from halteres.engine.checks import bytes_of
from halteres.engine.protocol import Piece, SampleResult, SamplingParams, Sequence, TopK, Wanted
from halteres.engine.stream_buffer import PieceQueue, end_to_end
from halteres.engine.torch.adapter import Snapshot
from halteres.engine.torch.scores import PromptScores

StopReason = Literal["stop", "length"]

Decode = Callable[[list[int]], str]
"""The text of tokens, special ones by name."""


class Newest(NamedTuple):
    """A token that was just sampled."""

    token: int
    logprob: float
    top: TopK | None = None  # of length 1, where the request wants one


@dataclass(slots=True, kw_only=True, eq=False)
class SampleRequest:
    """One call of `sample` or `stream`."""

    snapshot: Snapshot
    prompt: bytes  # int32
    tokens: np.ndarray  # the same, int64
    num_samples: int
    params: SamplingParams
    limit: int  # new tokens per sequence
    stop_tokens: frozenset[int]
    decode: Decode
    future: Future[SampleResult]
    wanted: Wanted = Wanted()  # noqa: RUF009 - frozen
    pieces: PieceQueue | None = None  # where a stream goes
    arrival: int = 0  # its number among all requests of a sampler: the lowest goes first
    scores: PromptScores | None = None
    cache_hit_tokens: int = 0  # of the prompt
    waiting: deque[Row] = field(init=False)  # rows without a slot
    finished: dict[int, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = deque(Row(self, sample) for sample in range(self.num_samples))

    @property
    def full_length(self) -> int:
        """Positions a sequence may take."""
        return len(self.tokens) + self.limit

    @property
    def needs(self) -> int:
        """Positions of all its sequences: how much memory it takes, compared with others."""
        return self.num_samples * self.full_length

    def begin_again(self, rows: Iterable[Row]) -> None:
        """These rows have lost their slots and wait for others, in order with those that never had one."""
        self.waiting = deque(sorted([*self.waiting, *rows], key=lambda row: row.sample))

    def tell(self, sample: int, newest: Newest, stop_reason: StopReason | None) -> None:
        """Send the newest token."""
        if self.pieces is None:
            return
        piece = Piece(
            sample=sample,
            tokens=np.int32(newest.token).tobytes(),
            logprobs=np.float32(newest.logprob).tobytes(),
            version=self.snapshot.version,
            top=newest.top,
            stop_reason=stop_reason,
        )
        self.pieces.put(piece)

    def finish(self, sample: int, sequence: Sequence) -> None:
        """One sequence is complete; the last one answers the request."""
        self.finished[sample] = sequence
        if len(self.finished) == self.num_samples:
            scores = self.scores or PromptScores()
            result = SampleResult(
                sequences=tuple(self.finished[i] for i in range(self.num_samples)),
                version=self.snapshot.version,
                prompt_cache_hit_tokens=self.cache_hit_tokens,
                prompt_logprobs=scores.prompt_logprobs,
                topk_prompt=scores.topk,
                target_logprobs=scores.targets,
                alternatives=scores.alternatives,
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
    tops: list[TopK] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.request.tokens) + len(self.tokens)

    @property
    def age(self) -> tuple[int, int]:
        """The lower, the longer it has been asked for: where memory ends, the highest makes way."""
        return self.request.arrival, self.sample

    @property
    def text(self) -> np.ndarray:
        """Prompt and answer, int64."""
        return np.concatenate([self.request.tokens, np.array(self.tokens, np.int64)])

    def take(self, newest: Newest) -> bool:
        """Add a token; True if the row ended with it (its request has the sequence then)."""
        self.tokens.append(newest.token)
        self.logprobs.append(newest.logprob)
        if newest.top is not None:
            self.tops.append(newest.top)
        reason, request = self._stop_reason(newest.token), self.request
        request.tell(self.sample, newest, reason)
        if reason is None:
            return False
        request.finish(
            self.sample,
            Sequence(
                tokens=np.array(self.tokens, dtype="<i4").tobytes(),
                logprobs=np.array(self.logprobs, dtype="<f4").tobytes(),
                stop_reason=reason,
                top=end_to_end(self.tops),
            ),
        )
        return True

    def _stop_reason(self, token: int) -> StopReason | None:
        request = self.request
        if token in request.stop_tokens or (request.params.stop_strings and self._ends_in_stop()):
            return "stop"
        return "length" if len(self.tokens) >= request.limit else None

    def _ends_in_stop(self) -> bool:
        """A stop string ends in the newest token. Only a tail is decoded: a token holds at least one byte of text."""
        stops = self.request.params.stop_strings
        tail = max(map(bytes_of, stops)) + 4
        text = self.request.decode(self.tokens[-tail:])
        return any(stop in text for stop in stops)
