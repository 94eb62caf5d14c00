"""POST inference/v1/generate: tokens in, tokens out, in the shape of vLLM's route of that path.

Source: vLLM 0.32 (`engine/vllm/answers`, whose structs are used here); verifiers 0.4.0 with
renderers 0.1.12, whose train client checks that there are as many log-probabilities as tokens,
that each names its token `token_id:17`, and that it is finite.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from halteres.engine.vllm import answers as wire
from halteres.errors import HalteresError
from halteres.service.http import openai_error
from halteres.service.inference.answering import Inference
from halteres.service.inference.fields import TOKENS
from halteres.service.inference.http import DONE, Shape, data, respond
from halteres.service.inference.outputs import Output, Position, Usage
from halteres.service.inference.requests import (
    Call,
    InferenceRequest,
    SamplingFields,
    TopCount,
)


class TokenSampling(SamplingFields, kw_only=True):
    """How to sample; without `max_tokens` up to the context."""

    logprobs: TopCount | None = None  # of the likeliest tokens at each position; None: none at all
    prompt_logprobs: TopCount | None = None


class TokenPrompt(msgspec.Struct, kw_only=True):
    """POST inference/v1/generate."""

    token_ids: list[int]
    sampling_params: TokenSampling = msgspec.field(default_factory=TokenSampling)
    model: str | None = None
    stream: bool = False


async def generate_tokens(inference: Inference, call: Call) -> Response:
    """Answer one call."""
    body = await inference.read(call, TokenPrompt, TOKENS)
    weights = inference.weights(body.model, call.run, call.tenant)
    prompts = await inference.prompts(call, lambda: [body.token_ids])
    sampling = body.sampling_params
    request = InferenceRequest(
        call, weights, prompts, sampling, sampling.logprobs or 0, sampling.prompt_logprobs
    )
    return await respond(inference, request, TokenAnswer(request, body), stream=body.stream)


class TokenAnswer(Shape):
    """One answer, whole or as events."""

    def __init__(self, request: InferenceRequest, body: TokenPrompt) -> None:
        self._request, self._usage = request, Usage()
        self._has_logprobs = body.sampling_params.logprobs is not None
        self._id = uuid.uuid4().hex

    def whole(self, outputs: Sequence[Output]) -> wire.Generated:
        """All sequences."""
        for one in outputs:
            self._usage.add(one)
        [prompt] = self._request.prompts
        of_prompt, completion = outputs[0].of_prompt, self._usage.completion
        return wire.Generated(
            request_id=self._id,
            model=self._request.weights.name,
            choices=tuple(map(self._choice, outputs)),
            prompt_logprobs=None if of_prompt is None else tuple(map(_scored, of_prompt)),
            usage=wire.Usage(
                prompt_tokens=len(prompt.tokens),
                completion_tokens=completion,
                total_tokens=len(prompt.tokens) + completion,
            ),
            **self._usage.ours,
        )

    async def events(self, outputs: AsyncIterator[Output]) -> AsyncIterator[bytes]:
        """One per piece; the last of a sequence has our own fields, too."""
        async for one in outputs:
            self._usage.add(one)
            ours: dict[str, Any] = {}
            if one.finish is not None:
                ours = self._usage.ours
            yield data(
                wire.Generated(request_id=self._id, choices=(self._choice(one),), **ours),
            )
        yield DONE

    def failed(self, error: HalteresError) -> bytes:
        """The error in OpenAI's shape, as vLLM's."""
        return data(openai_error(error)) + DONE

    def _choice(self, one: Output) -> wire.Choice:
        logprobs = None
        if self._has_logprobs:
            logprobs = wire.Logprobs(content=tuple(map(_sampled, one.positions)))
        return wire.Choice(
            index=one.place,
            token_ids=tuple(one.tokens),
            finish_reason=one.finish,
            stop_reason=one.matched,
            logprobs=logprobs,
        )


def _sampled(position: Position) -> wire.Sampled:
    token, logprob, row = position
    likeliest = enumerate(row, start=1)
    return wire.Sampled(
        token_id=token,
        token=f"token_id:{token}",
        logprob=_finite(logprob),
        top_logprobs=tuple(wire.Scored(one, value, rank) for rank, (one, value) in likeliest),
    )


def _scored(position: Position) -> dict[str, wire.PromptScore] | None:
    """The token of a prompt and the likeliest there, by id; None at the first position."""
    token, logprob, row = position
    if logprob is None:
        return None
    scores = {str(token): wire.PromptScore(logprob=logprob, rank=None)}
    for rank, (one, value) in enumerate(row, start=1):
        scores[str(one)] = wire.PromptScore(logprob=value, rank=rank)
    return scores


def _finite(logprob: float | None) -> float:
    """As vLLM writes it, whose clients know that number for none."""
    if logprob is None:
        return wire.NOT_FINITE
    return logprob
