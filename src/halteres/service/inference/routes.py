"""The routes of inference: which paths answer in whose shape, and what there is to sample from.

Source: public documentation of the hosted service for /oai/api/v1 and /anthropic/api/v1; OpenAI's API reference
(models); vLLM 0.11 (/health, /ping, /version, /tokenize, /detokenize); sglang 0.5 (/health_generate, /get_model_info).

    /v1/…, /generate, …        weights by `model`; without one, the base model
    /runs/RUN/…                the same; without a name that means others, the newest policy of RUN
    /oai/api/v1/…              as /v1/…
    /anthropic/api/v1/…        as /v1/messages
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from halteres.errors import HalteresError, InvalidData, NotFound, NotReady, as_http, shortened
from halteres.service.answers import answer, anthropic_error, openai_error, with_status
from halteres.service.inference.answering import Inference
from halteres.service.inference.anthropic_messages import count_tokens, messages
from halteres.service.inference.bodies import read
from halteres.service.inference.chats import Chat
from halteres.service.inference.generate import generate
from halteres.service.inference.http import Shape, endpoint
from halteres.service.inference.openai_chat import chat_completions
from halteres.service.inference.openai_completions import completions
from halteres.service.inference.requests import SCHEME, Call, Listed, Prompt
from halteres.service.sampling.samples import packed
from halteres.service.tenancy.tenants import tenant_of


class Tokenize(msgspec.Struct, kw_only=True):
    """POST tokenize: a prompt or a chat."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class Detokenize(msgspec.Struct, kw_only=True):
    """POST detokenize."""

    tokens: list[int]
    model: str | None = None


class NameRoutes:
    """The handlers."""

    def __init__(self, inference: Inference) -> None:
        self._inference, self._tokenizer = inference, inference.tokenizer

    async def models(self, request: Request) -> Response:
        """GET v1/models; below a run, the run and the base model."""
        return answer({"object": "list", "data": [self._shaped(one) for one in self._listed(request)]})

    async def model(self, request: Request) -> Response:
        """GET v1/models/{id}."""
        asked: str = request.path_params["model"]
        if asked.startswith("tinker:/") and not asked.startswith(SCHEME):
            asked = asked.replace("tinker:/", SCHEME, 1)  # proxies and clients join slashes
        for one in self._listed(request):
            if one.name == asked:
                return answer(self._shaped(one))
        run = request.path_params.get("run_id")
        if run is not None and SCHEME not in asked and not self._inference.base.answers_to(asked):
            raise NotFound(f"There is no model '{shortened(asked)}' under the run '{run}'.", param="model")
        weights = self._inference.addresses.find(asked, run, tenant_of(request))
        return answer(self._shaped(Listed(name=asked, version=weights.version, base=weights.snapshot is None)))

    def _listed(self, request: Request) -> list[Listed]:
        run, tenant = request.path_params.get("run_id"), tenant_of(request)
        addresses = self._inference.addresses
        if run is None:
            return addresses.all(tenant)
        policy = addresses.find(None, run, tenant)
        return [Listed(name=run, version=policy.version), Listed(name=addresses.base.name, version=0, base=True)]

    def _shaped(self, one: Listed) -> dict[str, Any]:
        base = self._inference.base.name
        return {
            "id": one.name,
            "object": "model",
            "created": int(one.created_at),
            "owned_by": "halteres",
            "root": base if one.base else one.name,
            "parent": None if one.base else base,
            "policy_version": one.version,
        }

    async def health(self, request: Request) -> Response:
        """GET health: 200 once the engine is there, and below a run, once the run has a policy."""
        if not self._inference.ready:
            raise NotReady("The engine is starting.", next="Ask again in a moment.")
        weights = self._inference.addresses.find(None, request.path_params.get("run_id"), tenant_of(request))
        return answer({"status": "ok", "policy_version": weights.version})

    async def model_info(self, request: Request) -> Response:
        """GET get_model_info."""
        weights = self._inference.addresses.find(None, request.path_params.get("run_id"), tenant_of(request))
        folder = str(self._inference.base.folder)
        return answer(
            {
                "model_path": folder,
                "tokenizer_path": folder,
                "served_model_name": weights.name,
                "is_generation": True,
                "weight_version": str(weights.version),
                "max_model_len": await self._inference.context_length(),
            }
        )

    async def version(self, _: Request) -> Response:
        """GET version."""
        return answer({"version": version("halteres")})

    async def tokenize(self, call: Call) -> Response:
        """POST tokenize: a prompt or a chat."""
        asked = await self._inference.read(call, lambda body: read(body, Tokenize))
        self._inference.addresses.find(asked.model, call.run, call.tenant)
        tokens = (await self._prompt(call, asked)).tokens
        found: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": await self._inference.context_length(),
            "tokens": tokens,
        }
        if asked.return_token_strs:
            found["token_strs"] = await self._inference.read(
                call, lambda _: [self._tokenizer.token(token) for token in tokens]
            )
        return answer(found)

    async def _prompt(self, call: Call, asked: Tokenize) -> Prompt:
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidData("The request names no text, or two.", next="Send prompt or messages.")
        if asked.messages is None:
            return (await self._inference.prompts(call, [asked.prompt or ""], asked.add_special_tokens))[0]
        chat = Chat(
            messages=asked.messages,
            tools=asked.tools or (),
            template_kwargs=asked.chat_template_kwargs or {},
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
        )
        return await self._inference.chat_prompt(call, lambda: chat, asked.add_special_tokens)

    async def detokenize(self, call: Call) -> Response:
        """POST detokenize."""
        return answer({"prompt": await self._inference.read(call, self._text)})

    def _text(self, body: bytes) -> str:
        tokens = read(body, Detokenize).tokens
        packed(tokens)
        strange = next((token for token in tokens if not self._tokenizer.knows(token)), None)
        if strange is not None:
            raise InvalidData(f"`tokens` holds {strange}, which is no token of this model.", param="tokens")
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


HEALTH = ("/health", "/health_generate", "/ping", "/v1/health")
MODEL_INFO = ("/get_model_info", "/model_info")


class InferenceRoutes:
    """What environments, agents and people call."""

    def __init__(self, inference: Inference) -> None:
        self._inference, self._names = inference, NameRoutes(inference)

    def table(self) -> list[BaseRoute]:
        """The routes."""
        return [
            Mount("/runs/{run_id}", routes=self._all()),
            Mount("/oai/api", routes=self._openai()),
            Mount("/anthropic/api", routes=self._anthropic()),
            *self._all(),
        ]

    def _all(self) -> list[BaseRoute]:
        names = self._names
        return [
            self._post("/generate", generate, as_http),
            *self._openai(),
            *self._anthropic(),
            Route("/tokenize", endpoint(names.tokenize, openai_error), methods=["POST"]),
            Route("/detokenize", endpoint(names.detokenize, openai_error), methods=["POST"]),
            *(Route(path, names.health) for path in HEALTH),
            *(Route(path, names.model_info) for path in MODEL_INFO),
            Route("/version", names.version),
        ]

    def _openai(self) -> list[BaseRoute]:
        return [
            self._post("/v1/completions", completions, openai_error),
            self._post("/v1/chat/completions", chat_completions, openai_error),
            Route("/v1/models", _refusing(self._names.models)),
            Route("/v1/models/{model:path}", _refusing(self._names.model)),
        ]

    def _anthropic(self) -> list[BaseRoute]:
        return [
            self._post("/v1/messages", messages, anthropic_error),
            self._post("/v1/messages/count_tokens", count_tokens, anthropic_error),
        ]

    def _post(
        self, path: str, handler: Callable[[Inference, Call], Coroutine[Any, Any, Response]], shape: Shape
    ) -> Route:
        return Route(path, endpoint(partial(handler, self._inference), shape), methods=["POST"])


def _refusing(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """A route whose errors are found in OpenAI's shape."""

    async def answered(request: Request) -> Response:
        try:
            return await handler(request)
        except HalteresError as error:
            return with_status(openai_error(error), error)

    return answered
