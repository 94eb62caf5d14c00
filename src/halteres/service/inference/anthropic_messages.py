"""POST v1/messages and v1/messages/count_tokens, in Anthropic's shape.

Source: Anthropic's API reference, messages and streaming (version 2023-06-01).
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from halteres.engine.protocol import Grammar
from halteres.errors import HalteresError, InvalidData
from halteres.service.http import answer, anthropic_error
from halteres.service.inference.answering import Inference
from halteres.service.inference.fields import MESSAGES
from halteres.service.inference.formats import (
    callable_tools,
    grammar_of_answer,
    grammar_of_format,
)
from halteres.service.inference.http import Shape, named_event, respond
from halteres.service.inference.outputs import Output, Usage
from halteres.service.inference.requests import (
    Call,
    Chat,
    InferenceRequest,
    SamplingFields,
    TokenCount,
    refuse_several,
    text_of,
)
from halteres.tool_calls import ToolCall

# of earlier turns; the API leaves them out of the prompt too
UNREAD_BLOCKS = ("thinking", "redacted_thinking")


class MessagesTool(msgspec.Struct, kw_only=True):
    """A tool that the model may call."""

    name: str
    input_schema: dict[str, Any] = {}
    description: str | None = None
    type: str | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Whether it may, or has to."""

    type: str = "auto"
    name: str | None = None  # of the one that it has to call
    disable_parallel_tool_use: bool = False


class Message(msgspec.Struct, kw_only=True):
    """One message."""

    role: str
    content: str | list[dict[str, Any]]


class OutputConfig(msgspec.Struct, kw_only=True):
    """What the answer is to be."""

    format: dict[str, Any] | None = None


class CountTokens(SamplingFields, kw_only=True):
    """POST v1/messages/count_tokens."""

    messages: list[Message]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice = msgspec.field(default_factory=ToolChoice)
    chat_template_kwargs: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # the older name of what stands in it

    @property
    def format_grammar(self) -> Grammar | None:
        """What the answer is to be that no tool is called in."""
        if self.output_config is not None and self.output_config.format is not None:
            return grammar_of_format(self.output_config.format, "output_config")
        if self.output_format is not None:
            return grammar_of_format(self.output_format, "output_format")
        return super().format_grammar

    @property
    def choice(self) -> dict[str, Any]:
        """Of a tool, as it came."""
        return {"type": self.tool_choice.type, "name": self.tool_choice.name}


class Messages(CountTokens, kw_only=True):
    """POST v1/messages."""

    max_tokens: TokenCount  # pyright: ignore[reportGeneralTypeIssues, reportIncompatibleVariableOverride] - required
    stop_sequences: list[str] | None = None
    stream: bool = False

    def __post_init__(self) -> None:
        self.stop = [*(self.stop_sequences or ()), *self.stops]


async def count_tokens(inference: Inference, call: Call) -> Response:
    """POST v1/messages/count_tokens."""
    body = await inference.read(call, CountTokens, MESSAGES)
    inference.weights(body.model, call.run, call.tenant)
    prompt = await inference.chat_prompt(call, lambda: _chat(body, _tools(body)))
    return answer({"input_tokens": len(prompt.tokens)})


async def messages(inference: Inference, call: Call) -> Response:
    """POST v1/messages."""
    body = await inference.read(call, Messages, MESSAGES)
    refuse_several(body)
    tools = _tools(body)
    prompt = await inference.chat_prompt(call, lambda: _chat(body, tools))
    weights = inference.weights(body.model, call.run, call.tenant)
    several, parallel = not body.tool_choice.disable_parallel_tool_use, None
    grammar = grammar_of_answer(body, tools, body.choice, several=several)
    if tools:
        parallel = several
    request = InferenceRequest(
        call, weights, [prompt], body, parallel_calls=parallel, grammar=grammar
    )
    return await respond(inference, request, MessageAnswer(weights.name), stream=body.stream)


# The chat in OpenAI's shape, which templates read


def _chat(body: CountTokens, tools: Sequence[dict[str, Any]]) -> Chat:
    system: list[dict[str, Any]] = []
    if body.system is not None:
        system.append({"role": "system", "content": text_of(body.system)})
    return Chat(
        messages=system + [one for message in body.messages for one in _translated(message)],
        tools=tools,
        template_kwargs=body.chat_template_kwargs or {},
        continue_final_message=bool(body.messages) and body.messages[-1].role == "assistant",
    )


def _tools(body: CountTokens) -> Sequence[dict[str, Any]]:
    tools = list[dict[str, Any]]()
    for tool in body.tools or ():
        if tool.type not in (None, "custom"):
            raise InvalidData(
                f"The tool type '{tool.type}' is not supported.",
                "Nobody here runs it.",
                param="tools",
            )
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        tools.append({"type": "function", "function": function})
    return callable_tools(tools, body.choice)


def _translated(message: Message) -> list[dict[str, Any]]:
    """One message, or several: results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    translated, calls, rest = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    for block in message.content:
        kind = block.get("type")
        if kind == "tool_result":
            content = text_of(block.get("content"))
            translated.append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": content}
            )
        elif kind == "tool_use":
            if not isinstance(block.get("name"), str):
                raise InvalidData("A tool_use block has no name.", param="messages")
            function = {"name": block["name"], "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id", ""), "type": "function", "function": function})
        elif kind not in UNREAD_BLOCKS:
            rest.append(block)
    if rest or calls or not translated:
        found: dict[str, Any] = {"role": message.role, "content": text_of(rest)}
        if calls:
            found["tool_calls"] = calls
        translated.append(found)
    return translated


# The answer


class MessageAnswer(Shape):
    """One answer, whole or as events."""

    def __init__(self, model: str) -> None:
        self._usage = Usage()
        self._num_blocks, self._text_open = 0, False  # content blocks of a stream
        self._head = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The one answer."""
        [one] = outputs
        self._usage.add(one)
        content = [{**_tool_use(call), "input": call.arguments} for call in one.calls]
        if one.plain or not content:
            content.insert(0, {"type": "text", "text": one.plain})
        end = {**self._end(one), **self._usage.ours}
        return {**self._head, "content": content, **end, "usage": self._counts(one)}

    async def events(self, outputs: AsyncIterator[Output]) -> AsyncIterator[bytes]:
        """message_start, the blocks one after another, message_delta, message_stop."""
        async for one in outputs:
            self._usage.add(one)
            if one.first:
                usage = {**self._counts(one), "output_tokens": 0}
                start = {
                    **self._head,
                    "content": [],
                    "stop_reason": None,
                    "stop_sequence": None,
                    "usage": usage,
                }
                yield named_event({"type": "message_start", "message": start})
            for event in self._blocks(one.parts, last=one.finish is not None):
                yield named_event(event)
            if one.finish is not None:
                usage = self._counts(one)
                end = {"delta": self._end(one), "usage": usage, **self._usage.ours}
                yield named_event({"type": "message_delta", **end})
                yield named_event({"type": "message_stop"})

    def failed(self, error: HalteresError) -> bytes:
        """The error in Anthropic's shape."""
        return named_event(anthropic_error(error))

    def _blocks(self, parts: Sequence[str | ToolCall], *, last: bool) -> Iterator[dict[str, Any]]:
        """The events of content blocks: one is open at a time, and there is one at least."""
        if last and not parts and not self._num_blocks:
            parts = [""]
        for part in parts:
            is_text = isinstance(part, str)
            if self._text_open and not is_text:
                yield self._stop()
            if not (self._text_open and is_text):
                if isinstance(part, str):
                    block = {"type": "text", "text": ""}
                else:
                    block = {**_tool_use(part), "input": {}}
                self._num_blocks, self._text_open = self._num_blocks + 1, is_text
                yield {
                    "type": "content_block_start",
                    "index": self._num_blocks - 1,
                    "content_block": block,
                }
            if part:
                if isinstance(part, str):
                    delta = {"type": "text_delta", "text": part}
                else:
                    delta = {"type": "input_json_delta", "partial_json": part.arguments_json}
                yield {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}
            if not is_text:
                yield self._stop()
        if last and self._text_open:
            yield self._stop()

    def _stop(self) -> dict[str, Any]:
        self._text_open = False
        return {"type": "content_block_stop", "index": self._num_blocks - 1}

    def _end(self, one: Output) -> dict[str, Any]:
        sequence, reason = None, "end_turn"
        if isinstance(one.matched, str):
            sequence, reason = one.matched, "stop_sequence"
        if one.finish == "length":
            reason = "max_tokens"
        if one.finish == "stop" and one.called:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _counts(self, one: Output) -> dict[str, int]:
        return {"input_tokens": len(one.prompt.tokens), "output_tokens": self._usage.completion}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id.replace("call_", "toolu_"), "name": call.name}
