"""Calls of tools in an answer, as Qwen's and Hermes's models write them.

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

They are told from the text around them while it comes, or when it is whole. What cannot be read is never dropped: it
stays text, or is a call with an error.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from halteres.text import beginning

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_TOOLS = """You may call tools. Each line is one of them, as a JSON schema:
{tools}
To call one, write:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """The model wants a tool called."""

    index: int  # among those of its answer
    name: str  # empty where it cannot be read
    arguments: Mapping[str, Any] | None  # None: it cannot be read
    error: str | None = None  # why it cannot be read
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    @property
    def arguments_json(self) -> str:
        """The arguments as OpenAI's API writes them."""
        return json.dumps(self.arguments or {}, ensure_ascii=False)

    def result(self, content: object) -> dict[str, Any]:
        """The message that tells the model what came of the call."""
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": str(content)}


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a model is told of its tools, for a system message."""
    return _TOOLS.format(tools="\n".join(json.dumps(dict(tool), ensure_ascii=False) for tool in tools))


def read_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """What a whole answer says and what it calls; a call that cannot be read says why."""
    parts = ToolReader(keeps_broken=True).add(text, last=True)
    prose = "".join(part for part in parts if isinstance(part, str))
    return prose, tuple(part for part in parts if isinstance(part, ToolCall))


class ToolReader:
    """Splits a text into what is said and what is called.

    Args:
        parallel: False keeps the first call alone.
        keeps_broken: whether a call that cannot be read is one with an error, or text.
    """

    def __init__(self, *, parallel: bool = True, keeps_broken: bool = False) -> None:
        self._parallel, self._keeps_broken = parallel, keeps_broken
        self._held, self._inside = "", False
        self.calls = 0

    def add(self, text: str, *, last: bool = False) -> list[str | ToolCall]:
        """The parts that are certain now, in order."""
        self._held += text
        parts: list[str | ToolCall] = []
        while (found := self._held.find(CLOSE if self._inside else OPEN)) >= 0:
            before, self._held = self._held[:found], self._held[found + len(CLOSE if self._inside else OPEN) :]
            parts += self._call(before, CLOSE) if self._inside else self._text(before.rstrip())
            self._inside = not self._inside
        if last:
            parts += self._call(self._held, "") if self._inside else self._text(self._held)
            self._held = ""
        elif not self._inside:
            certain = len(self._held[: beginning(self._held, [OPEN])].rstrip())
            parts += self._text(self._held[:certain])
            self._held = self._held[certain:]
        return parts

    def _text(self, text: str) -> list[str | ToolCall]:
        return [text] if text and not (self.calls and text.isspace()) else []

    def _call(self, text: str, closed_by: str) -> list[str | ToolCall]:
        try:
            written = msgspec.json.decode(text.strip(), type=_Written)
            call = ToolCall(index=self.calls, name=written.name, arguments=written.arguments)
        except (msgspec.MsgspecError, RecursionError) as error:
            why = f"The call cannot be read: {error}."
            call = ToolCall(index=self.calls, name="", arguments=None, error=why)
        if call.error is not None and not self._keeps_broken:
            return [OPEN + text + closed_by]
        self.calls += 1
        return [call] if self._parallel or call.index == 0 else []


class _Written(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}
