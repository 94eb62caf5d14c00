"""POST v1/chat/completions, in OpenAI's shape.

Source: OpenAI's API reference; vLLM 0.11 for token ids, chat templates and prompt_logprobs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import Response

from halteres.errors import InvalidData
from halteres.scores import Scorable
from halteres.service.answers import answer
from halteres.service.inference.answering import Inference
from halteres.service.inference.bodies import CHAT, Refusals, TokenCount, TopCount
from halteres.service.inference.chats import Chat, flat
from halteres.service.inference.http import DONE, Events, begun, data
from halteres.service.inference.openai import (
    Answered,
    Count,
    Envelope,
    Name,
    ask_of,
    failed,
    names,
    vllm_prompt_logprobs,
    whole_answer,
)
from halteres.service.inference.requests import Call
from halteres.service.inference.written import Row, Written
from halteres.text import Tokenizer
from halteres.tool_calls import ToolCall, ToolReader


class ChatCompletions(Answered, kw_only=True):
    """POST v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: TopCount | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool | None = None  # absent: unless the last message is continued
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @property
    def limit(self) -> int | None:
        """Tokens that an answer may have; None: up to the context limit."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def top(self) -> int | None:
        """As `Completions.top`."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidData("`top_logprobs` needs `logprobs`.", next="Send logprobs=true.", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


BROKEN = "\N{REPLACEMENT CHARACTER}"

REFUSALS = Refusals(CHAT)


async def chat_completions(inference: Inference, call: Call) -> Response:
    """Answer one call."""
    asked = await inference.read(call, lambda body: REFUSALS.read(body, ChatCompletions))
    inference.best_of.check(asked.reward_model)
    tools = may_call(asked.tools, asked.tool_choice)
    chat = _chat(inference.tokenizer, asked, tools)
    prompt = await inference.chat_prompt(call, lambda: chat, asked.add_special_tokens)
    limit, of_prompt = asked.limit, asked.prompt_logprobs
    ask = ask_of(inference, call, asked, (prompt,), max_tokens=limit, top=asked.top, prompt_top=of_prompt)
    choices = Choices(inference.tokenizer, asked, calls=bool(tools))
    kind = "chat.completion.chunk" if asked.stream else "chat.completion"
    envelope = Envelope("chatcmpl", kind, ask.weights.name)
    if asked.stream:
        return Events(await begun(inference.stream(ask)), lambda written: choices.chunks(written, envelope), failed)

    def shape(chosen: list[Written], written: list[Written]) -> Response:
        whole = envelope.whole([choices.whole(one) for one in chosen], Count.of(written))
        return answer({**whole, **choices.of_prompt(written[0]), "prompt_token_ids": prompt.tokens})

    return await whole_answer(inference, ask, asked, lambda one: _scorable(chat, one), shape)


def _chat(tokenizer: Tokenizer, asked: ChatCompletions, tools: Sequence[dict[str, Any]]) -> Chat:
    kwargs = asked.chat_template_kwargs or {}
    if asked.reasoning_effort is not None:
        if not tokenizer.template_reads("reasoning_effort"):
            raise InvalidData(
                "`reasoning_effort` is not supported by this model.",
                "Its chat template does not read it.",
                "Leave it out.",
                param="reasoning_effort",
            )
        kwargs = {"reasoning_effort": asked.reasoning_effort, **kwargs}
    if asked.continue_final_message and asked.add_generation_prompt:
        raise InvalidData(
            "An answer cannot both begin and go on.",
            "continue_final_message goes on with the last message; add_generation_prompt begins another.",
            "Send add_generation_prompt=false.",
        )
    return Chat(
        messages=asked.messages,
        tools=tools,
        template_kwargs=kwargs,
        add_generation_prompt=asked.add_generation_prompt is not False,
        continue_final_message=asked.continue_final_message,
    )


def _scorable(chat: Chat, one: Written) -> Scorable:
    """The chat and what was said, which may go on with its last message."""
    messages = [flat(message) for message in chat.messages]
    begun = messages.pop()["content"] if chat.continue_final_message else ""
    return Scorable(prompt=messages, completion=[{"role": "assistant", "content": begun + one.text}])


def may_call(tools: Sequence[dict[str, Any]] | None, choice: Any) -> Sequence[dict[str, Any]]:
    """The tools that the model is told of."""
    if choice not in (None, "auto", "none"):
        raise InvalidData(
            "`tool_choice` may be auto or none.",
            "Answers are not constrained, so no call can be forced.",
            "Ask for the call in the prompt.",
            param="tool_choice",
        )
    return [] if choice == "none" else tools or []


class Choices:
    """The shape of one choice, or of its next piece."""

    def __init__(self, tokenizer: Tokenizer, asked: ChatCompletions, *, calls: bool) -> None:
        self._asked, self._calls = asked, calls
        self._name = names(tokenizer, as_ids=asked.return_tokens_as_token_ids)
        self._readers: dict[int, ToolReader] = {}

    async def chunks(self, written: AsyncIterator[Written], envelope: Envelope) -> AsyncIterator[bytes]:
        """A stream's events: one per piece that holds something."""
        count, asked = Count(), self._asked
        async for one in written:
            first = not count.versions
            count.add(one)
            choice = self.piece(one)
            chunk = envelope.chunk(choice, count)
            if first:
                chunk |= self.of_prompt(one)
                chunk |= {"prompt_token_ids": one.prompt.tokens} if asked.return_token_ids else {}
            if choice["delta"] or asked.logprobs or asked.return_token_ids or one.finish is not None:
                yield data(chunk)
        if asked.streams_usage:
            yield data(envelope.usage(count))
        yield DONE

    def of_prompt(self, one: Written) -> dict[str, Any]:
        """What was asked of the prompt."""
        if one.scores is None:
            return {}
        return {"prompt_logprobs": vllm_prompt_logprobs(self._name, one.prompt.tokens, one.scores)}

    def whole(self, one: Written) -> dict[str, Any]:
        """A choice of an answer."""
        said, calls, finish = self._read(one)
        message: dict[str, Any] = {"role": "assistant", "content": said if said or not calls else None}
        if calls:
            message["tool_calls"] = [_shaped(call) for call in calls]
        return {"index": one.place, "message": message, **self._facts(one, finish), "token_ids": one.tokens}

    def piece(self, one: Written) -> dict[str, Any]:
        """A choice of a chunk."""
        first = one.place not in self._readers
        said, calls, finish = self._read(one)
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        if said:
            delta["content"] = said
        if calls:
            delta["tool_calls"] = [{"index": call.index, **_shaped(call)} for call in calls]
        choice = {"index": one.place, "delta": delta, **self._facts(one, finish)}
        return {**choice, "token_ids": one.tokens} if self._asked.return_token_ids else choice

    def _read(self, one: Written) -> tuple[str, list[ToolCall], str | None]:
        """What is said, what is called, and why it ended."""
        reader = self._readers.setdefault(one.place, ToolReader(parallel=self._asked.parallel_tool_calls))
        parts = reader.add(one.text, last=one.finish is not None) if self._calls else [one.text]
        said = "".join(part for part in parts if isinstance(part, str))
        called = one.finish == "stop" and reader.calls
        return said, [part for part in parts if isinstance(part, ToolCall)], "tool_calls" if called else one.finish

    def _facts(self, one: Written, finish: str | None) -> dict[str, Any]:
        wants = self._asked.logprobs
        content = chat_logprobs(self._name, one.tokens, one.logprobs, one.top) if wants else None
        return {
            "finish_reason": finish,
            "stop_reason": one.matched,
            "logprobs": {"content": content, "refusal": None} if wants else None,
        }


def _shaped(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}


def chat_logprobs(
    name: Name, tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[Row]
) -> list[dict[str, Any]]:
    """Of /v1/chat/completions."""
    rows = top or [[] for _ in tokens]
    return [
        {**_entry(name(token), logprob), "top_logprobs": [_entry(name(one), value) for one, value in row]}
        for token, logprob, row in zip(tokens, logprobs, rows, strict=True)
    ]


def _entry(text: str, logprob: float) -> dict[str, Any]:
    """A token with its bytes; null where it is part of a character only."""
    return {"token": text, "logprob": logprob, "bytes": None if BROKEN in text else list(text.encode())}
