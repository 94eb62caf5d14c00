"""What a model thinks, says and calls, told apart by the marks in what it writes.

`tool_calls` reads the calls themselves; here they only are not what is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from halteres.service.inference.outputs import Position
from halteres.short_texts import beginning
from halteres.tokenizer import THINKING, THOUGHT
from halteres.tool_calls import CLOSE, OPEN

Kind = Literal["message", "reasoning", "call"]

_OPENED: Mapping[str, tuple[Kind, str]] = {
    THINKING: ("reasoning", THOUGHT),
    OPEN: ("call", CLOSE),
}
"""What begins at a mark, and the mark at which it ends."""


class Sections:
    """Splits a text, which comes in pieces, at the marks of thinking, and of calls where those are
    still in it. The space next to a mark belongs to nothing.
    """

    def __init__(self, *, in_thought: bool, with_calls: bool = False) -> None:
        self._marks = [THINKING]
        if with_calls:
            self._marks.append(OPEN)
        self.kind: Kind = "message"  # of what comes next
        self._ends_at = ""
        if in_thought:
            self.kind, self._ends_at = _OPENED[THINKING]
        self.held = ""  # what may be the beginning of a mark
        self._is_next_to_mark = in_thought

    def add(self, text: str, *, last: bool = False) -> list[tuple[Kind, str]]:
        """The parts that are certain now, in order; with the last text, all of them."""
        self.held += text
        parts = list[tuple[Kind, str]]()
        while True:
            marks = self._marks
            if self._ends_at:
                marks = [self._ends_at]
            found = re.search("|".join(map(re.escape, marks)), self.held)
            if found is None:
                break
            parts += self._part(self.held[: found.start()].rstrip())
            self.held = self.held[found.end() :]
            self._is_next_to_mark = True
            self.kind, self._ends_at = _OPENED.get(found[0], ("message", ""))
        certain = len(self.held)
        if not last:
            certain = len(self.held[: beginning(self.held, marks)].rstrip())
        parts += self._part(self.held[:certain])
        self.held = self.held[certain:]
        return parts

    def _part(self, text: str) -> list[tuple[Kind, str]]:
        if self._is_next_to_mark:
            text = text.lstrip()
        if not text:
            return []
        self._is_next_to_mark = False
        return [(self.kind, text)]


class MessageTokens:
    """Which tokens of an answer are those of its messages; the others think or call.

    Tokens are told apart by their own texts, in which marks stand as they do in the whole. The
    tokens of a mark belong to what it begins or ends; one that holds text and the beginning of a
    mark, to the message.
    """

    def __init__(self, sections: Sections) -> None:
        self._sections = sections
        self._undecided = list[Position]()  # their text may be the beginning of a mark
        self._messages: list[list[Position]] = [[]]
        self.num_thought = 0

    def add(self, position: Position, text: str) -> None:
        """One more token of the answer."""
        before = self._sections.kind
        parts = self._sections.add(text)
        self._undecided.append(position)
        after = self._sections.kind
        if parts or not self._sections.held or before != after:
            self._decide(before, after)

    def of_message(self, number: int) -> list[Position]:
        """The tokens of a message, as far as they are known."""
        if number >= len(self._messages):
            return []
        return self._messages[number]

    def end(self) -> None:
        """No more tokens come."""
        self._decide(self._sections.kind, self._sections.kind)

    def _decide(self, before: Kind, after: Kind) -> None:
        if before == after == "message":
            self._messages[-1] += self._undecided
        elif self._messages[-1]:
            self._messages.append([])
        if "reasoning" in (before, after):
            self.num_thought += len(self._undecided)
        self._undecided = []
