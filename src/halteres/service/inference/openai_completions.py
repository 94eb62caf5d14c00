"""POST v1/completions, in OpenAI's shape.

Source: OpenAI's API reference; vLLM 0.11 for token ids and prompt_logprobs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import Response

from halteres.scores import Scorable
from halteres.service.answers import answer, encoded
from halteres.service.inference.answering import Inference
from halteres.service.inference.bodies import COMPLETIONS, Refusals, TokenCount, TopCount, several
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
from halteres.service.inference.requests import Call, Prompt
from halteres.service.inference.written import Row, Scores, Written
from halteres.text import Tokenizer


class Completions(Answered, kw_only=True):
    """POST v1/completions."""

    prompt: str | list[str | int | list[int]]
    max_tokens: TokenCount | None = 16
    logprobs: bool | TopCount | None = None
    echo: bool = False

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several prompts, each a text or tokens.

        Raises:
            InvalidData: token ids stand beside texts or lists.
        """
        return several(self.prompt, "prompt")

    @property
    def top(self) -> int | None:
        """How many of the most likely tokens are wanted at each position; None: no log-probabilities at all."""
        if self.logprobs is None or self.logprobs is False:
            return None
        return 0 if self.logprobs is True else self.logprobs


REFUSALS = Refusals(COMPLETIONS)


async def completions(inference: Inference, call: Call) -> Response:
    """Answer one call."""
    asked = await inference.read(call, lambda body: REFUSALS.read(body, Completions))
    inference.best_of.check(asked.reward_model)
    prompts = await inference.prompts(call, asked.prompts, asked.add_special_tokens)
    of_prompt = asked.prompt_logprobs
    if asked.echo and asked.top is not None:
        of_prompt = max(asked.top, of_prompt or 0)
    elif asked.echo and asked.max_tokens == 0:
        of_prompt = of_prompt or 0  # nothing is written: the prompt alone comes back
    ask = ask_of(inference, call, asked, prompts, max_tokens=asked.max_tokens, top=asked.top, prompt_top=of_prompt)
    choices = Choices(inference.tokenizer, asked)
    envelope = Envelope("cmpl", "text_completion", ask.weights.name)
    if asked.stream:
        return Events(await begun(inference.stream(ask)), lambda written: choices.chunks(written, envelope), failed)

    def scorable(one: Written) -> Scorable:
        return Scorable(prompt=text_of(inference.tokenizer, one.prompt), completion=one.text)

    def shape(chosen: list[Written], written: list[Written]) -> Response:
        return answer(envelope.whole([encoded(choices.shape(one)) for one in chosen], Count.of(written)))

    return await whole_answer(inference, ask, asked, scorable, shape)


class Choices:
    """The shape of one choice, or of its next piece."""

    def __init__(self, tokenizer: Tokenizer, asked: Completions) -> None:
        self._tokenizer, self._asked = tokenizer, asked
        self._name = names(tokenizer, as_ids=asked.return_tokens_as_token_ids)
        self._begun: set[int] = set()  # places that have had a piece
        self._lengths: dict[int, int] = {}  # characters of tokens' names told with log-probabilities
        self._of_prompt: dict[int, dict[str, Any]] = {}  # logprobs of a prompt, by the place of its first sequence
        self._vllm_of_prompt: dict[int, list[dict[str, Any] | None]] = {}

    async def chunks(self, written: AsyncIterator[Written], envelope: Envelope) -> AsyncIterator[bytes]:
        """A stream's events: one per piece that holds something."""
        count, asked = Count(), self._asked
        async for one in written:
            count.add(one)
            choice = self.shape(one)
            if not asked.return_token_ids:
                del choice["token_ids"]
            if choice["text"] or asked.top is not None or asked.return_token_ids or one.finish is not None:
                yield data(envelope.chunk(choice, count))
        if asked.streams_usage:
            yield data(envelope.usage(count))
        yield DONE

    def shape(self, one: Written) -> dict[str, Any]:
        """The first piece of a choice brings what was asked of the prompt."""
        first = one.place not in self._begun
        self._begun.add(one.place)
        choice: dict[str, Any] = {
            "index": one.place,
            "text": (text_of(self._tokenizer, one.prompt) if first and self._asked.echo else "") + one.text,
            "finish_reason": one.finish,
            "stop_reason": one.matched,
            "token_ids": one.tokens,
            "logprobs": self._logprobs(one, with_prompt=first and self._asked.echo),
        }
        if first and self._asked.return_token_ids:
            choice["prompt_token_ids"] = one.prompt.tokens
        if first and one.scores is not None and self._asked.prompt_logprobs is not None:
            of_prompt, prompt = self._vllm_of_prompt, one.place - one.sample
            if prompt not in of_prompt:
                of_prompt[prompt] = vllm_prompt_logprobs(self._name, one.prompt.tokens, one.scores)
            choice["prompt_logprobs"] = of_prompt[prompt]
        return choice

    def _logprobs(self, one: Written, *, with_prompt: bool) -> dict[str, Any] | None:
        if self._asked.top is None:
            return None
        before = self._prompt_logprobs(one.place - one.sample, one.prompt, one.scores) if with_prompt else None
        offset = self._lengths.get(one.place, sum(map(len, before["tokens"])) if before else 0)
        top = (one.top or [[] for _ in one.tokens]) if self._asked.top else None
        shaped = completion_logprobs(self._name, one.tokens, one.logprobs, top, offset)
        self._lengths[one.place] = offset + sum(map(len, shaped["tokens"]))
        if before is None:
            return shaped
        return {name: None if rows is None else before[name] + rows for name, rows in shaped.items()}

    def _prompt_logprobs(self, place: int, prompt: Prompt, scores: Scores | None) -> dict[str, Any] | None:
        """Of the prompt at this place; made once for all its sequences."""
        if scores is not None and place not in self._of_prompt:
            top = [row[: self._asked.top] for row in scores.top] if self._asked.top else None
            self._of_prompt[place] = completion_logprobs(self._name, prompt.tokens, scores.logprobs, top)
        return self._of_prompt.get(place)


def text_of(tokenizer: Tokenizer, prompt: Prompt) -> str:
    """A prompt as text, where tokens were sent too."""
    return tokenizer.decode(prompt.tokens, skip_special_tokens=False) if prompt.text is None else prompt.text


def completion_logprobs(
    name: Name,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    top: Sequence[Row] | None,
    offset: int = 0,
) -> dict[str, Any]:
    """Of /v1/completions; `offset` is where the first token's text begins."""
    texts = [name(token) for token in tokens]
    offsets: list[int] = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    chosen = (
        None if top is None else [_by_name(name, *position) for position in zip(tokens, logprobs, top, strict=True)]
    )
    return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": chosen, "text_offset": offsets}


def _by_name(name: Name, token: int, logprob: float | None, top: Row) -> dict[str, float] | None:
    """The most likely tokens and the one that stands there; of tokens with equal text the likeliest."""
    if logprob is None:
        return None
    named: dict[str, float] = {}
    for one, value in [*top, (token, logprob)]:
        named.setdefault(name(one), value)
    return named
