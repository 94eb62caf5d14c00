"""POST generate, in sglang's shape and in vLLM's, told apart by their fields.

Source: sglang 0.5 `GenerateReqInput` and `tokenizer_manager`; vLLM 0.11 `entrypoints/api_server.py`; what
atroposlib 0.4 sends it, and the extra fields that it reads (spec/trajectory-api.md §8).
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.responses import Response

from halteres.errors import HalteresError, InvalidData, as_http
from halteres.service.answers import answer, encoded
from halteres.service.inference.answering import Inference
from halteres.service.inference.bodies import SGLANG, Refusals, Sampled, TokenCount, TopCount, read, several
from halteres.service.inference.http import DONE, Events, begun, data
from halteres.service.inference.openai import Count
from halteres.service.inference.requests import Ask, Call
from halteres.service.inference.written import Row, Scores, Written
from halteres.text import Tokenizer


class SglangParams(Sampled, kw_only=True):
    """sglang's sampling parameters."""

    max_new_tokens: TokenCount | None = 128
    sampling_seed: int | None = None
    no_stop_trim: bool = False

    @property
    def keeps_stop(self) -> bool:
        """Whether the text holds what stopped it."""
        return self.no_stop_trim or self.include_stop_str_in_output

    @property
    def chosen_seed(self) -> int | None:
        """Under either name."""
        return self.sampling_seed if self.seed is None else self.seed


class Sglang(msgspec.Struct, kw_only=True):
    """POST generate, sglang's."""

    input_ids: list[int | list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: SglangParams = msgspec.field(default_factory=SglangParams)
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: TopCount = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    model: str | None = None
    policy_version: int | None = None  # ours: exactly these weights of the run; None: its newest

    @property
    def many(self) -> bool:
        """Whether the answer is a list whatever its length: several prompts were sent."""
        given = self.text if self.input_ids is None else self.input_ids
        return isinstance(given, list) and bool(given) and not isinstance(given[0], int)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several."""
        given = self.text if self.input_ids is None else self.input_ids
        if given is None or (self.input_ids is not None and self.text is not None):
            raise InvalidData("The request names no prompt, or two.", next="Send input_ids, text or prompt.")
        return several(given, "input_ids" if self.text is None else "text")


class PromptParts(msgspec.Struct, kw_only=True):
    """A prompt as vLLM's object."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None


class Vllm(Sampled, kw_only=True):
    """POST generate, vLLM's."""

    prompt: str | list[int] | PromptParts | None = None
    prompt_token_ids: list[int] | None = None
    max_tokens: TokenCount | None = 16
    logprobs: TopCount | None = None
    prompt_logprobs: TopCount | None = None
    best_of: int | None = None
    stream: bool = False
    model: str | None = None

    @property
    def one_prompt(self) -> str | list[int]:
        """A text or tokens."""
        parts = self.prompt if isinstance(self.prompt, PromptParts) else PromptParts()
        given = (None if isinstance(self.prompt, PromptParts) else self.prompt, parts.prompt, parts.prompt_token_ids)
        found = [one for one in (*given, self.prompt_token_ids) if one is not None]
        if len(found) != 1:
            raise InvalidData("The request names no prompt, or two.", next="Send prompt, or prompt_token_ids.")
        return found[0]


NOTHING = msgspec.Raw(b"null")


class _Fields(msgspec.Struct, kw_only=True):
    prompt: msgspec.Raw = NOTHING
    prompt_token_ids: msgspec.Raw = NOTHING
    input_ids: msgspec.Raw = NOTHING
    text: msgspec.Raw = NOTHING


def read_generate(body: bytes) -> Sglang | Vllm:
    """A body in either shape: `prompt` and `prompt_token_ids` are vLLM's, `text` and `input_ids` sglang's.

    Raises:
        InvalidData: it is neither.
    """
    named = read(body, _Fields)
    of_sglang = named.input_ids != NOTHING or named.text != NOTHING
    of_vllm = named.prompt != NOTHING or named.prompt_token_ids != NOTHING
    return read(body, Vllm) if of_vllm and not of_sglang else read(body, Sglang)


REFUSALS = Refusals(SGLANG)

LINES = "application/x-ndjson"


async def generate(inference: Inference, call: Call) -> Response:
    """Answer one call, in the shape of its fields."""

    def read_checked(body: bytes) -> Sglang | Vllm:
        asked = read_generate(body)
        REFUSALS.check(body)
        return asked

    asked = await inference.read(call, read_checked)
    return await (_sglang(inference, call, asked) if isinstance(asked, Sglang) else _vllm(inference, call, asked))


async def _sglang(inference: Inference, call: Call, asked: Sglang) -> Response:
    weights = inference.addresses.find(asked.model, call.run, call.tenant, asked.policy_version)
    params = asked.sampling_params
    prompts = await inference.prompts(call, asked.prompts)
    of_prompt = asked.return_logprob and asked.logprob_start_len >= 0
    ask = Ask(
        call=call,
        weights=weights,
        prompts=prompts,
        sampled=params,
        max_tokens=params.max_new_tokens,
        seed=params.chosen_seed,
        top=asked.top_logprobs_num if asked.return_logprob else 0,
        prompt_top=asked.top_logprobs_num if of_prompt else None,
        prompt_start=max(0, asked.logprob_start_len),
    )
    shape = SglangShape(inference.tokenizer, asked)
    if asked.stream:
        return Events(await begun(inference.stream(ask)), shape.events, _failed_event)
    alone = not asked.many and params.n == 1
    return await inference.write(
        ask, lambda written: answer(shape.item(written[0]) if alone else [encoded(shape.item(one)) for one in written])
    )


async def _vllm(inference: Inference, call: Call, asked: Vllm) -> Response:
    if asked.best_of not in (None, asked.n):
        raise InvalidData("`best_of` is not `n`.", "Sequences are not ranked.", param="best_of")
    weights = inference.addresses.find(asked.model, call.run, call.tenant)
    ask = Ask(
        call=call,
        weights=weights,
        prompts=await inference.prompts(call, [asked.one_prompt]),
        sampled=asked,
        max_tokens=asked.max_tokens,
        seed=asked.seed,
        top=asked.logprobs or 0,
        prompt_top=asked.prompt_logprobs,
    )
    shape = VllmShape(inference.tokenizer, asked)
    if asked.stream:
        return Events(await begun(inference.stream(ask)), shape.lines, _failed_line, LINES)
    return await inference.write(ask, lambda written: answer(shape.whole(written)))


class Whole:
    """What has been written of one sequence so far: both servers repeat it in every event."""

    def __init__(self) -> None:
        self.text, self.tokens, self.logprobs, self.top = "", list[int](), list[float](), list[Row]()

    def with_piece(self, one: Written) -> Written:
        """All pieces up to this one, as one."""
        self.text += one.text
        self.tokens, self.logprobs = self.tokens + one.tokens, self.logprobs + one.logprobs
        self.top = self.top + one.top
        return replace(one, text=self.text, tokens=self.tokens, logprobs=self.logprobs, top=self.top)


class SglangShape:
    """sglang's."""

    def __init__(self, tokenizer: Tokenizer, asked: Sglang) -> None:
        self._tokenizer, self._asked = tokenizer, asked
        self._ids: dict[int, str] = {}
        self._of_prompts: dict[int, dict[str, Any]] = {}  # by the place of a prompt's first sequence

    def item(self, one: Written) -> dict[str, Any]:
        """One sequence, whole or as far as it is written."""
        meta: dict[str, Any] = {
            "id": self._ids.setdefault(one.place, uuid.uuid4().hex),
            "finish_reason": None if one.finish is None else {"type": one.finish},
            "prompt_tokens": len(one.prompt.tokens),
            "completion_tokens": len(one.tokens),
            "policy_version": [one.version, one.version],
            "weight_version": str(one.version),
        }
        if self._asked.return_logprob:
            meta |= self._of_answer(one) | self._of_prompt(one)
        return {"text": one.text, "output_ids": one.tokens, "meta_info": meta}

    async def events(self, written: AsyncIterator[Written]) -> AsyncIterator[bytes]:
        """One event per piece, each with all that its sequence has so far."""
        wholes: dict[int, Whole] = {}
        several = self._asked.many or self._asked.sampling_params.n > 1
        async for one in written:
            item = self.item(wholes.setdefault(one.place, Whole()).with_piece(one))
            yield data({"index": one.place, **item} if several else item)
        yield DONE

    def _of_answer(self, one: Written) -> dict[str, Any]:
        meta: dict[str, Any] = {"output_token_logprobs": self._rows(one.logprobs, one.tokens)}
        if self._asked.top_logprobs_num:
            meta["output_top_logprobs"] = self._tops(one.top)
        return meta

    def _of_prompt(self, one: Written) -> dict[str, Any]:
        """From `logprob_start_len` on; the first row says nothing, as in sglang, which has not looked before it."""
        if one.scores is None:
            return {}
        prompt = one.place - one.sample
        if prompt not in self._of_prompts:
            self._of_prompts[prompt] = self._scored(one.prompt.tokens, one.scores)
        return self._of_prompts[prompt]

    def _scored(self, prompt: Sequence[int], scores: Scores) -> dict[str, Any]:
        start = self._asked.logprob_start_len
        tokens = prompt[start:]
        logprobs = [None, *scores.logprobs[start + 1 :]][: len(tokens)]
        meta: dict[str, Any] = {"input_token_logprobs": self._rows(logprobs, tokens)}
        if self._asked.top_logprobs_num:
            meta["input_top_logprobs"] = self._tops([[], *scores.top[start + 1 :]][: len(tokens)])
        return meta

    def _rows(self, logprobs: Sequence[float | None], tokens: Sequence[int]) -> list[list[Any]]:
        text = self._asked.return_text_in_logprobs
        return [
            sglang_row(self._tokenizer, logprob, token, text=text)
            for logprob, token in zip(logprobs, tokens, strict=True)
        ]

    def _tops(self, rows: Sequence[Row]) -> list[list[list[Any]] | None]:
        return [sglang_top(self._tokenizer, row, text=self._asked.return_text_in_logprobs) for row in rows]


class VllmShape:
    """vLLM's: lists with one item per sequence of the one prompt; texts begin with the prompt."""

    def __init__(self, tokenizer: Tokenizer, asked: Vllm) -> None:
        self._tokenizer, self._asked = tokenizer, asked

    def whole(self, written: Sequence[Written]) -> dict[str, Any]:
        """An answer, or what there is of it."""
        prompt = written[0].prompt
        text = self._tokenizer.decode(prompt.tokens) if prompt.text is None else prompt.text
        shaped: dict[str, Any] = {
            "text": [text + one.text for one in written],
            "prompt": text,
            "finish_reasons": [one.finish for one in written],
            "prompt_token_ids": prompt.tokens,
            "token_ids": [one.tokens for one in written],
            "policy_version": Count.of(written).policy_version,
        }
        if self._asked.logprobs is not None:
            shaped["logprobs"] = [_by_position(one.tokens, one.logprobs, one.top) for one in written]
        if (scores := written[0].scores) is not None:
            shaped["prompt_logprobs"] = [
                None if logprob is None else by_id(token, logprob, row)
                for token, logprob, row in zip(prompt.tokens, scores.logprobs, scores.top, strict=True)
            ]
        return shaped

    async def lines(self, written: AsyncIterator[Written]) -> AsyncIterator[bytes]:
        """One JSON object per line, each with all that every sequence has so far."""
        wholes: dict[int, Whole] = {}
        shown: dict[int, Written] = {}
        async for one in written:
            shown[one.place] = wholes.setdefault(one.place, Whole()).with_piece(one)
            if len(shown) == self._asked.n:
                yield msgspec.json.encode(self.whole([shown[place] for place in sorted(shown)])) + b"\n"


def _by_position(tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[Row]) -> list[list[dict[str, float]]]:
    rows = top or [[] for _ in tokens]
    return [[by_id(token, logprob, row)] for token, logprob, row in zip(tokens, logprobs, rows, strict=True)]


def _failed_event(error: HalteresError) -> bytes:
    return data({"error": {"message": error.sentence}}) + DONE


def _failed_line(error: HalteresError) -> bytes:
    return msgspec.json.encode({"error": as_http(error)["detail"]}) + b"\n"


def by_id(token: int, logprob: float, row: Row) -> dict[str, float]:
    """The token that stands there first, then the most likely ones."""
    return {str(token): logprob} | {str(one): value for one, value in row if one != token}


def sglang_row(tokenizer: Tokenizer, logprob: float | None, token: int, *, text: bool) -> list[Any]:
    """[log-probability, token, its text or null]."""
    return [logprob, token, tokenizer.token(token) if text else None]


def sglang_top(tokenizer: Tokenizer, row: Row, *, text: bool) -> list[list[Any]] | None:
    """The most likely tokens of one position; null where nothing was computed."""
    return [sglang_row(tokenizer, logprob, token, text=text) for token, logprob in row] or None
