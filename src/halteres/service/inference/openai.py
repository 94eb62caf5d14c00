"""POST v1/completions and v1/chat/completions, in OpenAI's shape.

Source: OpenAI's API reference; vLLM 0.11 for token ids, chat templates and prompt_logprobs.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache
from typing import Any

import msgspec
from starlette.responses import Response

from halteres.errors import HalteresError, InvalidData
from halteres.scores import Scorable
from halteres.service.http import answer, openai_error
from halteres.service.inference.answering import Inference
from halteres.service.inference.fields import CHAT, COMPLETIONS
from halteres.service.inference.formats import callable_tools, grammar_of_answer
from halteres.service.inference.http import DONE, Shape, data, respond
from halteres.service.inference.outputs import BROKEN, Output, Position, Usage
from halteres.service.inference.requests import (
    Call,
    Chat,
    InferenceRequest,
    Prompt,
    SamplingFields,
    TokenCount,
    TopCount,
    flat,
    several,
)
from halteres.tokenizer import Tokenizer
from halteres.tool_calls import ToolCall


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream brings beside the answer."""

    include_usage: bool = False


class OpenAIBody(SamplingFields, kw_only=True):
    """What both routes read."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: TopCount | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    add_special_tokens: bool | None = None
    best_of: int | None = None  # sequences that are sampled; the best `n` are answered
    # by whose score; ours: OpenAI has the mean log-probability alone
    reward_model: str | None = None

    @property
    def to_sample(self) -> SamplingFields:
        """The same for so many sequences per prompt as are sampled."""
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidData(
                f"`best_of` is {self.best_of}, and `n` is {self.n}.",
                "n are answered.",
                param="best_of",
            )
        if self.reward_model is not None and self.best_of is None:
            raise InvalidData(
                "`reward_model` chooses among several.",
                next="Send `best_of`.",
                param="reward_model",
            )
        if self.stream and self.is_ranked:
            raise InvalidData(
                "The best of several cannot be streamed.",
                next="Send stream=false.",
                param="best_of",
            )
        return msgspec.structs.replace(self, n=self.best_of or self.n)

    @property
    def is_ranked(self) -> bool:
        """Whether the answers are chosen, the best first."""
        return self.reward_model is not None or self.best_of not in (None, self.n)


class Completions(OpenAIBody, kw_only=True):
    """POST v1/completions."""

    prompt: str | list[str | int | list[int]]
    max_tokens: TokenCount | None = 16
    logprobs: bool | TopCount | None = None
    echo: bool = False

    @property
    def top(self) -> int | None:
        """How many of the most likely tokens are told at each position; None: no log-probabilities
        at all.
        """
        if self.logprobs is None or self.logprobs is False:
            return None
        if self.logprobs is True:
            return 0
        return self.logprobs


class ChatCompletions(OpenAIBody, kw_only=True):
    """POST v1/chat/completions."""

    messages: list[dict[str, Any]]
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

    def __post_init__(self) -> None:
        if self.max_completion_tokens is not None:  # the newer name of the same
            self.max_tokens = self.max_completion_tokens

    @property
    def length_field(self) -> str:
        """The newer name, where it came by that."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return super().length_field

    @property
    def top(self) -> int | None:
        """As `Completions.top`."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidData(
                "`top_logprobs` needs `logprobs`.", next="Send logprobs=true.", param="top_logprobs"
            )
        if not self.logprobs:
            return None
        return self.top_logprobs or 0


class Answer(Shape):
    """What both routes' answers have in common; a subclass shapes the choice of a sequence, or a
    chunk with a piece.
    """

    def __init__(
        self, tokenizer: Tokenizer, request: InferenceRequest, body: OpenAIBody, id: str, kind: str
    ) -> None:
        self._tokenizer, self._request = tokenizer, request
        self._options, self._usage = body.stream_options, Usage()
        # A token is called by its text, a special one by name; `token_id:17` tells apart tokens of
        # equal text.
        self.name: Callable[[int], str] = cache(tokenizer.token)
        if body.return_tokens_as_token_ids:
            self.name = "token_id:{}".format
        id, created, model = f"{id}-{uuid.uuid4().hex}", int(time.time()), request.weights.name
        self._head = {"id": id, "object": kind, "created": created, "model": model}

    def scorable(self, one: Output) -> Scorable:
        """What a reward model reads of a sequence."""
        raise NotImplementedError

    def _choice(self, one: Output) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk(self, one: Output) -> dict[str, Any] | None:
        """None where the piece holds nothing."""
        raise NotImplementedError

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """An answer of all sequences."""
        return self.best(outputs, outputs)

    def best(self, chosen: Sequence[Output], outputs: Sequence[Output]) -> dict[str, Any]:
        """An answer of the chosen sequences; all are counted."""
        for one in outputs:
            self._usage.add(one)
        prompt = sum(len(one.tokens) for one in self._request.prompts)
        completion = self._usage.completion
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        choices = [self._choice(one) for one in chosen]
        return {**self._head, "choices": choices, "usage": usage, **self._usage.ours}

    async def events(self, outputs: AsyncIterator[Output]) -> AsyncIterator[bytes]:
        """One per piece that holds something; the last of a choice has our own fields, too."""
        async for one in outputs:
            self._usage.add(one)
            chunk = self._chunk(one)
            if chunk is not None:
                ours: dict[str, Any] = {}
                if one.finish is not None:
                    ours = self._usage.ours
                yield data({**self._head, "choices": chunk["choices"], **ours, **chunk})
        if self._options is not None and self._options.include_usage:
            yield data(self.best([], []))
        yield DONE

    def failed(self, error: HalteresError) -> bytes:
        """The error in OpenAI's shape."""
        return data(openai_error(error)) + DONE

    def _ranked(self, one: Output) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: at each position the token that stands there, then the most
        likely ones, by id.
        """
        ranked: list[dict[str, Any] | None] = []
        for token, logprob, row in one.of_prompt or ():
            if logprob is None:
                ranked.append(None)
                continue
            ranks = {likely: rank for rank, (likely, _) in enumerate(row, start=1)}
            pairs = [(token, logprob), *(pair for pair in row if pair[0] != token)]
            found = {
                str(one): {
                    "logprob": value,
                    "rank": ranks.get(one),
                    "decoded_token": self.name(one),
                }
                for one, value in pairs
            }
            ranked.append(found)
        return ranked


async def _respond(
    inference: Inference, request: InferenceRequest, body: OpenAIBody, answered: Answer
) -> Response:
    if not body.is_ranked:
        return await respond(inference, request, answered, stream=body.stream)
    outputs = await inference.write(request, list)
    best = await inference.best_of.chosen(outputs, body.n, body.reward_model, answered.scorable)
    return await inference.in_thread(request.call, lambda: answer(answered.best(best, outputs)))


# v1/completions


async def completions(inference: Inference, call: Call) -> Response:
    """POST v1/completions."""
    body = await inference.read(call, Completions, COMPLETIONS)
    inference.best_of.check(body.reward_model)
    prompts = await inference.prompts(
        call, lambda: several(body.prompt, "prompt"), body.add_special_tokens
    )
    of_prompt = body.prompt_logprobs
    if body.echo and body.top is not None:
        of_prompt = max(body.top, of_prompt or 0)
    elif body.echo and body.max_tokens == 0:
        of_prompt = of_prompt or 0  # nothing is written: the prompt alone comes back
    weights = inference.weights(body.model, call.run, call.tenant)
    request = InferenceRequest(call, weights, prompts, body.to_sample, body.top or 0, of_prompt)
    return await _respond(
        inference, request, body, CompletionAnswer(inference.tokenizer, request, body)
    )


class CompletionAnswer(Answer):
    """Of /v1/completions."""

    def __init__(self, tokenizer: Tokenizer, request: InferenceRequest, body: Completions) -> None:
        super().__init__(tokenizer, request, body, "cmpl", "text_completion")
        self._body = body
        self._lengths: dict[int, int] = {}  # by place: characters of the names of its tokens so far

    def scorable(self, one: Output) -> Scorable:
        """For a reward model."""
        return Scorable(prompt=self._text_of(one.prompt), completion=one.text)

    def _text_of(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.tokens, skip_special_tokens=False)

    def _choice(self, one: Output) -> dict[str, Any]:
        body, first, text, logprobs = self._body, one.first, one.text, None
        if first and body.echo:
            text = self._text_of(one.prompt) + text
        if body.top is not None:
            logprobs = self._logprobs(one, body.top)
        choice: dict[str, Any] = {
            "index": one.place,
            "text": text,
            "finish_reason": one.finish,
            "stop_reason": one.matched,
            "token_ids": one.tokens,
            "logprobs": logprobs,
        }
        if first and body.return_token_ids:
            choice["prompt_token_ids"] = one.prompt.tokens
        if first and one.of_prompt is not None and body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._ranked(one)
        return choice

    def _chunk(self, one: Output) -> dict[str, Any] | None:
        """A choice, without the tokens unless they are to be returned."""
        choice, body = self._choice(one), self._body
        if not (
            choice["text"]
            or body.top is not None
            or body.return_token_ids
            or one.finish is not None
        ):
            return None
        if not body.return_token_ids:
            del choice["token_ids"]
        return {"choices": [choice]}

    def _logprobs(self, one: Output, num_top: int) -> dict[str, Any]:
        positions, offset = one.positions, self._lengths.get(one.place, 0)
        if one.first and self._body.echo and one.of_prompt is not None:
            positions = [
                (token, logprob, row[:num_top]) for token, logprob, row in one.of_prompt
            ] + positions
        names, offsets = [self.name(token) for token, _, _ in positions], list[int]()
        for name in names:
            offsets.append(offset)
            offset += len(name)
        self._lengths[one.place] = offset
        top: list[dict[str, float] | None] = []
        # the most likely and the one there; of equal texts the likeliest
        for token, logprob, row in positions:
            if logprob is None:
                top.append(None)
                continue
            by_name: dict[str, float] = {}
            for likely, value in [*row, (token, logprob)]:
                by_name.setdefault(self.name(likely), value)
            top.append(by_name)
        found: dict[str, Any] = {
            "tokens": names,
            "token_logprobs": [logprob for _, logprob, _ in positions],
            "top_logprobs": None,
            "text_offset": offsets,
        }
        if num_top:
            found["top_logprobs"] = top
        return found


# v1/chat/completions


async def chat_completions(inference: Inference, call: Call) -> Response:
    """POST v1/chat/completions."""
    body = await inference.read(call, ChatCompletions, CHAT)
    inference.best_of.check(body.reward_model)
    tools = callable_tools(body.tools, body.tool_choice)
    effort = effort_kwargs(inference.tokenizer, body.reasoning_effort, "reasoning_effort")
    grammar = grammar_of_answer(body, tools, body.tool_choice, several=body.parallel_tool_calls)
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidData(
            "An answer cannot both begin and go on.",
            "continue_final_message goes on with the last message; add_generation_prompt begins "
            "another.",
            "Send add_generation_prompt=false.",
        )
    chat = Chat(
        messages=body.messages,
        tools=tools,
        template_kwargs=effort | (body.chat_template_kwargs or {}),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=body.continue_final_message,
    )
    prompt = await inference.chat_prompt(call, lambda: chat, body.add_special_tokens)
    weights = inference.weights(body.model, call.run, call.tenant)
    parallel = None
    if tools:
        parallel = body.parallel_tool_calls
    request = InferenceRequest(
        call,
        weights,
        [prompt],
        body.to_sample,
        body.top or 0,
        body.prompt_logprobs,
        parallel_calls=parallel,
        grammar=grammar,
    )
    return await _respond(inference, request, body, ChatAnswer(inference.tokenizer, request, body))


def effort_kwargs(tokenizer: Tokenizer, effort: str | None, field: str) -> dict[str, Any]:
    """What tells the chat template how much to think; `field`: of the body, where that stands."""
    if effort is None:
        return {}
    if not tokenizer.template_reads("reasoning_effort"):
        raise InvalidData(
            f"`{field}` is not supported by this model.",
            "Its chat template does not read it.",
            "Leave it out.",
            param=field,
        )
    return {"reasoning_effort": effort}


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    def __init__(
        self, tokenizer: Tokenizer, request: InferenceRequest, body: ChatCompletions
    ) -> None:
        kind = "chat.completion"
        if body.stream:
            kind = "chat.completion.chunk"
        super().__init__(tokenizer, request, body, "chatcmpl", kind)
        self._body, self._begun = body, False

    def scorable(self, one: Output) -> Scorable:
        """The chat and the answer, which may go on with its last message."""
        messages = [flat(message) for message in self._body.messages]
        begun = ""
        if self._body.continue_final_message:
            begun = messages.pop()["content"]
        return Scorable(
            prompt=messages, completion=[{"role": "assistant", "content": begun + one.text}]
        )

    def best(self, chosen: Sequence[Output], outputs: Sequence[Output]) -> dict[str, Any]:
        """An answer, and facts of its prompt."""
        found = super().best(chosen, outputs)
        if outputs:
            found |= self._of_prompt(outputs[0])
        return found

    def _choice(self, one: Output) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": one.plain}
        if one.calls:
            message["content"] = one.plain or None
            message["tool_calls"] = [_shaped(call) for call in one.calls]
        return {"index": one.place, "message": message, **self._facts(one), "token_ids": one.tokens}

    def _chunk(self, one: Output) -> dict[str, Any] | None:
        body = self._body
        delta: dict[str, Any] = {}
        if one.first:
            delta = {"role": "assistant", "content": ""}
        if one.plain:
            delta["content"] = one.plain
        if one.calls:
            delta["tool_calls"] = [{"index": call.index, **_shaped(call)} for call in one.calls]
        if not (delta or body.logprobs or body.return_token_ids or one.finish is not None):
            return None
        choice = {"index": one.place, "delta": delta, **self._facts(one)}
        if body.return_token_ids:
            choice["token_ids"] = one.tokens
        of_prompt: dict[str, Any] = {}
        if not self._begun:
            self._begun = True
            of_prompt = self._of_prompt(one)
        if not body.return_token_ids:
            of_prompt.pop("prompt_token_ids", None)
        return {"choices": [choice], **of_prompt}

    def _of_prompt(self, one: Output) -> dict[str, Any]:
        found: dict[str, Any] = {"prompt_token_ids": one.prompt.tokens}
        if one.of_prompt is not None:
            found["prompt_logprobs"] = self._ranked(one)
        return found

    def _facts(self, one: Output) -> dict[str, Any]:
        finish, logprobs = one.finish, None
        if finish == "stop" and one.called:
            finish = "tool_calls"
        if self._body.logprobs:
            logprobs = {"content": token_entries(one.positions, self.name), "refusal": None}
        return {"finish_reason": finish, "stop_reason": one.matched, "logprobs": logprobs}


def token_entries(
    positions: Sequence[Position], name: Callable[[int], str], no_bytes: list[int] | None = None
) -> list[dict[str, Any]]:
    """Tokens with their bytes and log-probabilities, and the likely ones at each position.

    Args:
        positions: one for each token.
        name: the text of a token.
        no_bytes: what stands for the bytes of a token that is part of a character only.
    """

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text, encoded = name(token), no_bytes
        if BROKEN not in text:
            encoded = list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": encoded}

    return [
        {**entry(token, logprob), "top_logprobs": [entry(*pair) for pair in row]}
        for token, logprob, row in positions
    ]


def _shaped(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments_json},
    }
