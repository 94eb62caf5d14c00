"""What inference writes: from tokens to text, whole or in pieces while they come.

Guarantees: the pieces of an answer, joined, are the text of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from halteres.engine.protocol import Piece, SampleResult, Sequence, TopK
from halteres.service.inference.requests import InferenceRequest, Prompt
from halteres.service.wire.results import FILLER_LOGPROB
from halteres.text import Tokenizer, beginning
from halteres.tool_calls import ToolCall, ToolReader

BROKEN = "\N{REPLACEMENT CHARACTER}"

CONTEXT_TOKENS = 8
"""Tokens before new ones that are decoded with them: tokenizers join neighbours, over a few tokens at most."""

WINDOW_TOKENS = 64

LONGEST_CHARACTER = 4  # bytes; of a run of broken ones that is longer, all but the last few stay broken


class Detokenizer:
    """The text of one sequence; a character whose bytes are spread over tokens comes when it is whole."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._window: list[int] = []  # the newest tokens
        self._sent = 0  # characters of the window's text

    def add(self, tokens: list[int], *, last: bool = False) -> str:
        """The text that is certain now; with the last tokens, all of it."""
        self._window += tokens
        text = self._decoded()
        certain = len(text) if last else max(len(text.rstrip(BROKEN)), len(text) - LONGEST_CHARACTER)
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
        """The text that holds no stop string and no beginning of one; with the last piece, beginnings too."""
        if self.matched is not None:
            return ""
        self._held += text
        found = min(((at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0), default=None)
        if found is not None:
            at, self.matched = found
            return self._held[: at + (len(self.matched) if self._keep else 0)]
        whole = len(self._held) if last else beginning(self._held, self._stops)
        sent, self._held = self._held[:whole], self._held[whole:]
        return sent


Row = list[tuple[int, float]]  # tokens and their log-probabilities at one position, the most likely first

Position = tuple[int, float | None, Row]
"""A token, its log-probability (None where nothing predicts it), and what was likely there where that was asked for."""


def prompt_positions(prompt: Prompt, result: SampleResult) -> list[Position] | None:
    """What a result says of its prompt."""
    if result.prompt_logprobs is None:
        return None
    return _positions(prompt.tokens, result.prompt_logprobs, result.topk_prompt)


def _positions(tokens: list[int], logprobs: bytes, top: TopK | None) -> list[Position]:
    rows: list[Row] = [[] for _ in tokens]
    if top is not None:
        ids = np.frombuffer(top.ids, np.int32).reshape(top.length, top.k).tolist()
        values = np.frombuffer(top.logprobs, np.float32).reshape(top.length, top.k).tolist()
        for row, *pairs in zip(rows, ids, values, strict=True):
            row += [(token, value) for token, value in zip(*pairs, strict=True) if value > FILLER_LOGPROB]
    values = np.frombuffer(logprobs, np.float32).tolist()
    return [
        (token, None if value != value else value, row) for token, value, row in zip(tokens, values, rows, strict=True)
    ]


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
    text: str  # without special tokens and what stopped it, unless the request asks for them
    parts: list[str | ToolCall]  # the text as what is said and what is called
    called: bool  # there was a call so far
    finish: Literal["stop", "length"] | None  # None: more pieces come
    matched: str | int | None  # the stop string or named stop token that ended it
    version: int  # policy version


class Writer:
    """One sequence: from its tokens to its text."""

    def __init__(self, tokenizer: Tokenizer, request: InferenceRequest, place: int) -> None:
        self._place, sampling = place, request.sampling
        self._sample, self._prompt = place % sampling.n, request.prompts[place // sampling.n]
        self._named, self._keeps_stop = frozenset(sampling.named_stop_tokens), sampling.include_stop_str_in_output
        self._ends = self._named if sampling.ignore_eos else self._named | frozenset(tokenizer.eos_token_ids)
        self._characters = Detokenizer(tokenizer, skip_special_tokens=sampling.skip_special_tokens)
        self._cut = Cut(sampling.stop_strings, keep=self._keeps_stop)
        self._calls = ToolReader(parallel=bool(request.parallel_calls))
        self._reads_calls, self._first = request.parallel_calls is not None, True

    def add(self, piece: Sequence | Piece, version: int, of_prompt: list[Position] | None = None) -> Output:
        """The next tokens, or all of them; the last ones have a stop reason."""
        ids: list[int] = np.frombuffer(piece.tokens, np.int32).tolist()
        finish, last = piece.stop_reason, piece.stop_reason is not None
        stopped_by = ids[-1] if finish == "stop" and ids and ids[-1] in self._ends else None
        shown = ids if stopped_by is None or self._keeps_stop else ids[:-1]
        text = self._cut.add(self._characters.add(shown, last=last), last=last)
        plain: list[str | ToolCall] = [text] if text else []
        first, self._first = self._first, False
        return Output(
            place=self._place,
            sample=self._sample,
            prompt=self._prompt,
            of_prompt=of_prompt,
            tokens=ids,
            positions=_positions(ids, piece.logprobs, piece.top),
            first=first,
            text=text,
            parts=self._calls.add(text, last=last) if self._reads_calls else plain,
            called=self._calls.calls > 0,
            finish="stop" if last and self._cut.matched is not None else finish,
            matched=(stopped_by if stopped_by in self._named else self._cut.matched) if last else None,
            version=version,
        )
