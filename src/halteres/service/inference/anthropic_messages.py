"""POST v1/messages and v1/messages/count_tokens, in Anthropic's shape.

Source: Anthropic's API reference, messages and streaming (version 2023-06-01).
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from halteres.errors import HalteresError, InvalidData
from halteres.service.answers import answer, anthropic_error
from halteres.service.inference.answering import Inference
from halteres.service.inference.bodies import MESSAGES, Refusals, Sampled, TokenCount
from halteres.service.inference.chats import Chat
from halteres.service.inference.http import Events, begun, named
from halteres.service.inference.openai import Count
from halteres.service.inference.openai_chat import may_call
from halteres.service.inference.requests import Ask, Call
from halteres.service.inference.written import Written
from halteres.tool_calls import ToolCall, ToolReader

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

    max_tokens: TokenCount
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


REFUSALS = Refusals(MESSAGES)


async def count_tokens(inference: Inference, call: Call) -> Response:
    """POST v1/messages/count_tokens."""
    asked = await inference.read(call, lambda body: REFUSALS.read(body, CountTokens))
    inference.addresses.find(asked.model, call.run, call.tenant)
    prompt = await inference.chat_prompt(call, lambda: _chat(asked, _tools(asked)))
    return answer({"input_tokens": len(prompt.tokens)})


async def messages(inference: Inference, call: Call) -> Response:
    """POST v1/messages."""
    asked = await inference.read(call, lambda body: REFUSALS.read(body, Messages))
    tools = _tools(asked)
    prompt = await inference.chat_prompt(call, lambda: _chat(asked, tools))
    ask = Ask(
        call=call,
        weights=inference.addresses.find(asked.model, call.run, call.tenant),
        prompts=(prompt,),
        sampled=msgspec.structs.replace(asked, n=1),
        max_tokens=asked.max_tokens,
        seed=asked.seed,
    )
    shape = Answer(ask.weights.name, asked, calls=bool(tools))
    if asked.stream:
        return Events(await begun(inference.stream(ask)), shape.events, failed)
    return await inference.write(ask, lambda written: answer(shape.whole(written[0])))


def _chat(asked: CountTokens, tools: Sequence[dict[str, Any]]) -> Chat:
    return Chat(
        messages=asked.chat,
        tools=tools,
        template_kwargs=asked.chat_template_kwargs or {},
        continue_final_message=bool(asked.messages) and asked.messages[-1].role == "assistant",
    )


def _tools(asked: CountTokens) -> Sequence[dict[str, Any]]:
    return may_call(asked.openai_tools, asked.openai_choice)


class Answer:
    """The shape of one answer."""

    def __init__(self, model: str, asked: Messages, *, calls: bool) -> None:
        self._model, self._calls, self._count = model, calls, Count()
        parallel = not (asked.tool_choice and asked.tool_choice.disable_parallel_tool_use)
        self._reader = ToolReader(parallel=parallel)
        self._id = f"msg_{uuid.uuid4().hex}"

    def whole(self, one: Written) -> dict[str, Any]:
        """All of it."""
        said, called = "", list[dict[str, Any]]()
        for part in self._parts(one):
            if isinstance(part, str):
                said += part
            else:
                called.append({**_tool_use(part), "input": part.arguments})
        text = [{"type": "text", "text": said}] if said or not called else []
        return {**self._head(text + called), **self._end(one), "usage": self._usage()}

    async def events(self, written: AsyncIterator[Written]) -> AsyncIterator[bytes]:
        """message_start, the blocks one after another, message_delta, message_stop."""
        blocks, begun = Blocks(), False
        async for one in written:
            parts = self._parts(one)
            if not begun:
                begun = True
                start = {**self._head([]), "stop_reason": None, "stop_sequence": None}
                usage = {**self._usage(), "output_tokens": 0}
                yield named({"type": "message_start", "message": {**start, "usage": usage}})
            for event in blocks.tell(parts, last=one.finish is not None):
                yield named(event)
            if one.finish is not None:
                end = self._end(one)
                version = end.pop("policy_version")
                delta = {"type": "message_delta", "delta": end, "usage": self._usage(), "policy_version": version}
                yield named(delta)
                yield named({"type": "message_stop"})

    def _parts(self, one: Written) -> list[str | ToolCall]:
        self._count.add(one)
        if self._calls:
            return self._reader.add(one.text, last=one.finish is not None)
        return [one.text] if one.text else []

    def _head(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}

    def _end(self, one: Written) -> dict[str, Any]:
        sequence = one.matched if isinstance(one.matched, str) else None
        reason = "max_tokens" if one.finish == "length" else "end_turn" if sequence is None else "stop_sequence"
        return {
            "stop_reason": "tool_use" if one.finish == "stop" and self._reader.calls else reason,
            "stop_sequence": sequence,
            "policy_version": self._count.policy_version,
        }

    def _usage(self) -> dict[str, int]:
        return {"input_tokens": self._count.prompt, "output_tokens": self._count.completion}


class Blocks:
    """The content blocks of a stream: one is open at a time, and there is one at least."""

    def __init__(self) -> None:
        self._index, self._open = -1, False

    def tell(self, parts: Sequence[str | ToolCall], *, last: bool) -> Iterator[dict[str, Any]]:
        """The events of these parts."""
        for part in parts:
            if isinstance(part, str):
                if not self._open:
                    yield self._start({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": part})
            else:
                yield from self._stop()
                yield self._start({**_tool_use(part), "input": {}})
                yield self._delta({"type": "input_json_delta", "partial_json": part.arguments_json})
                yield from self._stop()
        if last and self._index < 0:
            yield self._start({"type": "text", "text": ""})
        if last:
            yield from self._stop()

    def _start(self, block: dict[str, Any]) -> dict[str, Any]:
        self._index, self._open = self._index + 1, True
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self) -> Iterator[dict[str, Any]]:
        if self._open:
            self._open = False
            yield {"type": "content_block_stop", "index": self._index}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id.replace("call_", "toolu_"), "name": call.name}


def failed(error: HalteresError) -> bytes:
    """How a stream ends that fails under way."""
    return named(anthropic_error(error))
