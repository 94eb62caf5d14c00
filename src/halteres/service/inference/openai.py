"""What answers in OpenAI's shape have in common, completions and chats.

Source: OpenAI's API reference; vLLM 0.11 for token ids, prompt_logprobs, chat templates.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from halteres.errors import HalteresError, InvalidData
from halteres.scores import Scorable
from halteres.service.answers import openai_error
from halteres.service.inference.answering import Inference
from halteres.service.inference.bodies import Sampled, TopCount
from halteres.service.inference.http import DONE, data
from halteres.service.inference.requests import Ask, Call, Prompt
from halteres.service.inference.written import Row, Scores, Written
from halteres.text import Tokenizer


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream tells beside the answer."""

    include_usage: bool = False


class Answered(Sampled, kw_only=True):
    """What both routes know."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: TopCount | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    add_special_tokens: bool | None = None
    best_of: int | None = None  # sequences that are sampled; the best `n` are answered
    reward_model: str | None = None  # by whose score; ours: OpenAI has the mean log-probability alone

    @property
    def num_sampled(self) -> int:
        """Sequences per prompt."""
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidData(f"`best_of` is {self.best_of}, and `n` is {self.n}.", "n are answered.", param="best_of")
        if self.reward_model is not None and self.best_of is None:
            raise InvalidData("`reward_model` chooses among several.", next="Send `best_of`.", param="reward_model")
        if self.stream and self.is_ranked:
            raise InvalidData("The best of several cannot be streamed.", next="Send stream=false.", param="best_of")
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether the answers are chosen, the best first."""
        return self.reward_model is not None or self.best_of not in (None, self.n)

    @property
    def streams_usage(self) -> bool:
        """Whether a stream ends with a count of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


@dataclass(slots=True, kw_only=True)
class Count:
    """Tokens and policy versions of an answer, as far as it is written."""

    prompts: dict[int, int] = field(default_factory=dict)  # tokens, by the place of a prompt's first sequence
    completion: int = 0
    versions: set[int] = field(default_factory=set)

    def add(self, one: Written) -> None:
        """Count a sequence, or a piece of one."""
        self.prompts[one.place - one.sample] = len(one.prompt.tokens)
        self.completion += len(one.tokens)
        self.versions.add(one.version)

    @staticmethod
    def of(written: Sequence[Written]) -> Count:
        """Of a whole answer."""
        count = Count()
        for one in written:
            count.add(one)
        return count

    @property
    def prompt(self) -> int:
        """Tokens of all prompts."""
        return sum(self.prompts.values())

    @property
    def usage(self) -> dict[str, int]:
        """OpenAI's."""
        both = self.prompt + self.completion
        return {"prompt_tokens": self.prompt, "completion_tokens": self.completion, "total_tokens": both}

    @property
    def policy_version(self) -> list[int]:
        """Smallest and largest."""
        return [min(self.versions, default=0), max(self.versions, default=0)]


class Envelope:
    """One answer's, or all chunks' of a stream."""

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        created = int(time.time())
        self._facts = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": created, "model": model}

    def whole(self, choices: Sequence[Any], count: Count) -> dict[str, Any]:
        """An answer."""
        return {**self._facts, "choices": choices, "usage": count.usage, "policy_version": count.policy_version}

    def chunk(self, choice: dict[str, Any], count: Count) -> dict[str, Any]:
        """A piece; the last of a choice carries the policy version."""
        chunk = {**self._facts, "choices": [choice]}
        return chunk if choice["finish_reason"] is None else {**chunk, "policy_version": count.policy_version}

    def usage(self, count: Count) -> dict[str, Any]:
        """The chunk without choices that ends a stream whose client asked for it."""
        return self.whole([], count)


def failed(error: HalteresError) -> bytes:
    """How a stream ends that fails under way."""
    return data(openai_error(error)) + DONE


Name = Callable[[int], str]
"""The text by which a token is called."""


def names(tokenizer: Tokenizer, *, as_ids: bool = False) -> Name:
    """Tokens by their text, special ones by name; or as `token_id:17`, which tells apart tokens of equal text."""
    return (lambda token: f"token_id:{token}") if as_ids else tokenizer.token


def vllm_prompt_logprobs(name: Name, tokens: Sequence[int], scores: Scores) -> list[dict[str, Any] | None]:
    """vLLM's prompt_logprobs: per position the token that stands there, then the most likely ones, by id."""
    return [
        None
        if logprob is None
        else {
            str(one): {"logprob": value, "rank": rank, "decoded_token": name(one)}
            for one, value, rank in _ranked(token, logprob, row)
        }
        for token, logprob, row in zip(tokens, scores.logprobs, scores.top, strict=True)
    ]


def _ranked(token: int, logprob: float, row: Row) -> list[tuple[int, float, int | None]]:
    ranks = {one: rank for rank, (one, _) in enumerate(row, start=1)}
    others = [(one, value, ranks[one]) for one, value in row if one != token]
    return [(token, logprob, ranks.get(token)), *others]


def ask_of(
    inference: Inference,
    call: Call,
    asked: Answered,
    prompts: tuple[Prompt, ...],
    *,
    max_tokens: int | None,
    top: int | None,
    prompt_top: int | None,
) -> Ask:
    """The request as the service executes it; `top` is that of `Ask`, None where no log-probabilities are wanted."""
    return Ask(
        call=call,
        weights=inference.addresses.find(asked.model, call.run, call.tenant),
        prompts=prompts,
        sampled=msgspec.structs.replace(asked, n=asked.num_sampled),
        max_tokens=max_tokens,
        seed=asked.seed,
        top=top or 0,
        prompt_top=prompt_top,
    )


async def whole_answer(
    inference: Inference,
    ask: Ask,
    asked: Answered,
    scorable: Callable[[Written], Scorable],
    shape: Callable[[list[Written], list[Written]], Response],
) -> Response:
    """What `shape` makes of the sequences that are answered, and of all that were sampled."""
    if not asked.is_ranked:
        return await inference.write(ask, lambda written: shape(written, written))
    written = await inference.write(ask, list)
    best = await inference.best_of.chosen(written, asked.n, asked.reward_model, scorable)
    return await inference.aside(ask.call, lambda: shape(best, written))
