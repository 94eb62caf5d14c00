"""POST generate, in sglang's shape and in vLLM's, rows apart by their fields.

Source: sglang 0.5 `GenerateReqInput` and `tokenizer_manager`; vLLM 0.11
`entrypoints/api_server.py`; what atroposlib 0.4 sends it, and the extra fields that it reads
(spec/trajectory-api.md §8).
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
from starlette.responses import Response

from halteres.engine.protocol import Grammar
from halteres.errors import HalteresError, InvalidData, as_http
from halteres.service.inference.answering import Inference
from halteres.service.inference.fields import SGLANG, VLLM, read
from halteres.service.inference.formats import guides, one_of
from halteres.service.inference.http import DONE, Shape, data, respond
from halteres.service.inference.outputs import Output, Position, Row, Usage
from halteres.service.inference.requests import (
    Call,
    InferenceRequest,
    SamplingFields,
    TokenCount,
    TopCount,
    several,
)
from halteres.tokenizer import Tokenizer


class SglangParams(SamplingFields, kw_only=True):
    """sglang's sampling parameters."""

    max_tokens: TokenCount | None = msgspec.field(default=128, name="max_new_tokens")
    sampling_seed: int | None = None
    no_stop_trim: bool = False
    json_schema: str | None = None
    regex: str | None = None

    @property
    def length_field(self) -> str:
        """sglang's own name."""
        return "max_new_tokens"

    @property
    def guide(self) -> Grammar | None:
        """What the answer is to be, by sglang's fields or by vLLM's."""
        return one_of([super().guide, *guides(self.json_schema, self.regex)])

    def __post_init__(self) -> None:
        if self.sampling_seed is not None:  # sglang's own name of it
            self.seed = self.sampling_seed
        self.include_stop_str_in_output |= self.no_stop_trim


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
    def prompts(self) -> list[str | list[int]]:
        """One or several."""
        if self.input_ids is not None and self.text is None:
            return several(self.input_ids, "input_ids")
        if self.text is not None and self.input_ids is None:
            return several(self.text, "text")
        raise InvalidData(
            "The request names no prompt, or two.", next="Send input_ids, text or prompt."
        )

    @property
    def has_several(self) -> bool:
        """Whether the answer is a list: several prompts (or one in a list) were sent, or several
        samples asked for.
        """
        given = self.input_ids
        if given is None:
            given = self.text
        many = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        return many or self.sampling_params.n > 1


class PromptParts(msgspec.Struct, kw_only=True):
    """A prompt as vLLM's object."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None


class Vllm(SamplingFields, kw_only=True):
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
        given: list[str | list[int] | None] = [self.prompt_token_ids]
        if isinstance(self.prompt, PromptParts):
            given += [self.prompt.prompt, self.prompt.prompt_token_ids]
        else:
            given.append(self.prompt)
        found = [one for one in given if one is not None]
        if len(found) != 1:
            raise InvalidData(
                "The request names no prompt, or two.", next="Send prompt, or prompt_token_ids."
            )
        return found[0]


def read_generate(body: bytes) -> Sglang | Vllm:
    """A body in either shape: `prompt` and `prompt_token_ids` are vLLM's, `text` and `input_ids`
    sglang's.
    """
    fields = {
        name
        for name, value in read(body, dict[str, msgspec.Raw]).items()
        if bytes(value) != b"null"
    }
    is_vllm = fields & {"prompt", "prompt_token_ids"} and not fields & {"input_ids", "text"}
    if is_vllm:
        return read(body, Vllm, VLLM)
    return read(body, Sglang, SGLANG)


async def generate(inference: Inference, call: Call) -> Response:
    """Answer one call, in the shape of its fields."""
    body = await inference.in_thread(call, lambda: read_generate(call.body), len(call.body))
    if isinstance(body, Sglang):
        top = of_prompt = None
        if body.return_logprob:
            top = body.top_logprobs_num
        start = body.logprob_start_len
        if start >= 0:
            of_prompt = top
        weights = inference.weights(body.model, call.run, call.tenant, body.policy_version)
        prompts = await inference.prompts(call, lambda: body.prompts)
        request = InferenceRequest(
            call, weights, prompts, body.sampling_params, top or 0, of_prompt, max(0, start)
        )
        return await respond(
            inference, request, SglangAnswer(inference.tokenizer, body), stream=body.stream
        )
    if body.best_of not in (None, body.n):
        raise InvalidData("`best_of` is not `n`.", "Sequences are not ranked.", param="best_of")
    weights = inference.weights(body.model, call.run, call.tenant)
    prompts = await inference.prompts(call, lambda: [body.one_prompt])
    request = InferenceRequest(
        call, weights, prompts, body, body.logprobs or 0, body.prompt_logprobs
    )
    return await respond(
        inference, request, VllmAnswer(inference.tokenizer, body), stream=body.stream
    )


def _with_pieces(before: Output | None, piece: Output) -> Output:
    """All pieces of a sequence so far as one: both servers repeat them in every event."""
    if before is None:
        return piece
    return replace(
        piece,
        text=before.text + piece.text,
        tokens=before.tokens + piece.tokens,
        positions=before.positions + piece.positions,
    )


class SglangAnswer(Shape):
    """sglang's: an object for each sequence."""

    def __init__(self, tokenizer: Tokenizer, body: Sglang) -> None:
        self._token, self._body = cache(tokenizer.token), body
        self._ids: dict[int, str] = {}

    def whole(self, outputs: Sequence[Output]) -> Any:
        """An answer."""
        if self._body.has_several:
            return [self._item(one) for one in outputs]
        return self._item(outputs[0])

    async def events(self, outputs: AsyncIterator[Output]) -> AsyncIterator[bytes]:
        """One event per piece, each with all that its sequence has so far."""
        so_far: dict[int, Output] = {}
        async for one in outputs:
            so_far[one.place] = _with_pieces(so_far.get(one.place), one)
            item = self._item(so_far[one.place])
            if self._body.has_several:
                item = {"index": one.place, **item}
            yield data(item)
        yield DONE

    def failed(self, error: HalteresError) -> bytes:
        """As sglang's."""
        return data({"error": {"message": error.sentence}}) + DONE

    def _item(self, one: Output) -> dict[str, Any]:
        finish_reason = None
        if one.finish is not None:
            finish_reason = {"type": one.finish}
        meta: dict[str, Any] = {
            "id": self._ids.setdefault(one.place, uuid.uuid4().hex),
            "finish_reason": finish_reason,
            "prompt_tokens": len(one.prompt.tokens),
            "completion_tokens": len(one.tokens),
            "policy_version": [one.version, one.version],
            "weight_version": str(one.version),
        }
        if self._body.return_logprob:
            meta |= self._logprobs("output", one.positions)
            if one.of_prompt is not None:
                # From `logprob_start_len` on; the first row says nothing, as in sglang, which has
                # not looked before it.
                rows = one.of_prompt[self._body.logprob_start_len :]
                meta |= self._logprobs(
                    "input", [(token, None, []) for token, _, _ in rows[:1]] + rows[1:]
                )
        item: dict[str, Any] = {"text": one.text, "output_ids": one.tokens, "meta_info": meta}
        if one.truncated_max_tokens is not None:
            item["truncated_max_tokens"] = one.truncated_max_tokens
        return item

    def _logprobs(self, side: str, positions: list[Position]) -> dict[str, Any]:
        found: dict[str, Any] = {
            f"{side}_token_logprobs": [self._entry(*position[:2]) for position in positions]
        }
        if self._body.top_logprobs_num:  # null where nothing was computed
            found[f"{side}_top_logprobs"] = [
                [self._entry(*pair) for pair in row] or None for _, _, row in positions
            ]
        return found

    def _entry(self, token: int, logprob: float | None) -> list[Any]:
        text = None
        if self._body.return_text_in_logprobs:
            text = self._token(token)
        return [logprob, token, text]


class VllmAnswer(Shape):
    """vLLM's: lists with one item per sequence of the one prompt; texts begin with the prompt."""

    media_type = "application/x-ndjson"

    def __init__(self, tokenizer: Tokenizer, body: Vllm) -> None:
        self._tokenizer, self._body = tokenizer, body

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """An answer, or what there is of it."""
        prompt, usage = outputs[0].prompt, Usage()
        for one in outputs:
            usage.add(one)
        text = prompt.text
        if text is None:
            text = self._tokenizer.decode(prompt.tokens)
        shaped: dict[str, Any] = {
            "text": [text + one.text for one in outputs],
            "prompt": text,
            "finish_reasons": [one.finish for one in outputs],
            "prompt_token_ids": prompt.tokens,
            "token_ids": [one.tokens for one in outputs],
            **usage.ours,
        }
        if self._body.logprobs is not None:
            shaped["logprobs"] = [
                [[_by_id(*position)] for position in one.positions] for one in outputs
            ]
        if (of_prompt := outputs[0].of_prompt) is not None:
            shaped["prompt_logprobs"] = [_by_id(*position) for position in of_prompt]
        return shaped

    def failed(self, error: HalteresError) -> bytes:
        """A line."""
        return msgspec.json.encode({"error": as_http(error)["detail"]}) + b"\n"

    async def events(self, outputs: AsyncIterator[Output]) -> AsyncIterator[bytes]:
        """One JSON object per line, each with all that every sequence has so far."""
        so_far: dict[int, Output] = {}
        async for one in outputs:
            so_far[one.place] = _with_pieces(so_far.get(one.place), one)
            if len(so_far) == self._body.n:
                yield (
                    msgspec.json.encode(self.whole([so_far[place] for place in sorted(so_far)]))
                    + b"\n"
                )


def _by_id(token: int, logprob: float | None, row: Row) -> dict[str, float] | None:
    if logprob is None:
        return None
    return {str(token): logprob} | {str(one): value for one, value in row if one != token}
