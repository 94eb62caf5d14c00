"""The table of inference: which paths answer in whose shape.

Owns: the paths, with and without a run before them, and the hosted service's prefixes.
Never: answers.
Source: public documentation of the hosted service for /oai/api/v1 and /anthropic/api/v1.

    /v1/…, /generate, …        weights by `model`; without one, the base model
    /runs/RUN/…                the same; without a name that means others, the newest policy of RUN
    /oai/api/v1/…              as /v1/…
    /anthropic/api/v1/…        as /v1/messages
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from halteres.errors import HalteresError
from halteres.service.answers import anthropic_refusal, openai_refusal, refused
from halteres.service.inference.answering import Inference
from halteres.service.routes.inference.calls import Handler, Refuse, endpoint
from halteres.service.routes.inference.chat import ChatRoute
from halteres.service.routes.inference.completions import CompletionRoute
from halteres.service.routes.inference.generate import GenerateRoute
from halteres.service.routes.inference.messages import MessageRoutes
from halteres.service.routes.inference.names import NameRoutes

HEALTH = ("/health", "/health_generate", "/ping", "/v1/health")
MODEL_INFO = ("/get_model_info", "/model_info")


class InferenceRoutes:
    """What environments, agents and people call."""

    def __init__(self, inference: Inference) -> None:
        self._completions, self._chat = CompletionRoute(inference), ChatRoute(inference)
        self._generate, self._messages = GenerateRoute(inference), MessageRoutes(inference)
        self._names = NameRoutes(inference)

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
            _post("/generate", self._generate, refused),
            *self._openai(),
            *self._anthropic(),
            _post("/tokenize", names.tokenize, openai_refusal),
            _post("/detokenize", names.detokenize, openai_refusal),
            *(Route(path, names.health) for path in HEALTH),
            *(Route(path, names.model_info) for path in MODEL_INFO),
            Route("/version", names.version),
        ]

    def _openai(self) -> list[BaseRoute]:
        return [
            _post("/v1/completions", self._completions, openai_refusal),
            _post("/v1/chat/completions", self._chat, openai_refusal),
            Route("/v1/models", _refusing(self._names.models)),
            Route("/v1/models/{model:path}", _refusing(self._names.model)),
        ]

    def _anthropic(self) -> list[BaseRoute]:
        return [
            _post("/v1/messages", self._messages.create, anthropic_refusal),
            _post("/v1/messages/count_tokens", self._messages.count, anthropic_refusal),
        ]


def _post(path: str, handler: Handler, refuse: Refuse) -> Route:
    return Route(path, endpoint(handler, refuse), methods=["POST"])


def _refusing(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """A route whose errors are told in OpenAI's shape."""

    async def answered(request: Request) -> Response:
        try:
            return await handler(request)
        except HalteresError as error:
            return openai_refusal(error)

    return answered
