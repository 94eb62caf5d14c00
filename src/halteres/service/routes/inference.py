"""Run-addressed inference: sglang's /generate and OpenAI's completions, for environments.

Owns: the shapes of the answers, each with its policy version.
Never: streams (later).
Source: contracts of sglang 0.4 and of OpenAI's API; spec/trajectory-api.md §8 for what environments read.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halteres.errors import InvalidData
from halteres.service.inference import Inference, Written
from halteres.service.routes.answers import answer, body_of
from halteres.service.wire import bodies
from halteres.service.wire.inference import ChatCompletions, Completions, Generate


class InferenceRoutes:
    """What an environment calls."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._tokenizer = inference.tokenizer

    def table(self) -> list[Route]:
        """The routes."""
        return [
            Route("/runs/{run_id}/generate", self.generate, methods=["POST"]),
            Route("/runs/{run_id}/v1/completions", self.completions, methods=["POST"]),
            Route("/runs/{run_id}/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/runs/{run_id}/v1/models", self.models),
            Route("/runs/{run_id}/health", self.health),
        ]

    async def health(self, request: Request) -> Response:
        """GET health: 200 once the run has a policy."""
        policy = self._inference.weights(request.path_params["run_id"], None)
        return answer({"status": "ok", "policy_version": policy.version if policy else 0})

    async def models(self, request: Request) -> Response:
        """GET v1/models: the run's policy and the base model."""
        run = request.path_params["run_id"]
        self._inference.weights(run, None)
        facts = {"object": "model", "created": 0, "owned_by": "halteres"}
        return answer({"object": "list", "data": [{"id": name, **facts} for name in (run, self._inference.base.name)]})

    async def generate(self, request: Request) -> Response:
        """POST generate: one object, or a list of them for n > 1."""
        body = await body_of(request)
        asked = bodies.read(body, Generate)
        _refuse_stream(asked.stream)
        if (asked.input_ids is None) == (asked.text is None):
            raise InvalidData("The request names no prompt, or two.", next="Send input_ids or text.")
        params = asked.sampling_params
        seed = params.sampling_seed if params.seed is None else params.seed
        prompt = asked.text if asked.input_ids is None else asked.input_ids
        written = await self._inference.write(
            request.path_params["run_id"], body, asked.model, [prompt or ""], params, params.max_new_tokens, seed
        )
        shaped = [self._generated(one, asked) for one in written]
        return answer(shaped[0] if params.n == 1 else shaped)

    def _generated(self, one: Written, asked: Generate) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "finish_reason": {"type": one.finish_reason},
            "prompt_tokens": len(one.prompt),
            "completion_tokens": len(one.tokens),
            "policy_version": [one.version, one.version],
            "weight_version": str(one.version),
        }
        if asked.return_logprob:
            texts = (
                map(self._tokenizer.token, one.tokens) if asked.return_text_in_logprobs else [None] * len(one.tokens)
            )
            rows = zip(one.logprobs, one.tokens, texts, strict=True)
            meta["output_token_logprobs"] = [list(row) for row in rows]
        return {"text": one.text, "output_ids": one.tokens, "meta_info": meta}

    async def completions(self, request: Request) -> Response:
        """POST v1/completions."""
        body = await body_of(request)
        asked = bodies.read(body, Completions)
        _refuse_stream(asked.stream)
        if asked.echo:
            raise InvalidData("echo is not supported.", next="Prepend the prompt yourself.")
        run = request.path_params["run_id"]
        written = await self._inference.write(
            run, body, asked.model, asked.prompts, asked, asked.max_tokens, asked.seed
        )
        wants_logprobs = asked.logprobs is not None and asked.logprobs is not False
        choices = [self._completion(index, one, wants_logprobs) for index, one in enumerate(written)]
        return answer(_openai("text_completion", asked.model or run, choices, written))

    def _completion(self, index: int, one: Written, logprobs: bool) -> dict[str, Any]:
        return {
            "index": index,
            "text": one.text,
            "finish_reason": one.finish_reason,
            "token_ids": one.tokens,
            "logprobs": self._completion_logprobs(one) if logprobs else None,
        }

    def _completion_logprobs(self, one: Written) -> dict[str, Any]:
        texts = [self._tokenizer.token(token) for token in one.tokens]
        offsets = [sum(map(len, texts[:index])) for index in range(len(texts))]
        return {"tokens": texts, "token_logprobs": one.logprobs, "top_logprobs": None, "text_offset": offsets}

    async def chat(self, request: Request) -> Response:
        """POST v1/chat/completions."""
        body = await body_of(request)
        asked = bodies.read(body, ChatCompletions)
        _refuse_stream(asked.stream)
        if asked.tools:
            raise InvalidData("Tools are not supported yet.", next="Describe them in the system message.")
        prompt = self._tokenizer.apply_chat_template([_flat(message) for message in asked.messages])
        run = request.path_params["run_id"]
        limit = asked.max_completion_tokens if asked.max_tokens is None else asked.max_tokens
        written = await self._inference.write(run, body, asked.model, [prompt], asked, limit, asked.seed)
        choices = [self._chat_choice(one, asked.logprobs) for one in written]
        return answer({**_openai("chat.completion", asked.model or run, choices, written), "prompt_token_ids": prompt})

    def _chat_choice(self, one: Written, logprobs: bool) -> dict[str, Any]:
        return {
            "index": one.sample,
            "message": {"role": "assistant", "content": one.text},
            "finish_reason": one.finish_reason,
            "token_ids": one.tokens,
            "logprobs": {"content": self._chat_logprobs(one)} if logprobs else None,
        }

    def _chat_logprobs(self, one: Written) -> list[dict[str, Any]]:
        texts = [self._tokenizer.token(token) for token in one.tokens]
        return [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, one.logprobs, strict=True)
        ]


def _openai(kind: str, model: str, choices: list[dict[str, Any]], written: list[Written]) -> dict[str, Any]:
    prompt_tokens = sum(len(one.prompt) for one in written if one.sample == 0)
    completion_tokens = sum(len(one.tokens) for one in written)
    versions = [one.version for one in written]
    return {
        "id": f"{'chatcmpl' if kind == 'chat.completion' else 'cmpl'}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "policy_version": [min(versions), max(versions)],
    }


def _refuse_stream(stream: bool) -> None:
    if stream:
        raise InvalidData("Streaming comes later.", next="Send stream=false.")


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its text parts joined, as chat templates expect it."""
    content = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": content or ""}
    if any(not isinstance(part, dict) or not isinstance(part.get("text"), str) for part in content):
        raise InvalidData("A message holds a part that is no text.", "The model reads text only.")
    return {**message, "content": "".join(part["text"] for part in content)}
