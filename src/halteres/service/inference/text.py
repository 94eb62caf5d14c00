"""From tokens to text, while they come.

Owns: holding back what is no whole character yet, and what may be the beginning of a stop string; the cut before it.
Never: tells text that a later token would change.
Guarantee: the pieces of an answer, joined, are the text of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from halteres.text import Tokenizer, beginning

BROKEN = "\N{REPLACEMENT CHARACTER}"

CONTEXT_TOKENS = 8
"""Tokens before new ones that are decoded with them: tokenizers join neighbours, over a few tokens at most."""

WINDOW_TOKENS = 64

LONGEST_CHARACTER = 4
"""Bytes; of a run of broken ones that is longer, all but the last few stay broken."""


class Detokenizer:
    """The text of one sequence; a character whose bytes are spread over tokens is told when it is whole."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._window: list[int] = []  # the newest tokens
        self._told = 0  # characters of the window's text

    def add(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """The text that is certain now; with the last tokens, all of it."""
        self._window += tokens
        text = self._decoded()
        news = text[self._told : None if last else _certain(text)]
        self._told += len(news)
        if len(self._window) > WINDOW_TOKENS:
            untold = len(text) - self._told
            self._window = self._window[-CONTEXT_TOKENS:]
            self._told = max(0, len(self._decoded()) - untold)
        return news

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)


def _certain(text: str) -> int:
    """How much of a text no later byte changes."""
    whole = text.rstrip(BROKEN)
    return max(len(whole), len(text) - LONGEST_CHARACTER)


class Cut:
    """Ends a text before (or behind) the first of some strings, wherever the pieces break."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
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
        told, self._held = self._held[:whole], self._held[whole:]
        return told
