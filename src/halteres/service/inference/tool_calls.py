"""Calls of tools in an answer, as Qwen's and Hermes's models write them.

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

Owns: telling them from the text around them, while it comes or when it is whole.
Never: calls anything; drops what it cannot read: that stays text.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field

import msgspec

from halteres.service.inference.text import beginning

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """The model wants a tool called."""

    index: int
    name: str
    arguments: str  # a JSON object
    id: str = field(default_factory=_call_id)


class ToolReader:
    """Splits a text into what is said and what is called; `parallel` false keeps the first call alone."""

    def __init__(self, *, parallel: bool = True) -> None:
        self._parallel = parallel
        self._held, self._inside = "", False
        self.calls = 0

    def add(self, text: str, *, last: bool = False) -> list[str | ToolCall]:
        """The parts that are certain now, in order."""
        self._held += text
        parts: list[str | ToolCall] = []
        while (found := self._held.find(CLOSE if self._inside else OPEN)) >= 0:
            before, self._held = self._held[:found], self._held[found + len(CLOSE if self._inside else OPEN) :]
            parts += self._called(before, CLOSE) if self._inside else self._said(before.rstrip())
            self._inside = not self._inside
        if last:
            parts += self._called(self._held, "") if self._inside else self._said(self._held)
            self._held = ""
        elif not self._inside:
            certain = len(self._held[: beginning(self._held, [OPEN])].rstrip())
            parts += self._said(self._held[:certain])
            self._held = self._held[certain:]
        return parts

    def _said(self, text: str) -> list[str | ToolCall]:
        return [text] if text and not (self.calls and text.isspace()) else []

    def _called(self, text: str, closed_by: str) -> list[str | ToolCall]:
        found = _read(text, self.calls)
        if found is None:
            return [OPEN + text + closed_by]
        self.calls += 1
        return [found] if self._parallel or found.index == 0 else []


class _Written(msgspec.Struct):
    name: str
    arguments: dict[str, object] = {}


def _read(text: str, index: int) -> ToolCall | None:
    try:
        written = msgspec.json.decode(text.strip(), type=_Written)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return ToolCall(index=index, name=written.name, arguments=json.dumps(written.arguments, ensure_ascii=False))
