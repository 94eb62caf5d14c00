"""POST v1/responses, in the shape of OpenAI's Responses API.

Nothing is kept between requests: a conversation comes whole, as `input`. An answer is a list of
items: what the model thinks is one of its own, apart from what it says and what it calls.

Source: openai 3.57.0, types/responses and lib/streaming/responses.
"""

from __future__ import annotations

import time
import uuid
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from starlette.responses import Response

from halteres.engine.protocol import Grammar
from halteres.errors import HalteresError, InvalidData, shortened
from halteres.service.inference.answering import Inference
from halteres.service.inference.fields import RESPONSES
from halteres.service.inference.formats import (
    callable_tools,
    grammar_of_answer,
    grammar_of_format,
)
from halteres.service.inference.http import Shape, named_event, respond
from halteres.service.inference.openai import effort_kwargs, token_entries
from halteres.service.inference.outputs import Output, Position, Usage
from halteres.service.inference.requests import (
    Call,
    Chat,
    InferenceRequest,
    SamplingFields,
    TokenCount,
    TopCount,
    refuse_several,
    text_of,
)
from halteres.service.inference.thinking import Kind, MessageTokens, Sections
from halteres.tokenizer import Tokenizer
from halteres.tool_calls import ToolCall

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
"""What `include` names where log-probabilities are to be returned; and where thinking is, in a form
that a client sends back as it came.
"""

ENCODED = "halteres:"
"""Before thinking in that form, which is base64: it is no secret."""

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Roles of messages, and as what templates know them."""


class Reasoning(msgspec.Struct, kw_only=True):
    """How much the model thinks."""

    effort: str | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """What the text of an answer is."""

    format: dict[str, Any] | None = None


class Responses(SamplingFields, kw_only=True):
    """POST v1/responses."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    include: list[str] = msgspec.field(default_factory=list[str])
    top_logprobs: TopCount = 0
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning = msgspec.field(default_factory=Reasoning)
    text: TextFormat = msgspec.field(default_factory=TextFormat)
    metadata: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool = False

    def __post_init__(self) -> None:
        if self.max_output_tokens is not None:  # this API's own name of the same
            self.max_tokens = self.max_output_tokens

    @property
    def length_field(self) -> str:
        """This API's own name, where it came by that."""
        if self.max_output_tokens is not None:
            return "max_output_tokens"
        return super().length_field

    @property
    def format_grammar(self) -> Grammar | None:
        """What the answer is to be that no tool is called in."""
        if self.text.format is not None:
            return grammar_of_format(self.text.format, "text.format")
        return super().format_grammar

    @property
    def top(self) -> int | None:
        """How many of the most likely tokens are returned at each position; None: no
        log-probabilities at all.
        """
        if LOGPROBS in self.include:
            return self.top_logprobs
        if self.top_logprobs:
            raise InvalidData(
                "`top_logprobs` needs log-probabilities.",
                next=f'Send include=["{LOGPROBS}"].',
                param="top_logprobs",
            )
        return None


async def responses(inference: Inference, call: Call) -> Response:
    """POST v1/responses."""
    body = await inference.read(call, Responses, RESPONSES)
    refuse_several(body)
    tools = callable_tools(_tools(body), body.tool_choice)
    grammar = grammar_of_answer(body, tools, body.tool_choice, several=body.parallel_tool_calls)
    effort = effort_kwargs(inference.tokenizer, body.reasoning.effort, "reasoning.effort")
    kwargs = effort | (body.chat_template_kwargs or {})
    prompt = await inference.chat_prompt(
        call, lambda: Chat(messages=_messages(body), tools=tools, template_kwargs=kwargs)
    )
    weights = inference.weights(body.model, call.run, call.tenant)
    parallel = None
    if tools:
        parallel = body.parallel_tool_calls
    request = InferenceRequest(
        call, weights, [prompt], body, body.top or 0, parallel_calls=parallel, grammar=grammar
    )
    shape = ResponseAnswer(inference.tokenizer, request, body)
    return await respond(inference, request, shape, stream=body.stream)


# The chat in the shape of chat completions, which templates read


def _tools(body: Responses) -> Sequence[dict[str, Any]]:
    tools = list[dict[str, Any]]()
    for tool in body.tools:
        kind = tool.get("type")
        if kind != "function":
            raise InvalidData(
                f"The tool type '{shortened(str(kind))}' is not supported.",
                "Nobody here runs it: a model may call functions, which its client runs.",
                "Send tools of type function.",
                param="tools",
            )
        names = ("name", "description", "parameters")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    return tools


def _messages(body: Responses) -> list[dict[str, Any]]:
    """The conversation. Instructions and a system message at its head are one message: some
    templates read one alone.
    """
    if isinstance(body.input, str):
        messages = [{"role": "user", "content": body.input}]
    else:
        messages = _translated(body.input)
    if not messages:
        raise _unfit("`input` holds no message.", next="Send a text, or items.")
    if body.instructions:
        system = [body.instructions]
        if messages[0]["role"] == "system":
            system.append(messages.pop(0)["content"])
        messages.insert(0, {"role": "system", "content": "\n\n".join(system)})
    return messages


def _translated(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items as messages: the thinking, the text and the calls of one turn are one message."""
    messages = list[dict[str, Any]]()
    thinking, last_kind = "", ""
    for item in items:
        kind = item.get("type") or "message"
        if kind == "reasoning":
            # It belongs to the text or the call that follows; alone it is passed over.
            thinking += _thinking(item)
            continue
        if kind == "function_call_output":
            output = text_of(item.get("output"), "input")
            name = item.get("call_id") or ""
            messages.append({"role": "tool", "tool_call_id": name, "content": output})
        elif kind == "function_call":
            turn = _turn(messages, thinking)
            turn.setdefault("tool_calls", []).append(_call(item))
        elif kind == "message":
            role, content = _role(item), text_of(item.get("content"), "input")
            if role == "assistant":
                turn = _turn(messages, thinking, is_new=last_kind == "message")
                turn["content"] += content
            else:
                messages.append({"role": role, "content": content})
        else:
            raise _unfit(
                f"An item of type '{shortened(str(kind))}' is not supported.",
                "Read are messages, functions that were called, what they gave, and reasoning.",
                "Leave it out; an item that is only named is sent whole: nothing is kept here.",
            )
        thinking, last_kind = "", kind
    return messages


def _turn(messages: list[dict[str, Any]], thinking: str, *, is_new: bool = False) -> dict[str, Any]:
    """The message of the assistant that goes on, or a new one."""
    if is_new or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    turn = messages[-1]
    if thinking:
        turn["reasoning_content"] = turn.get("reasoning_content", "") + thinking
    return turn


def _thinking(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item; of one that another service encrypted, its summary."""
    encoded = item.get("encrypted_content")
    if not item.get("content") and isinstance(encoded, str) and encoded.startswith(ENCODED):
        try:
            return b64decode(encoded.removeprefix(ENCODED), validate=True).decode()
        except ValueError as error:
            why = "It is not what was answered."
            raise _unfit(
                "`encrypted_content` cannot be read.", why, "Send it as it came."
            ) from error
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        raise _unfit("The content of a reasoning item is no list of parts.")
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def _encoded(thinking: str) -> str:
    return ENCODED + b64encode(thinking.encode()).decode()


def _role(item: Mapping[str, Any]) -> str:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _unfit(
            f"A message's role is '{shortened(str(role))}'.",
            next=f"Send one of {', '.join(ROLES)}.",
        )
    return ROLES[role]


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(item.get("name"), str):
        raise _unfit("A function_call has no name.", next="Send name, arguments and call_id.")
    function = {"name": item["name"], "arguments": item.get("arguments") or {}}
    return {"id": item.get("call_id") or "", "type": "function", "function": function}


def _unfit(what: str, why: str = "", next: str = "") -> InvalidData:
    return InvalidData(what, why, next, param="input")


# The answer


class ResponseAnswer(Shape):
    """One answer, whole or as events."""

    def __init__(self, tokenizer: Tokenizer, request: InferenceRequest, body: Responses) -> None:
        [prompt] = request.prompts
        self._body, self._usage, self._num_prompt = body, Usage(), len(prompt.tokens)
        self._name = cache(tokenizer.token)
        in_thought, with_calls = (
            request.goes_on_thinking(prompt),
            request.parallel_calls is not None,
        )
        self._sections = Sections(in_thought=in_thought)
        self._tokens = MessageTokens(Sections(in_thought=in_thought, with_calls=with_calls))
        self._output = list[dict[str, Any]]()  # items; the last one may be open
        self._is_open = False
        self._num_messages = 0
        self._num_told = 0  # log-probabilities that the open message's events have told
        self._num_events = 0
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": request.weights.name,
        }

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The one answer."""
        [one] = outputs
        for _ in self._written(one):
            pass  # its items are what the events leave behind
        return self._ended(one)

    async def events(self, outputs: AsyncIterator[Output]) -> AsyncIterator[bytes]:
        """created, in_progress, the items one after another, completed or incomplete."""
        async for one in outputs:
            if one.first:
                for event in self._begun():
                    yield named_event(event)
            for event in self._written(one):
                yield named_event(event)
            if one.finish is not None:
                ended = self._ended(one)
                yield named_event(self._event(ended["status"], response=ended))

    def failed(self, error: HalteresError) -> bytes:
        """The answer as far as it came, with the error in it."""
        events = list[dict[str, Any]]()
        if not self._num_events:
            events += self._begun()
        code = "server_error"
        if error.status == 429:
            code = "rate_limit_exceeded"
        failure = {"code": code, "message": error.sentence}
        events.append(self._event("failed", response=self._response("failed", error=failure)))
        return b"".join(map(named_event, events))

    # Items and their events

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        event = {"type": f"response.{name}", "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    def _begun(self) -> Iterator[dict[str, Any]]:
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def _written(self, one: Output) -> Iterator[dict[str, Any]]:
        """The events of what was written now; with the last of it, the last item ends."""
        self._usage.add(one)
        for position in one.positions:
            self._tokens.add(position, self._name(position[0]))
        for part in one.parts:
            if isinstance(part, ToolCall):
                yield from self._texts("", last=True)
                yield from self._closed("completed")
                yield from self._called(part)
            else:
                yield from self._texts(part)
        if one.finish is None:
            return
        yield from self._texts("", last=True)
        self._tokens.end()
        said = [item for item in self._output if item["type"] != "reasoning"]
        if not said and self._sections.kind == "message":
            yield from self._opened("message")
        yield from self._closed(_status(one))

    def _texts(self, text: str, *, last: bool = False) -> Iterator[dict[str, Any]]:
        for kind, piece in self._sections.add(text, last=last):
            if not self._is_open or self._output[-1]["type"] != kind:
                yield from self._closed("completed")
                yield from self._opened(kind)
            item = self._output[-1]
            item["content"][0]["text"] += piece
            name, told = "reasoning_text.delta", dict[str, Any]()
            if kind == "message":
                name, told = "output_text.delta", {"logprobs": self._new_logprobs()}
            yield self._event(name, **self._place(item), content_index=0, delta=piece, **told)

    def _opened(self, kind: Kind) -> Iterator[dict[str, Any]]:
        """A message or a reasoning item, and its one part, begin."""
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        if kind == "message":
            item |= {"id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item |= {"id": f"rs_{uuid.uuid4().hex}", "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        self._output.append(item)
        self._is_open, self._num_told = True, 0
        yield self._event("output_item.added", output_index=len(self._output) - 1, item=item)
        item["content"] = [part]
        yield self._event("content_part.added", **self._place(item), content_index=0, part=part)

    def _closed(self, status: str) -> Iterator[dict[str, Any]]:
        """The open item, if there is one, ends."""
        if not self._is_open:
            return
        item = self._output[-1]
        [part] = item["content"]
        name, told = "reasoning_text.done", dict[str, Any]()
        if item["type"] == "message":
            part["logprobs"] = self._logprobs(self._tokens.of_message(self._num_messages))
            name, told = "output_text.done", {"logprobs": part["logprobs"]}
            self._num_messages += 1
        elif ENCRYPTED in self._body.include:
            item["encrypted_content"] = _encoded(part["text"])
        place = {**self._place(item), "content_index": 0}
        yield self._event(name, **place, text=part["text"], **told)
        yield self._event("content_part.done", **place, part=part)
        item["status"], self._is_open = status, False
        yield self._event("output_item.done", output_index=len(self._output) - 1, item=item)

    def _called(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        """A call comes whole."""
        item = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
        }
        self._output.append(item)
        index, arguments = len(self._output) - 1, call.arguments_json
        yield self._event("output_item.added", output_index=index, item=item)
        place = self._place(item)
        yield self._event("function_call_arguments.delta", **place, delta=arguments)
        yield self._event("function_call_arguments.done", **place, arguments=arguments)
        item |= {"status": "completed", "arguments": arguments}
        yield self._event("output_item.done", output_index=index, item=item)

    def _place(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Where a delta belongs: to the last item."""
        return {"item_id": item["id"], "output_index": len(self._output) - 1}

    def _new_logprobs(self) -> list[dict[str, Any]]:
        """Those of the open message that no event has told yet."""
        positions = self._tokens.of_message(self._num_messages)[self._num_told :]
        self._num_told += len(positions)
        return self._logprobs(positions)

    def _logprobs(self, positions: Sequence[Position]) -> list[dict[str, Any]]:
        if self._body.top is None:
            return []
        return token_entries(positions, self._name, no_bytes=[])

    # The response

    def _ended(self, one: Output) -> dict[str, Any]:
        """The response, once its last token is written."""
        completion = self._usage.completion
        usage = {
            "input_tokens": self._num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self._tokens.num_thought},
            "total_tokens": self._num_prompt + completion,
        }
        found = self._response(_status(one), usage=usage, **self._usage.ours)
        if one.finish == "length":
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            found["completed_at"] = int(time.time())
        return found

    def _response(self, status: str, **known: Any) -> dict[str, Any]:
        """The response as it is now, with what was asked for as the API repeats it."""
        body = self._body
        asked = {
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "parallel_tool_calls": body.parallel_tool_calls,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "temperature": body.temperature,
            "text": {"format": body.text.format or {"type": "text"}},
            "tool_choice": body.tool_choice,
            "tools": body.tools,
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
        }
        fixed = {
            "background": False,
            "error": None,
            "incomplete_details": None,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
        }
        return {**self._head, "status": status, "output": self._output, **asked, **fixed, **known}


def _status(one: Output) -> str:
    """Of an answer, and of its last item."""
    if one.finish == "length":
        return "incomplete"
    return "completed"
