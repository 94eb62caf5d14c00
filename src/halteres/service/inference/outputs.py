"""From sampled tokens to what is answered: their text, whole or in pieces while they come, calls of
tools, log-probabilities.

Guarantees: the pieces of an answer, joined, are the text of the whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from halteres.engine.protocol import Piece, Sequence, TopK
from halteres.service.inference.requests import InferenceRequest, Position, Prompt
from halteres.service.wire.results import FILLER_LOGPROB
from halteres.short_texts import beginning
from halteres.tokenizer import Tokenizer
from halteres.tool_calls import ToolCall, ToolReader

BROKEN = "\N{REPLACEMENT CHARACTER}"

CONTEXT_TOKENS = 8
"""Tokens before new ones that are decoded with them: tokenizers join neighbours, over a few tokens
at most.
"""

WINDOW_TOKENS = 64

# bytes; of a run of broken ones that is longer, all but the last few stay broken
LONGEST_CHARACTER = 4


class Detokenizer:
    """The text of one sequence; a character whose bytes are spread over tokens comes when it is
    whole.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._window: list[int] = []  # the newest tokens
        self._sent = 0  # characters of the window's text

    def add(self, tokens: list[int], *, last: bool = False) -> str:
        """The text that is certain now; with the last tokens, all of it."""
        self._window += tokens
        text = self._decoded()
        certain = len(text)
        if not last:
            certain = max(len(text.rstrip(BROKEN)), len(text) - LONGEST_CHARACTER)
        new = text[self._sent : certain]
        self._sent += len(new)
        if len(self._window) > WINDOW_TOKENS:
            unsent = len(text) - self._sent
            self._window = self._window[-CONTEXT_TOKENS:]
            self._sent = max(0, len(self._decoded()) - unsent)
        return new

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)


class Cut:
    """Ends a text before (or behind) the first of some strings, wherever the pieces break."""

    def __init__(self, stops: tuple[str, ...], *, keep: bool = False) -> None:
        self._stops, self._keep = stops, keep
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str, *, last: bool = False) -> str:
        """The text that holds no stop string and no beginning of one; with the last piece,
        beginnings too.
        """
        if self.matched is not None:
            return ""
        self._held += text
        found = min(
            ((at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0), default=None
        )
        if found is not None:
            at, self.matched = found
            if self._keep:
                at += len(self.matched)
            return self._held[:at]
        whole = len(self._held)
        if not last:
            whole = beginning(self._held, self._stops)
        sent, self._held = self._held[:whole], self._held[whole:]
        return sent


# tokens and their log-probabilities at one position, the most likely first
Row = list[tuple[int, float]]


def positions_of(tokens: list[int], logprobs: bytes, top: TopK | None) -> list[Position]:
    """One for each token."""
    rows: list[Row] = [[] for _ in tokens]
    if top is not None:
        ids = np.frombuffer(top.ids, np.int32).reshape(top.length, top.k).tolist()
        values = np.frombuffer(top.logprobs, np.float32).reshape(top.length, top.k).tolist()
        for row, *pairs in zip(rows, ids, values, strict=True):
            row += [
                (token, value)
                for token, value in zip(*pairs, strict=True)
                if value > FILLER_LOGPROB
            ]
    values = np.frombuffer(logprobs, np.float32).tolist()
    return [
        (token, _known(value), row) for token, value, row in zip(tokens, values, rows, strict=True)
    ]


def _known(logprob: float) -> float | None:
    """None for NaN, which stands where nothing predicts a token."""
    if math.isnan(logprob):
        return None
    return logprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One sampled sequence, or its next piece."""

    place: int  # number of the sequence among all of the request
    sample: int  # ... and among those of its prompt
    prompt: Prompt
    of_prompt: list[Position] | None
    tokens: list[int]
    positions: list[Position]  # of the tokens
    first: bool  # nothing of the sequence came before
    text: str  # without special tokens and what stopped it, unless they are to be included
    parts: list[str | ToolCall]  # the text as texts and calls
    called: bool  # there was a call so far
    finish: Literal["stop", "length"] | None  # None: more pieces come
    matched: str | int | None  # the stop string, or the request's own stop token, that ended it
    version: int  # policy version
    # tokens of the sequence, where the context had no room for the `max_tokens` it was to have
    truncated_max_tokens: int | None

    @property
    def plain(self) -> str:
        """The text without calls."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[ToolCall]:
        """The calls."""
        return [part for part in self.parts if isinstance(part, ToolCall)]


@dataclass(slots=True)
class Usage:
    """Tokens and policy versions of an answer, as far as it is written."""

    completion: int = 0
    versions: set[int] = field(default_factory=set)
    # tokens of sequences that the context had no more room for
    truncated: set[int] = field(default_factory=set)

    def add(self, one: Output) -> None:
        """Count a sequence, or a piece of one."""
        self.completion += len(one.tokens)
        self.versions.add(one.version)
        if one.truncated_max_tokens is not None:
            self.truncated.add(one.truncated_max_tokens)

    @property
    def policy_version(self) -> list[int]:
        """Smallest and largest."""
        return [min(self.versions, default=0), max(self.versions, default=0)]

    @property
    def ours(self) -> dict[str, Any]:
        """Fields that an answer has in every dialect: the policy versions, and where `max_tokens`
        did not fit beside a prompt, how many tokens did.
        """
        ours: dict[str, Any] = {"policy_version": self.policy_version}
        if self.truncated:
            ours["truncated_max_tokens"] = min(self.truncated)
        return ours


class Writer:
    """One sequence: from its tokens to its text."""

    def __init__(self, tokenizer: Tokenizer, request: InferenceRequest, place: int) -> None:
        self._place, sampling = place, request.sampling
        self._sample, self._prompt = place % sampling.n, request.prompts[place // sampling.n]
        self._own_stops = frozenset(sampling.stop_tokens)
        self._keeps_stop = sampling.include_stop_str_in_output
        self._ends = self._own_stops
        if not sampling.ignore_eos:
            self._ends = self._own_stops | frozenset(tokenizer.eos_token_ids)
        self._characters = Detokenizer(tokenizer, skip_special_tokens=sampling.skip_special_tokens)
        self._cut = Cut(sampling.stop_strings, keep=self._keeps_stop)
        self._calls = ToolReader(
            parallel=bool(request.parallel_calls),
            in_thought=request.goes_on_thinking(self._prompt),
        )
        self._reads_calls, self._first = request.parallel_calls is not None, True
        self._max_tokens, self._num_tokens = sampling.max_tokens, 0

    def add(
        self, piece: Sequence | Piece, version: int, of_prompt: list[Position] | None = None
    ) -> Output:
        """The next tokens, or all of them; the last ones have a stop reason."""
        ids: list[int] = np.frombuffer(piece.tokens, np.int32).tolist()
        finish, last = piece.stop_reason, piece.stop_reason is not None
        shown, stopped_by = ids, None
        if finish == "stop" and ids and ids[-1] in self._ends:
            stopped_by = ids[-1]
            if not self._keeps_stop:
                shown = ids[:-1]
        text = self._cut.add(self._characters.add(shown, last=last), last=last)
        parts: list[str | ToolCall] = []
        if self._reads_calls:
            parts = self._calls.add(text, last=last)
        elif text:
            parts = [text]
        first, self._first = self._first, False
        if last and self._cut.matched is not None:
            finish = "stop"
        self._num_tokens += len(ids)
        matched: str | int | None = None
        if last:
            matched = stopped_by if stopped_by in self._own_stops else self._cut.matched
        truncated_max_tokens = None
        if finish == "length" and self._num_tokens < (self._max_tokens or 0):
            truncated_max_tokens = self._num_tokens
        return Output(
            place=self._place,
            sample=self._sample,
            prompt=self._prompt,
            of_prompt=of_prompt,
            tokens=ids,
            positions=positions_of(ids, piece.logprobs, piece.top),
            first=first,
            text=text,
            parts=parts,
            called=self._calls.calls > 0,
            finish=finish,
            matched=matched,
            version=version,
            truncated_max_tokens=truncated_max_tokens,
        )
