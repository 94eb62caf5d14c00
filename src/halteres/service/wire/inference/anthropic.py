"""JSON bodies of Anthropic's messages, told as a chat of OpenAI's shape: that is what chat templates read.

Owns: one struct per request, the translation of system, blocks and tools.
Never: renders a chat.
Source: Anthropic's API reference, messages (version 2023-06-01).
"""

from __future__ import annotations

from typing import Any

import msgspec

from halteres.errors import InvalidData
from halteres.service.wire.inference.common import Count, Sampled

UNREAD_BLOCKS = ("thinking", "redacted_thinking")
"""Of earlier turns; the API leaves them out of the prompt too."""


class MessagesTool(msgspec.Struct, kw_only=True):
    """A tool that the model may call."""

    name: str
    input_schema: dict[str, Any] = {}
    description: str | None = None
    type: str | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Whether it may."""

    type: str = "auto"
    disable_parallel_tool_use: bool = False


class Turn(msgspec.Struct, kw_only=True):
    """One message."""

    role: str
    content: str | list[dict[str, Any]]


class CountTokens(Sampled, kw_only=True):
    """POST v1/messages/count_tokens."""

    messages: list[Turn]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The conversation in OpenAI's shape.

        Raises:
            InvalidData: a block that is no text, tool call or tool result.
        """
        system = [] if self.system is None else [{"role": "system", "content": _text(self.system)}]
        return system + [message for turn in self.messages for message in _translated(turn)]

    @property
    def openai_tools(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's shape.

        Raises:
            InvalidData: a tool that Anthropic's own servers would run.
        """
        return [_tool(one) for one in self.tools or ()]

    @property
    def openai_choice(self) -> str:
        """In OpenAI's words."""
        return self.tool_choice.type if self.tool_choice else "auto"


class Messages(CountTokens, kw_only=True):
    """POST v1/messages."""

    max_tokens: Count
    stop_sequences: list[str] | None = None
    stream: bool = False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        return tuple(text for text in self.stop_sequences or () if text)


def _tool(tool: MessagesTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidData(f"The tool type '{tool.type}' is not supported.", "Nobody here runs it.", param="tools")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _translated(turn: Turn) -> list[dict[str, Any]]:
    """One message, or several: results of tools are messages of their own."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results = [block for block in turn.content if block.get("type") == "tool_result"]
    calls = [block for block in turn.content if block.get("type") == "tool_use"]
    rest = [block for block in turn.content if block.get("type") not in ("tool_result", "tool_use", *UNREAD_BLOCKS)]
    messages: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": _text(block.get("content") or "")}
        for block in results
    ]
    if rest or calls or not results:
        message: dict[str, Any] = {"role": turn.role, "content": _text(rest)}
        messages.append(message | ({"tool_calls": [_call(block) for block in calls]} if calls else {}))
    return messages


def _call(block: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(block.get("name"), str):
        raise InvalidData("A tool_use block has no name.", param="messages")
    function = {"name": block["name"], "arguments": block.get("input") or {}}
    return {"id": block.get("id", ""), "type": "function", "function": function}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [content]
    for block in blocks:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, dict) else type(block).__name__
            raise InvalidData(f"A block of type '{kind}' is not supported.", "The model reads text only.", "Send text.")
    return "".join(block["text"] for block in blocks)
