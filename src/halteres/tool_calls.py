"""Calls of tools in an answer, as Qwen's and Hermes's models write them.

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

They are told from the text around them while it comes, or when it is whole. A call ends at the
first `</tool_call>` outside of its strings. What stands within `<think>...</think>` is text. What
cannot be read is never dropped: it stays text, or is a call with an error. A call without an end,
a key given twice, and arguments under a name that is not known are errors, too: what would be read
is a call that the model did not make.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from halteres.documents import parse_json
from halteres.short_texts import beginning
from halteres.tokenizer import THINKING, THOUGHT, text_of

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
    return _TOOLS.format(
        tools="\n".join(json.dumps(dict(tool), ensure_ascii=False) for tool in tools)
    )


_SYSTEM_ROLES = ("system", "developer")


def in_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """A chat for a template that has no place for tools: they are described in the system message,
    calls stand in the answer that made them, and what they gave is said by the user.

    Args:
        messages: in OpenAI's form.
        tools: in OpenAI's form; those that may be called from now on.

    Raises:
        InvalidData: a message's content holds what is no text.

    >>> in_words([{"role": "tool", "tool_call_id": "call_1", "content": "42"}])
    [{'role': 'user', 'content': '<tool_response>\\n42\\n</tool_response>'}]
    """
    worded = [_in_words(message) for message in messages]
    if not tools:
        return worded
    words = describe_tools(tools)
    if worded and worded[0]["role"] in _SYSTEM_ROLES:
        first = worded[0]
        worded[0] = {**first, "content": f"{text_of(first.get('content'))}\n\n{words}"}
        return worded
    return [{"role": "system", "content": words}, *worded]


def _in_words(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        response = text_of(message.get("content"))
        return {"role": "user", "content": f"<tool_response>\n{response}\n</tool_response>"}
    if not message.get("tool_calls"):
        return dict(message)
    said = text_of(message.get("content"))
    written = [_call_in_words(call["function"]) for call in message["tool_calls"]]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join([said, *written] if said else written)}


def _call_in_words(function: Mapping[str, Any]) -> str:
    """A call as the model is told to write it."""
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'{OPEN}\n{{"name": {name}, "arguments": {arguments}}}\n{CLOSE}'


def read_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """What a whole answer says and what it calls; a call that cannot be read says why."""
    reader = ToolReader(keeps_broken=True)
    parts = reader.add(text, last=True)
    if reader.began_in_thought:
        parts = ToolReader(keeps_broken=True, in_thought=True).add(text, last=True)
    prose = "".join(part for part in parts if isinstance(part, str))
    return prose, tuple(part for part in parts if isinstance(part, ToolCall))


class ToolReader:
    """Splits a text into what is said and what is called.

    Args:
        parallel: False keeps the first call alone.
        keeps_broken: whether a call that cannot be read is one with an error, or text.
        in_thought: the text goes on with thinking that its prompt began.
    """

    def __init__(
        self, *, parallel: bool = True, keeps_broken: bool = False, in_thought: bool = False
    ) -> None:
        self._parallel, self._keeps_broken = parallel, keeps_broken
        self._held = ""
        self._in_thought = in_thought
        # Of the call that the held text is, or None between calls.
        self._call_end: _CallEnd | None = None
        self.calls = 0
        self.began_in_thought = in_thought  # or was seen to: thinking ended that had not begun

    def add(self, text: str, *, last: bool = False) -> list[str | ToolCall]:
        """The parts that are certain now, in order."""
        self._held += text
        parts: list[str | ToolCall] = []
        while True:
            if self._call_end is not None:
                end = self._call_end.find(self._held, last=last)
                if end is None:
                    break
                parts += self._call(self._held[:end])
                self._held = self._held[end + len(CLOSE) :]
                self._call_end = None
                continue
            mark = (_THOUGHT_END if self._in_thought else _MARK).search(self._held)
            if mark is None:
                break
            if mark[0] == OPEN:
                parts += self._text(self._held[: mark.start()].rstrip())
                self._call_end = _CallEnd()
            else:
                parts += self._text(self._held[: mark.end()])
                if mark[0] == THOUGHT and not self._in_thought:
                    self.began_in_thought = True
                self._in_thought = mark[0] == THINKING
            self._held = self._held[mark.end() :]
        if last:
            parts += self._unfinished_call() if self._call_end else self._text(self._held)
            self._held = ""
        elif self._call_end is None:
            parts += self._certain()
        return parts

    def _certain(self) -> list[str | ToolCall]:
        """The text that no mark can begin in, nor a call follow that takes its spaces away."""
        if self._in_thought:
            certain = beginning(self._held, [THOUGHT])
        else:
            certain = len(self._held[: beginning(self._held, [OPEN, THINKING, THOUGHT])].rstrip())
        parts = self._text(self._held[:certain])
        self._held = self._held[certain:]
        return parts

    def _text(self, text: str) -> list[str | ToolCall]:
        is_between_calls = self.calls > 0 and not self._in_thought and text.isspace()
        return [text] if text and not is_between_calls else []

    def _call(self, text: str) -> list[str | ToolCall]:
        try:
            name, arguments = _read(text)
        except (ValueError, RecursionError) as error:
            return self._broken(OPEN + text + CLOSE, str(error))
        return self._next(ToolCall(index=self.calls, name=name, arguments=arguments))

    def _unfinished_call(self) -> list[str | ToolCall]:
        return self._broken(OPEN + self._held, f"it has no {CLOSE}")

    def _broken(self, written: str, why: str) -> list[str | ToolCall]:
        if not self._keeps_broken:
            return [written]
        error = f"The call cannot be read: {why}."
        return self._next(ToolCall(index=self.calls, name="", arguments=None, error=error))

    def _next(self, call: ToolCall) -> list[str | ToolCall]:
        self.calls += 1
        return [call] if self._parallel or call.index == 0 else []


class _CallEnd:
    """Finds the `</tool_call>` that ends a call, in the call's text while it grows.

    A CLOSE within a string of JSON is none. Where the quotes do not match, the first CLOSE is the
    end.
    """

    def __init__(self) -> None:
        # up to where the text was looked at: no character is looked at twice but for the last ones
        self._at = 0
        self._is_quoted = False  # whether that is within a string
        self._has_strings = True  # False: the text is not JSON, and its quotes mean nothing
        self._first: int | None = None  # the first CLOSE, if it stands within a string

    def find(self, text: str, *, last: bool) -> int | None:
        """Where the end begins; None: not in this text, to which more may be added unless it is the
        last.
        """
        while True:
            token = _TOKEN.search(text, self._at)
            if token is None:
                break
            self._at = token.end()
            if token[0] == CLOSE:
                if not self._is_quoted:
                    return self._checked(text, token.start())
                if self._first is None:
                    self._first = token.start()
            elif token[0] == '"':
                self._has_strings = self._has_strings and _OBJECT.match(text) is not None
                self._is_quoted = self._has_strings and not self._is_quoted
            elif not self._is_quoted:
                # Outside of a string a backslash escapes nothing, and a line may break.
                self._at = token.start() + 1
            elif token[0] < " ":
                # No string of JSON goes on behind a line break: the quotes do not match.
                self._is_quoted = self._has_strings = False
                if self._first is not None:
                    return self._first
        # The text may end in the beginning of a CLOSE.
        self._at = max(self._at, len(text) - len(CLOSE) + 1)
        return self._first if last else None

    def _checked(self, text: str, end: int) -> int:
        """The end, or the first CLOSE where what stands before the end is not JSON."""
        if self._first is None:
            return end
        try:
            msgspec.json.decode(text[:end])
        except (msgspec.MsgspecError, RecursionError):
            return self._first
        return end


_MARK = re.compile("|".join((OPEN, THINKING, THOUGHT)))
_THOUGHT_END = re.compile(THOUGHT)
_TOKEN = re.compile(r'\\.|"|[\x00-\x1f]|</tool_call>', re.DOTALL)
_OBJECT = re.compile(r"\s*\{")


class _Written(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


_WITHOUT_ARGUMENTS = {"name", "id", "type"}
"""All fields that a call without arguments may have."""


def _read(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of the call that a text is.

    Raises:
        ValueError: it is not JSON, not a call, has a key twice, no name, or arguments under a name
            that is not known.
        RecursionError: it is nested too deeply.
    """
    written = msgspec.json.decode(text.strip(), type=_Written)
    fields: dict[str, Any] = parse_json(text.strip())
    if not written.name:
        raise ValueError("its name is empty")
    if written.arguments is not msgspec.UNSET and written.parameters is not msgspec.UNSET:
        raise ValueError("it has both `arguments` and `parameters`")
    if written.arguments is not msgspec.UNSET:
        return written.name, written.arguments
    if written.parameters is not msgspec.UNSET:
        return written.name, written.parameters
    unknown = fields.keys() - _WITHOUT_ARGUMENTS
    if unknown:
        raise ValueError(f"it has no `arguments`, and `{min(unknown)}` is not known")
    return written.name, {}
