"""A reward server: `halteres reward serve DIR...`, `python -m halteres.rewards DIR...`.

Owns: routes and bodies (`/score`, `/rank`; `/classify` and `/pooling` in vLLM's shapes), names of the models.
Never: computes (`scoring_queue` does); takes token ids: each model reads text with its own tokenizer.

vLLM's shapes carry raw scores, unless a request says `use_activation: true`: then their sigmoid, as vLLM does for a
model of one label.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from halteres.access_policy import AccessControl, AccessPolicy
from halteres.errors import HalteresError, InvalidData, NotFound, UserError, as_http, unknown
from halteres.loopback import HOST, body_within
from halteres.observe.prometheus import MEDIA_TYPE, Metric, text_of
from halteres.rewards.scorer import Model, calibrated, output_of
from halteres.rewards.scoring_queue import Result, ScoringQueue
from halteres.scores import Output, Scorable, Score, best_first

PORT = 8002

MOST_BODY_BYTES = 32 * 1024 * 1024
MOST_ITEMS = 1024
"""Texts of one request."""

T = TypeVar("T")
Text = str | list[dict[str, Any]]


class TooLarge(UserError):
    """A body of more bytes, or texts, than are read."""

    code, status = "too_large", 413


class ScoreRequest(msgspec.Struct, kw_only=True):
    """POST /score: one of `items`, `texts`, `messages`."""

    items: list[Any] | None = None  # [{prompt?, completion, id?}], read one by one: a bad one fails alone
    texts: list[Any] | None = None
    messages: list[Any] | None = None  # a chat, or a list of chats
    output: Output = "standardised"
    model: str | None = None


class Item(msgspec.Struct, kw_only=True):
    """What is scored."""

    completion: Text
    prompt: Text | None = None
    id: str | int | None = None
    tools: list[dict[str, Any]] | None = None  # for the chat template, as in preference data
    chat_template_kwargs: dict[str, Any] | None = None


class RankRequest(msgspec.Struct, kw_only=True):
    """POST /rank: completions of one prompt."""

    completions: list[Any]
    prompt: Text | None = None
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    output: Output = "standardised"
    model: str | None = None


class ForeignRequest(msgspec.Struct, kw_only=True):
    """POST /classify and /pooling as vLLM reads them; its other fields are not looked at."""

    model: str | None = None
    input: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    use_activation: bool | None = None


def create_app(
    models: Mapping[str, Model], *, address: str = HOST, key: str | None = None, allowed_hosts: Sequence[str] = ()
) -> Starlette:
    """The app over loaded models; its lifespan owns the queue.

    Args:
        models: by name; the first answers where a request names none.
        address: the IP address it is reached at, which decides by what names it may be called.
        key: what requests must carry; None: nothing is asked for.
        allowed_hosts: further names of this machine.
    """
    server = RewardServer(models)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        working = asyncio.create_task(server.queue.work(), name="scoring")
        try:
            yield
        finally:
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working

    return Starlette(
        routes=server.routes,
        lifespan=lifespan,
        middleware=[Middleware(AccessControl, policy=AccessPolicy.of(address, key, allowed_hosts))],
        exception_handlers={HalteresError: _on_error, HTTPException: _on_missing, ClientDisconnect: _on_gone},
    )


@dataclass(slots=True)
class RewardServer:
    """Loaded models behind HTTP."""

    models: Mapping[str, Model]
    queue: ScoringQueue

    def __init__(self, models: Mapping[str, Model]) -> None:
        self.models, self.queue = models, ScoringQueue(models)

    @property
    def routes(self) -> list[BaseRoute]:
        """What is answered; below /models/NAME, for the model of that name."""
        routes = [
            Route("/score", self.score, methods=["POST"]),
            Route("/rank", self.rank, methods=["POST"]),
            Route("/classify", self.classify, methods=["POST"]),
            Route("/pooling", self.pooling, methods=["POST"]),
            Route("/health", self.health),
            Route("/v1/models", self.list_models),
            Route("/metrics", self.metrics),
        ]
        return [*routes, Mount("/models/{model}", routes=routes)]

    async def score(self, request: Request) -> Response:
        """Each text by itself; one that cannot be scored has `error` in place of `score`."""
        asked = await _body(request, ScoreRequest)
        name, model = self._model(request, asked.model)
        output, items = output_of(model, asked.output), _items(asked)
        results = await self._results(name, [_scorable(item) for item in items])
        answers = [
            {"index": index, **_id_of(item), **_answer(model, result, output)}
            for index, (item, result) in enumerate(zip(items, results, strict=True))
        ]
        return _json({"model": name, "output": output, "items": answers, "notes": model.notes})

    async def rank(self, request: Request) -> Response:
        """Completions of one prompt, best first; what cannot be scored is in no order."""
        asked = await _body(request, RankRequest)
        name, model = self._model(request, asked.model)
        output = output_of(model, asked.output)
        _check_number(asked.completions)
        items = [{"prompt": asked.prompt, "completion": completion} for completion in asked.completions]
        results = await self._results(name, [_scorable(item) for item in items])
        scores = {index: result for index, result in enumerate(results) if isinstance(result, Score)}
        values = [result.value if isinstance(result, Score) else None for result in results]
        order = best_first(values)[: len(scores)]
        temperature = model.calibration.temperature if model.calibration else 1.0
        best = scores[order[0]].value if order else 0.0
        answer = {
            "model": name,
            "output": output,
            "order": order[: asked.top_n] if asked.top_n else order,
            "best": order[0] if order else None,
            "scores": [calibrated(model, scores[i], output).value if i in scores else None for i in range(len(items))],
            "ties": _ties(scores, order),
            "probability": [
                _sigmoid((scores[i].value - best) / temperature) if i in scores else None for i in range(len(items))
            ],
            "errors": [
                {"index": i, **_failure(one)} for i, one in enumerate(results) if isinstance(one, HalteresError)
            ],
        }
        return _json(answer)

    async def classify(self, request: Request) -> Response:
        """vLLM's shape: `probs` holds the one score."""
        return await self._foreign(
            request, "classify", lambda index, x: {"index": index, "label": "LABEL_0", "probs": [x], "num_classes": 1}
        )

    async def pooling(self, request: Request) -> Response:
        """vLLM's shape: `data` holds the one score."""
        return await self._foreign(request, "pool", lambda index, x: {"index": index, "object": "pooling", "data": [x]})

    async def health(self, request: Request) -> Response:
        """What is served, and how busy it is."""
        return _json({"status": "ok", "models": self._cards(), "waiting_texts": self.queue.num_waiting})

    async def list_models(self, request: Request) -> Response:
        """OpenAI's shape."""
        return _json({"object": "list", "data": self._cards()})

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        return Response(text_of(_figures(self.queue), "halteres_reward_"), media_type=MEDIA_TYPE)

    async def _foreign(
        self, request: Request, kind: Literal["classify", "pool"], row: Callable[[int, float], dict[str, Any]]
    ) -> Response:
        asked = await _body(request, ForeignRequest, strict=False)
        name, _ = self._model(request, asked.model)
        results = await self._results(name, [_scorable({"completion": text}) for text in _inputs(asked)])
        scores = list[Score]()
        for result in results:
            if isinstance(result, HalteresError):
                raise result
            scores.append(result)
        activation = _sigmoid if asked.use_activation else float
        num_tokens = sum(score.num_tokens for score in scores)
        answer = {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": name,
            "data": [row(index, activation(score.value)) for index, score in enumerate(scores)],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0},
        }
        return _json(answer)

    async def _results(self, name: str, texts: Sequence[Scorable | UserError]) -> list[Result]:
        """One per text; those that are none already have their error."""
        readable = [text for text in texts if isinstance(text, Scorable)]
        scored = iter(await self.queue.score(name, readable) if readable else [])
        return [next(scored) if isinstance(text, Scorable) else text for text in texts]

    def _model(self, request: Request, name: str | None) -> tuple[str, Model]:
        name = name or str(request.path_params.get("model") or next(iter(self.models)))
        if name not in self.models:
            raise unknown(NotFound, "model", name, self.models)
        return name, self.models[name]

    def _cards(self) -> list[dict[str, Any]]:
        return [
            {
                "id": name,
                "object": "model",
                "owned_by": "halteres",
                "root": str(model.folder) if model.folder else None,
                "digest": model.digest,
                "calibrated": model.calibration is not None,
                "notes": model.notes,
            }
            for name, model in self.models.items()
        ]


async def _body(request: Request, kind: type[T], *, strict: bool = True) -> T:
    """The body. An unknown field of ours is refused, with the nearest name: a misspelt one would change the answer."""
    too_large = TooLarge(f"The body has more than {MOST_BODY_BYTES} bytes.", next="Send fewer texts at once.")
    body = await body_within(request, MOST_BODY_BYTES, too_large)
    try:
        content = msgspec.json.decode(body)
        if strict:
            _check_fields(content, kind)
        return msgspec.convert(content, kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidData("The body cannot be read.", f"{error}.") from error


def _check_fields(content: Any, kind: type[Any]) -> None:
    known = [one.name for one in msgspec.structs.fields(kind)]
    for name in content if isinstance(content, dict) else ():
        if name not in known:
            raise unknown(InvalidData, "field", str(name), known)


def _items(asked: ScoreRequest) -> list[Any]:
    given = [each for each in (asked.items, asked.texts, asked.messages) if each is not None]
    if len(given) != 1:
        raise InvalidData(f"{len(given)} of items, texts and messages are there.", next="Send one of them.")
    _check_number(given[0])
    if asked.items is not None:
        return asked.items
    chats = [given[0]] if asked.messages and isinstance(asked.messages[0], dict) else given[0]
    return [{"completion": text} for text in chats]


def _check_number(texts: Sequence[Any]) -> None:
    if not texts:
        raise InvalidData("There is nothing to score.")
    if len(texts) > MOST_ITEMS:
        raise TooLarge(f"{len(texts)} texts in one request.", f"It may hold {MOST_ITEMS}.", "Send several requests.")


def _scorable(item: Any) -> Scorable | UserError:
    try:
        _check_fields(item, Item)
        read = msgspec.convert(item, Item)
    except InvalidData as error:
        return error
    except (msgspec.ValidationError, RecursionError) as error:
        return InvalidData("The item cannot be read.", f"{error}.")
    if read.prompt is not None and isinstance(read.prompt, str) != isinstance(read.completion, str):
        return InvalidData("Prompt and completion are not of one form.", "One is text, the other messages.")
    if [] in (read.prompt, read.completion):
        return InvalidData("The item cannot be read.", "A chat without a message is no text.")
    return Scorable(
        completion=read.completion,
        prompt=read.prompt,
        tools=tuple(read.tools or ()),
        template_arguments=read.chat_template_kwargs or {},
    )


def _inputs(asked: ForeignRequest) -> Sequence[Text]:
    if (asked.input is None) == (asked.messages is None):
        raise InvalidData("Neither input nor messages is there, or both are.", next="Send one of them.")
    texts = [asked.messages] if asked.messages is not None else asked.input
    texts = [texts] if isinstance(texts, str) else texts or []
    _check_number(texts)
    return texts


def _id_of(item: Any) -> dict[str, Any]:
    return {"id": item["id"]} if isinstance(item, dict) and "id" in item else {}


def _answer(model: Model, result: Result, output: Output) -> dict[str, Any]:
    if isinstance(result, HalteresError):
        return _failure(result)
    score = calibrated(model, result, output)
    return {
        "score": score.value,
        "raw": result.value,
        "out_of_range": score.out_of_range,
        "tokens": result.num_tokens,
        "truncated": result.truncated,
        "ended_with_eos": result.ended_with_eos,
        "converted": result.converted,
        **({"parts": dict(result.parts)} if result.parts else {}),
    }


def _failure(error: HalteresError) -> dict[str, str]:
    return {"error": error.sentence, "code": error.code}


def _ties(scores: Mapping[int, Score], order: Sequence[int]) -> list[list[int]]:
    """Places of equal scores, in order."""
    by_value: dict[float, list[int]] = {}
    for index in order:
        by_value.setdefault(scores[index].value, []).append(index)
    return [places for places in by_value.values() if len(places) > 1]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _figures(queue: ScoringQueue) -> list[Metric]:
    done, one = queue.figures, Metric.one
    return [
        Metric(
            "texts_total",
            "counter",
            "Texts by what became of them.",
            {"scored": done.scored, "failed": done.failed},
            "outcome",
        ),
        one("tokens_total", "counter", "Tokens of scored texts.", done.tokens),
        one("refused_requests_total", "counter", "Requests refused because too many texts waited.", done.refused),
        one("computations_total", "counter", "Computations of gathered requests.", done.computations),
        one("compute_seconds_total", "counter", "Seconds spent computing.", done.busy_s),
        one("waiting_texts", "gauge", "Texts that wait or are computed.", queue.num_waiting),
    ]


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def _on_error(request: Request, error: Any) -> Response:  # a HalteresError
    after = error.details.get("retry_after_s")
    headers = {} if after is None else {"Retry-After": str(after)}
    return _json(as_http(error), error.status, headers)


def _on_missing(request: Request, error: Any) -> Response:  # an HTTPException
    return _json({"detail": error.detail}, error.status_code, error.headers)


def _on_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # the client hung up: nobody reads it
