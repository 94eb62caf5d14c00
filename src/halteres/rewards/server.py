"""A reward server: `halteres reward serve DIR...`, `python -m halteres.rewards DIR...`.

Token ids are not taken: each model reads text with its own tokenizer. vLLM's shapes (`/classify`,
`/pooling`) carry raw scores, unless a request says `use_activation: true`: then their sigmoid, as
vLLM does for a model of one label. Requests of a few milliseconds are computed together, in one
thread; the failure of a text reaches no other.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from halteres.access_policy import AccessControl, AccessPolicy
from halteres.errors import (
    HalteresError,
    InvalidData,
    NotFound,
    ServerError,
    UserError,
    as_http,
    boundary,
    unknown,
)
from halteres.loopback import HOST, TooLarge, body_within, while_connected
from halteres.observe.prometheus import MEDIA_TYPE, Metric, text_of
from halteres.rewards.scorer import calibrated, output_of
from halteres.scores import Output, Scorable, Score, best_first
from halteres.tokenizer import flat

if TYPE_CHECKING:
    from halteres.rewards.torch.model import RewardModel

PORT = 8002
MOST_BODY_BYTES = 32 * 1024 * 1024
MOST_ITEMS = 1024  # texts of one request
GATHER_S = 0.003  # how long the first request waits for others to be computed with
# texts computed together, but for one request of more; the model bounds each forward pass
MOST_AT_ONCE = 256
MOST_WAITING = 4096  # texts that may wait; a client that brings more has to come again

T = TypeVar("T")
Text = str | list[dict[str, Any]]
Result = Score | HalteresError


class Busy(HalteresError):
    """Too many texts wait already."""

    code, status = "busy", 429


class ScoreRequest(msgspec.Struct, kw_only=True):
    """POST /score: one of `items`, `texts`, `messages`."""

    # [{prompt?, completion, id?}], read one by one: a bad one fails alone
    items: list[Any] | None = None
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


@dataclass(slots=True, eq=False)
class _Waiting:
    model: str
    texts: Sequence[Scorable]
    results: asyncio.Future[Sequence[Result]]


@dataclass(slots=True)
class ScoringQueue:
    """One thread that scores, and those who wait for it, in the order they came. `work` runs for
    the server's life.
    """

    models: Mapping[str, RewardModel]
    num_waiting: int = 0  # texts, those being computed too
    # What was done since the start: texts, requests refused because of a full queue, tokens,
    # computations.
    scored: int = 0
    failed: int = 0
    refused: int = 0
    tokens: int = 0
    computations: int = 0
    busy_s: float = 0.0
    _requests: deque[_Waiting] = field(default_factory=deque["_Waiting"])
    _work_waits: asyncio.Event = field(default_factory=asyncio.Event)

    async def score(self, model: str, texts: Sequence[Scorable]) -> Sequence[Result]:
        """One raw score per text, in order; in place of one that could not be made, why. Busy where
        too many wait; ServerError where the computation failed, whatever the texts. Cancelled, it
        is computed no further.
        """
        if self.num_waiting and self.num_waiting + len(texts) > MOST_WAITING:
            self.refused += 1
            # a guess
            texts_per_s = 100.0
            if self.busy_s:
                texts_per_s = (self.scored + self.failed) / self.busy_s
            after_s = math.ceil(max(1.0, self.num_waiting / texts_per_s / 2))
            why = f"With {len(texts)} more they are above {MOST_WAITING}."
            fix = f"Send them again in {after_s} s."
            raise Busy(f"{self.num_waiting} texts wait already.", why, fix, retry_after_s=after_s)
        request = _Waiting(model, texts, asyncio.get_running_loop().create_future())
        self._requests.append(request)
        self.num_waiting += len(texts)
        self._work_waits.set()
        try:
            return await request.results
        finally:
            self.num_waiting -= len(texts)
            with suppress(ValueError):  # it is computed already
                self._requests.remove(request)

    async def work(self) -> None:
        """Compute what comes, until cancelled: the oldest requests of one model together."""
        with ThreadPoolExecutor(1, "scoring") as thread:
            while True:
                await self._work_waits.wait()
                await asyncio.sleep(GATHER_S)
                while self._requests:
                    batch, num_texts = [self._requests.popleft()], 0
                    while self._requests and self._requests[0].model == batch[0].model:
                        num_texts += len(batch[-1].texts)
                        if num_texts + len(self._requests[0].texts) > MOST_AT_ONCE:
                            break
                        batch.append(self._requests.popleft())
                    await self._compute(thread, batch)
                self._work_waits.clear()

    async def _compute(self, thread: ThreadPoolExecutor, batch: Sequence[_Waiting]) -> None:
        texts = [text for request in batch for text in request.texts]
        score_each, began = self.models[batch[0].model].score_each, time.monotonic()

        def are_wanted() -> bool:
            """Asked in the thread: whether one of the clients is still there."""
            return not all(request.results.done() for request in batch)

        try:
            with boundary(ServerError, "Scoring"):
                loop = asyncio.get_running_loop()
                results = await loop.run_in_executor(thread, score_each, texts, are_wanted)
        except HalteresError as error:
            for request in batch:
                if not request.results.done():  # the client may be gone
                    request.results.set_exception(error)
            return
        scores = [result for result in results if isinstance(result, Score)]
        self.scored += len(scores)
        self.failed += len(results) - len(scores)
        self.tokens += sum(score.num_tokens for score in scores)
        self.computations += 1
        self.busy_s += time.monotonic() - began
        for request in batch:
            own, results = results[: len(request.texts)], results[len(request.texts) :]
            if not request.results.done():
                request.results.set_result(own)


def create_app(
    models: Mapping[str, RewardModel],
    *,
    address: str = HOST,
    key: str | None = None,
    allowed_hosts: Sequence[str] = (),
) -> Starlette:
    """The app over loaded models, of which the first answers where a request names none; its
    lifespan owns the queue.

    By its IP `address` and `allowed_hosts` it may be called; requests must carry the `key`, if any.
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

    routes = [
        Route("/score", server.score, methods=["POST"]),
        Route("/rank", server.rank, methods=["POST"]),
        Route("/classify", server.vllm, methods=["POST"]),
        Route("/pooling", server.vllm, methods=["POST"]),
        Route("/health", server.health),
        Route("/v1/models", server.list_models),
        Route("/metrics", server.metrics),
    ]
    return Starlette(
        routes=[*routes, Mount("/models/{model}", routes=routes)],
        lifespan=lifespan,
        middleware=[Middleware(AccessControl, policy=AccessPolicy.of(address, key, allowed_hosts))],
        exception_handlers={
            HalteresError: on_error,
            HTTPException: on_missing,
            # the client hung up: nobody reads it
            ClientDisconnect: lambda *_: Response(status_code=400),
        },
    )


class RewardServer:
    """Loaded models behind HTTP."""

    def __init__(self, models: Mapping[str, RewardModel]) -> None:
        self.models, self.queue = models, ScoringQueue(models)

    async def score(self, request: Request) -> Response:
        """Each text by itself; one that cannot be scored has `error` in place of `score`."""
        body = await body_of(request, ScoreRequest)
        name, model = self._model(request, body.model)
        given = [each for each in (body.items, body.texts, body.messages) if each is not None]
        if len(given) != 1:
            raise InvalidData(
                f"{len(given)} of items, texts and messages are there.", next="Send one of them."
            )
        output, items = output_of(model, body.output), _counted(given[0])
        if body.items is None:
            if body.messages is not None and isinstance(items[0], dict):
                # one chat
                items = [items]
            items = list[Any]({"completion": text} for text in items)
        answers = list[dict[str, Any]]()
        for index, (item, result) in enumerate(
            zip(items, await self._results(request, name, items), strict=True)
        ):
            answer: dict[str, Any] = {"index": index}
            if isinstance(item, dict) and "id" in item:
                answer["id"] = item["id"]
            if isinstance(result, HalteresError):
                answers.append(answer | _failure(result))
                continue
            score = calibrated(model, result, output)
            answer |= {
                "score": score.value,
                "raw": result.value,
                "out_of_range": score.out_of_range,
            }
            answer |= {"tokens": result.num_tokens, "truncated": result.truncated}
            answer |= {"ended_with_eos": result.ended_with_eos, "converted": result.converted}
            if result.parts:
                answer["parts"] = dict(result.parts)
            answers.append(answer)
        return json_answer(
            {"model": name, "output": output, "items": answers, "notes": model.notes}
        )

    async def rank(self, request: Request) -> Response:
        """Completions of one prompt, best first; what cannot be scored is in no order."""
        body = await body_of(request, RankRequest)
        name, model = self._model(request, body.model)
        output = output_of(model, body.output)
        items = _counted(
            [{"prompt": body.prompt, "completion": completion} for completion in body.completions]
        )
        results = await self._results(request, name, items)
        values = [result.value if isinstance(result, Score) else None for result in results]
        order = [index for index in best_first(values) if values[index] is not None]
        best = 0.0
        if order:
            best = values[order[0]] or 0.0
        temperature = 1.0
        if model.calibration:
            temperature = model.calibration.temperature
        ties = [
            [index for index in order if values[index] == value]
            for value in {values[i]: None for i in order}
        ]
        answer = {
            "model": name,
            "output": output,
            "order": order[: body.top_n or None],
            "best": order[0] if order else None,
            "scores": [
                calibrated(model, one, output).value if isinstance(one, Score) else None
                for one in results
            ],
            "ties": [places for places in ties if len(places) > 1],
            "probability": [
                None if value is None else _sigmoid((value - best) / temperature)
                for value in values
            ],
            "errors": [
                {"index": i, **_failure(one)}
                for i, one in enumerate(results)
                if not isinstance(one, Score)
            ],
        }
        return json_answer(answer)

    async def vllm(self, request: Request) -> Response:
        """vLLM's shapes of /classify and /pooling: `probs`, or `data`, holds the one score."""
        body = await body_of(request, ForeignRequest, strict=False)
        name, _ = self._model(request, body.model)
        if (body.input is None) == (body.messages is None):
            raise InvalidData(
                "Neither input nor messages is there, or both are.", next="Send one of them."
            )
        if body.messages is not None:
            texts = [body.messages]
        else:
            texts = body.input
        if isinstance(texts, str):
            texts = [texts]
        else:
            texts = texts or []
        classifies = request.url.path.endswith("/classify")
        rows, num_tokens = list[dict[str, Any]](), 0
        items = _counted([{"completion": text} for text in texts])
        for index, result in enumerate(await self._results(request, name, items)):
            if isinstance(result, HalteresError):
                raise result
            if body.use_activation:
                x = _sigmoid(result.value)
            else:
                x = result.value
            row: dict[str, Any] = {"index": index, "object": "pooling", "data": [x]}
            if classifies:
                row = {"index": index, "label": "LABEL_0", "probs": [x], "num_classes": 1}
            rows.append(row)
            num_tokens += result.num_tokens
        answer = {
            "id": f"{'classify' if classifies else 'pool'}-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": name,
            "data": rows,
            "usage": {
                "prompt_tokens": num_tokens,
                "total_tokens": num_tokens,
                "completion_tokens": 0,
            },
        }
        return json_answer(answer)

    async def health(self, request: Request) -> Response:
        """What is served, and how busy it is."""
        return json_answer(
            {"status": "ok", "models": self._cards(), "waiting_texts": self.queue.num_waiting}
        )

    async def list_models(self, request: Request) -> Response:
        """OpenAI's shape."""
        return json_answer({"object": "list", "data": self._cards()})

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        done, one = self.queue, Metric.one
        outcomes = {"scored": done.scored, "failed": done.failed}
        figures = [
            Metric("texts_total", "counter", "Texts by what became of them.", outcomes, "outcome"),
            one("tokens_total", "counter", "Tokens of scored texts.", done.tokens),
            one(
                "refused_requests_total",
                "counter",
                "Requests refused because too many texts waited.",
                done.refused,
            ),
            one(
                "computations_total",
                "counter",
                "Computations of gathered requests.",
                done.computations,
            ),
            one("compute_seconds_total", "counter", "Seconds spent computing.", done.busy_s),
            one("waiting_texts", "gauge", "Texts that wait or are computed.", done.num_waiting),
        ]
        return Response(text_of(figures, "halteres_reward_"), media_type=MEDIA_TYPE)

    async def _results(self, request: Request, name: str, items: Sequence[Any]) -> list[Result]:
        """One per item; those that cannot be read already have their error. ClientDisconnect where
        the client leaves: what is not computed yet is dropped."""
        texts = [_scorable(item) for item in items]
        readable = [text for text in texts if isinstance(text, Scorable)]
        results: Sequence[Result] = []
        if readable:
            results = await while_connected(request, self.queue.score(name, readable))
        scored = iter(results)
        return [next(scored) if isinstance(text, Scorable) else text for text in texts]

    def _model(self, request: Request, name: str | None) -> tuple[str, RewardModel]:
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


async def body_of(
    request: Request, kind: type[T], *, strict: bool = True, most_bytes: int = MOST_BODY_BYTES
) -> T:
    """The body. An unknown field of ours is refused, with the nearest name: a misspelt one would
    change the answer.
    """
    body = await body_within(request, most_bytes, "Send fewer texts at once.")
    try:
        content = msgspec.json.decode(body)
        if strict:
            _check_fields(content, kind)
        return msgspec.convert(content, kind)
    except (
        msgspec.DecodeError,
        msgspec.ValidationError,
        UnicodeDecodeError,
        RecursionError,
    ) as error:
        raise InvalidData("The body cannot be read.", f"{error}.") from error


def _check_fields(content: Any, kind: type[Any]) -> None:
    known = [one.name for one in msgspec.structs.fields(kind)]
    for name in content if isinstance(content, dict) else ():
        if name not in known:
            raise unknown(InvalidData, "field", str(name), known)


def _counted(texts: list[Any]) -> list[Any]:
    """As many texts as may be."""
    if not texts:
        raise InvalidData("There is nothing to score.")
    if len(texts) > MOST_ITEMS:
        raise TooLarge(
            f"{len(texts)} texts in one request.",
            f"It may hold {MOST_ITEMS}.",
            "Send several requests.",
        )
    return texts


def _scorable(item: Any) -> Scorable | UserError:
    try:
        _check_fields(item, Item)
        read = msgspec.convert(item, Item)
    except InvalidData as error:
        return error
    except (msgspec.ValidationError, RecursionError) as error:
        return InvalidData("The item cannot be read.", f"{error}.")
    if read.prompt is not None and isinstance(read.prompt, str) != isinstance(read.completion, str):
        return InvalidData(
            "Prompt and completion are not of one form.", "One is text, the other messages."
        )
    if [] in (read.prompt, read.completion):
        return InvalidData("The item cannot be read.", "A chat without a message is no text.")
    try:
        prompt, completion = _flat(read.prompt), _flat(read.completion)
    except InvalidData as error:
        return error
    return Scorable(
        completion=completion or "",
        prompt=prompt,
        tools=tuple(read.tools or ()),
        template_arguments=read.chat_template_kwargs or {},
    )


def _flat(text: Text | None) -> Text | None:
    if text is None or isinstance(text, str):
        return text
    return [flat(message) for message in text]


def _failure(error: HalteresError) -> dict[str, str]:
    return {"error": error.sentence, "code": error.code}


def _sigmoid(x: float) -> float:
    if x >= 0:
        return 1 / (1 + math.exp(-x))
    return math.exp(x) / (1 + math.exp(x))


def json_answer(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer with this content as JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def on_error(request: Request, error: Any) -> Response:  # a HalteresError
    """An error of ours as HTTP."""
    after = error.details.get("retry_after_s")
    headers = {}
    if after is not None:
        headers = {"Retry-After": str(after)}
    if error.status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is not waited for
    return json_answer(as_http(error), error.status, headers)


def on_missing(request: Request, error: Any) -> Response:  # an HTTPException
    """An error of the web framework's, such as an unknown route."""
    return json_answer({"detail": error.detail}, error.status_code, error.headers)
