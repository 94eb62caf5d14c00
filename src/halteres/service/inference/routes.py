"""The routes of inference: which paths answer in whose shape, and what there is to sample from.

Source: public documentation of the hosted service for /oai/api/v1 and /anthropic/api/v1; OpenAI's
API reference (models); vLLM 0.11 (/health, /ping, /version, /tokenize, /detokenize); sglang 0.5
(/health_generate, /get_model_info).

    /v1/…, /inference/v1/generate, /generate, …
                               weights by `model`; without one, the base model
    /runs/RUN/…                the same; without a name that means others, the newest policy of RUN
    /g/SESSION/…               the same; always the policy of the gateway session, which captures it
    /oai/api/v1/…              as /v1/…
    /anthropic/api/v1/…        as /v1/messages
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount

from halteres.errors import HalteresError, InvalidData, NotFound, NotReady, shortened
from halteres.service.http import answer, refusal_at, route, tenant_of
from halteres.service.inference.answering import SCHEME, Inference
from halteres.service.inference.anthropic_messages import count_tokens, messages
from halteres.service.inference.fields import TOKENIZE, read
from halteres.service.inference.generate import generate
from halteres.service.inference.http import endpoint, run_of
from halteres.service.inference.openai import chat_completions, completions
from halteres.service.inference.requests import Call, Chat, Weights
from halteres.service.inference.responses import responses
from halteres.service.inference.tokens import generate_tokens
from halteres.service.sampling.samples import packed


class InferenceRoutes:
    """What environments, agents and people call."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    def table(self) -> list[BaseRoute]:
        """The routes."""
        openai = [
            self._post("/v1/completions", completions),
            self._post("/v1/chat/completions", chat_completions),
            self._post("/v1/responses", responses),
            route("/v1/models", self._models),
            route("/v1/models/{model:path}", self._model),
        ]
        anthropic = [
            self._post("/v1/messages", messages),
            self._post("/v1/messages/count_tokens", count_tokens),
        ]
        everything = [
            self._post("/generate", generate),
            self._post("/inference/v1/generate", generate_tokens),
            *openai,
            *anthropic,
            self._post("/tokenize", tokenize),
            self._post("/detokenize", detokenize),
            *(
                route(path, self._health)
                for path in ("/health", "/health_generate", "/ping", "/v1/health")
            ),
            *(route(path, self._model_info) for path in ("/get_model_info", "/model_info")),
            route("/version", self._version),
        ]
        return [
            Mount("/runs/{run_id}", routes=everything),
            Mount("/g/{session_id}", routes=everything),
            Mount("/oai/api", routes=openai),
            Mount("/anthropic/api", routes=anthropic),
            *everything,
        ]

    def _post(
        self, path: str, handler: Callable[[Inference, Call], Coroutine[Any, Any, Response]]
    ) -> BaseRoute:
        return route(path, endpoint(partial(handler, self._inference)), "POST")

    async def _models(self, request: Request) -> Any:
        return {"object": "list", "data": list((await self._listed(request)).values())}

    async def _model(self, request: Request) -> Any:
        model: str = request.path_params["model"]
        if model.startswith("tinker:/") and not model.startswith(SCHEME):
            model = model.replace("tinker:/", SCHEME, 1)  # proxies and clients join slashes
        listed = await self._listed(request)
        if model in listed:
            return listed[model]
        run = run_of(request)
        if run is not None and SCHEME not in model and not self._inference.is_base(model):
            raise NotFound(
                f"There is no model '{shortened(model)}' under the run '{run}'.", param="model"
            )
        weights = self._inference.weights(model, run, tenant_of(request))
        return self._card(
            model,
            weights.version,
            is_base=weights.snapshot is None,
            context=self._inference.known_context,
        )

    async def _listed(self, request: Request) -> dict[str, Any]:
        run, names = run_of(request), self._inference.base_names
        if run is None:
            found = self._inference.models(tenant_of(request))
        else:
            found = {run: (self._policy(request).version, 0.0)}
            found |= dict.fromkeys(names, (0, 0.0))
        # a client may list models to see whether a service is there: it waits for no engine
        context = self._inference.known_context
        return {
            name: self._card(name, *facts, is_base=name in names, context=context)
            for name, facts in found.items()
        }

    def _policy(self, request: Request) -> Weights:
        """The newest of the run in the URL; without one, the base model."""
        return self._inference.weights(None, run_of(request), tenant_of(request))

    def _card(
        self,
        name: str,
        version: int,
        created_at: float = 0.0,
        *,
        is_base: bool,
        context: int | None,
    ) -> dict[str, Any]:
        base = self._inference.base.name
        return {
            "id": name,
            "object": "model",
            "created": int(created_at),
            "owned_by": "halteres",
            "root": base if is_base else name,
            "parent": None if is_base else base,
            "max_model_len": context,
            "policy_version": version,
        }

    async def _health(self, request: Request) -> Any:
        """200 once the engine is there, and below a run, once the run has a policy."""
        try:
            if not self._inference.ready:
                raise NotReady("The engine is starting.", next="Ask again in a moment.")
            return {"status": "ok", "policy_version": self._policy(request).version}
        except HalteresError as error:
            # whoever probes is nobody's client: /v1/health has the detail beside
            return refusal_at(request.url.path, error)

    async def _model_info(self, request: Request) -> Any:
        weights, folder = self._policy(request), str(self._inference.base.folder)
        return {
            "model_path": folder,
            "tokenizer_path": folder,
            "served_model_name": weights.name,
            "is_generation": True,
            "weight_version": str(weights.version),
            "max_model_len": await self._inference.context_length(),
        }

    async def _version(self, _: Request) -> Any:
        return {"version": version("halteres")}


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


async def tokenize(inference: Inference, call: Call) -> Response:
    """POST tokenize: a prompt or a chat."""
    body = await inference.read(call, Tokenize, TOKENIZE)
    inference.weights(body.model, call.run, call.tenant)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidData("The request names no text, or two.", next="Send prompt or messages.")
    if body.messages is None:
        [prompt] = await inference.prompts(
            call, lambda: [body.prompt or ""], body.add_special_tokens
        )
    else:
        chat = Chat(
            messages=body.messages,
            tools=body.tools or (),
            template_kwargs=body.chat_template_kwargs or {},
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        prompt = await inference.chat_prompt(call, lambda: chat, body.add_special_tokens)
    tokens = prompt.tokens
    found = {
        "count": len(tokens),
        "max_model_len": await inference.context_length(),
        "tokens": tokens,
    }
    if body.return_token_strs:
        texts = await inference.in_thread(
            call, lambda: list(map(inference.tokenizer.token, tokens)), len(call.body)
        )
        return answer({**found, "token_strs": texts})
    return answer(found)


class Detokenize(msgspec.Struct, kw_only=True):
    """POST detokenize."""

    tokens: list[int]
    model: str | None = None


async def detokenize(inference: Inference, call: Call) -> Response:
    """POST detokenize."""

    def text() -> str:
        tokens = read(call.body, Detokenize, TOKENIZE).tokens
        packed(tokens)
        strange = next((token for token in tokens if not inference.tokenizer.knows(token)), None)
        if strange is not None:
            raise InvalidData(
                f"`tokens` holds {strange}, which is no token of this model.", param="tokens"
            )
        return inference.tokenizer.decode(tokens, skip_special_tokens=False)

    return answer({"prompt": await inference.in_thread(call, text, len(call.body))})
