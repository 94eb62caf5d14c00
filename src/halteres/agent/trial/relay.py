"""The relay between a tested environment and its model: the only address that the environment
knows.

A port of the loopback with one secret path for each model. Requests, in OpenAI's form or sglang's
/generate, are forwarded with bounded retries, for as many completions as were wanted, and counted
(`Traffic`). An environment is given neither a key nor where its requests go.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec
from aiohttp import web

from halteres.config.environ import LOOPBACK
from halteres.redaction import Redactor

Body = Mapping[str, Any]

ATTEMPTS = 3
# 0: no answer at all
RETRIED = frozenset((0, 408, 409, 429, 500, 502, 503, 504, 520, 522, 524, 529))
# no key, no money, not allowed, no such model: never asked again
FOR_GOOD = frozenset((401, 402, 403, 404))
NOT_SO = (400, 422)  # the request is at fault; `n` above 1 is to some endpoints
GIVEN_UP_AFTER = 2  # requests in a row, before any was answered
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0
GIVEN_UP = 424  # of our own: clients repeat a 5xx or a 429, and it was repeated already
LONGEST_ERROR = 300  # characters
LARGEST_REQUEST = 64 * 1024 * 1024  # bytes
PATHS = ("v1/chat/completions", "v1/completions", "generate")


class Refusal(Exception):
    """The model will not answer this request."""

    def __init__(self, status: int, why: str) -> None:
        self.status, self.why = status, why
        super().__init__(why)


class Traffic(msgspec.Struct, kw_only=True):
    """Counts of one model, so far."""

    requested: int = 0  # completions that the environment asked for
    completions: int = 0  # that came
    tokens: int = 0  # of them
    truncated: int = 0  # cut off by the limit of tokens
    last_error: str = ""
    # why nothing more is sent: the model fails for good, or enough was spent
    over: Literal["", "model", "budget"] = ""
    in_flight: int = 0
    busy_s: float = 0.0  # during which anything was in flight
    busy_since: float = 0.0  # monotonic

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """One request of the environment's, inside."""
        if self.in_flight == 0:
            self.busy_since = time.monotonic()
        self.in_flight += 1
        try:
            yield
        except Refusal as refusal:
            self.last_error = refusal.why
            raise
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self.busy_s += time.monotonic() - self.busy_since

    def count(self, answer: Any) -> None:
        """Take in a model's answer."""
        self.completions += len(_completions(answer))
        self.tokens += _num_tokens(answer)
        for one in _completions(answer):
            reason = _meta(one).get("finish_reason")
            if not reason and isinstance(one, Mapping):
                reason = one.get("finish_reason")
            if isinstance(reason, Mapping):
                reason = reason.get("type")
            self.truncated += reason == "length"

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all answers, over the time in which any was waited for."""
        if self.busy_s > 0 and self.tokens:
            return self.tokens / self.busy_s
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where one model's requests go, and what they may cost."""

    base_url: str  # OpenAI's form; sglang's /generate lies beside /v1
    model: str
    ends_at: float  # monotonic; no answer is waited for longer
    budget: int  # completions
    max_tokens: int | None = None  # of one of them, at most
    temperature: float | None = None  # instead of the environment's
    key: str | None = field(default=None, repr=False)
    parallel: int = 16  # requests


class Upstream:
    """One environment's requests on their way to its model."""

    def __init__(self, to: Destination, session: aiohttp.ClientSession) -> None:
        self._to, self._session, self.traffic = to, session, Traffic()
        if to.key:
            self._headers = {"Authorization": f"Bearer {to.key}"}
        else:
            self._headers = {}
        self._redactor = Redactor([to.key] if to.key else [])
        self.over = asyncio.Event()  # nothing more is sent; `traffic.over` says why
        self._slots = asyncio.Semaphore(to.parallel)
        self._takes_n: bool | None = None  # None: not known yet
        self._closed: Refusal | None = None
        self._failed_in_a_row = 0

    async def ask(self, path: str, body: Body) -> Any:
        """The answer to one request of the environment's.

        Raises:
            Refusal: the budget is used up, or the model gave no answer.
        """
        self.traffic.requested += _num_requested(body)
        with self.traffic.under_way():
            if self.traffic.requested > self._to.budget:
                self._end(self.traffic.over or "budget")
                raise Refusal(GIVEN_UP, f"It asked for more than {self._to.budget} completions.")
            answer = await self._complete(path, self._limited(body))
        self.traffic.count(answer)
        return answer

    def _end(self, why: Literal["model", "budget"]) -> None:
        self.traffic.over = why
        self.over.set()

    def _limited(self, body: Body) -> Body:
        """The request as this model gets it: its name, no streaming, the test's limits."""
        own = {name: value for name, value in body.items() if name != "stream"} | {
            "model": self._to.model
        }
        params, limit = own.get("sampling_params"), "max_new_tokens"
        is_generate = isinstance(params, Mapping)
        if not is_generate:
            params, limit = own, "max_tokens"
            if "max_completion_tokens" in own:
                limit = "max_completion_tokens"
        limits: dict[str, Any] = {}
        if self._to.max_tokens is not None:
            limits[limit] = min(params.get(limit) or self._to.max_tokens, self._to.max_tokens)
        if self._to.temperature is not None:
            limits["temperature"] = self._to.temperature
        if is_generate:
            return {**own, "sampling_params": {**params, **limits}}
        return {**own, **limits}

    async def _complete(self, path: str, body: Body) -> Any:
        """All choices. Many endpoints give one whatever `n` says: what is missing is asked for one
        by one.
        """
        number = _num_requested(body)
        if path == "generate" or isinstance(body.get("prompt"), list) or number == 1:
            return await self._send(path, body)
        answers: list[Any] = []
        if self._takes_n is not False:
            try:
                answers = [await self._send(path, body)]
            except Refusal as refusal:
                if refusal.status not in NOT_SO or self._takes_n:
                    raise
        num_given = 0
        if answers:
            num_given = len(answers[0]["choices"])
        self._takes_n = num_given >= number
        bodies: list[dict[str, Any]] = []
        for place in range(num_given, number):
            bodies.append({**body, "n": 1})
            if isinstance(body.get("seed"), int):
                bodies[-1]["seed"] = body["seed"] + place
        more = await asyncio.gather(
            *(self._send(path, one) for one in bodies), return_exceptions=True
        )
        for one in more:
            if isinstance(one, BaseException):
                raise one
        answers += more
        choices = [choice for answer in answers for choice in answer["choices"]]
        usage = {
            **(answers[0].get("usage") or {}),
            "completion_tokens": sum(map(_num_tokens, answers)),
        }
        numbered = [{**choice, "index": number} for number, choice in enumerate(choices)]
        return {**answers[0], "choices": numbered, "usage": usage}

    async def _send(self, path: str, body: Body) -> Any:
        """One answer, after bounded retries."""
        if self._closed is not None:
            raise self._closed
        wait_s = FIRST_WAIT_S
        for attempt in range(ATTEMPTS):
            status, answer, retry_after_s = await self._once(path, body)
            if status == 200:
                self._failed_in_a_row = 0
                return answer
            left_s = self._to.ends_at - time.monotonic()
            if status not in RETRIED or attempt == ATTEMPTS - 1 or left_s <= wait_s:
                raise self._given_up(status, answer)
            await asyncio.sleep(min(max(wait_s, retry_after_s), LONGEST_WAIT_S, left_s))
            wait_s *= 2
        raise AssertionError("there is a last attempt")

    async def _once(self, path: str, body: Body) -> tuple[int, Any, float]:
        """Status, answer (or what went wrong), and the wait that was asked for in s."""
        base = self._to.base_url.rstrip("/")
        if path == "generate":
            url = f"{base.removesuffix('/v1')}/generate"
        else:
            url = f"{base}/{path.removeprefix('v1/')}"
        limit = aiohttp.ClientTimeout(total=max(0.1, self._to.ends_at - time.monotonic()))
        try:
            async with (
                self._slots,
                self._session.post(
                    url, json=body, headers=self._headers, timeout=limit, allow_redirects=False
                ) as reply,
            ):
                text = self._redactor.text((await reply.read()).decode(errors="replace"))
                # seconds, or a date, which is not heeded
                retry_after = reply.headers.get("Retry-After", "")
                wait_s = 0.0
                if re.fullmatch(r"\d{1,9}(\.\d+)?", retry_after):
                    wait_s = float(retry_after)
                return *_read(path, reply.status, text), wait_s
        except TimeoutError:
            return 0, "It gave no answer in time.", 0.0
        except aiohttp.ClientError as error:
            return 0, self._redactor.text(f"{type(error).__name__}: {error}"), 0.0

    def _given_up(self, status: int, why: Any) -> Refusal:
        self._failed_in_a_row += 1
        if status:
            what = f"{self._to.model}: the endpoint answered {status}. {why}"
        else:
            what = f"{self._to.model}: {why}"
        told = GIVEN_UP
        if 400 <= status < 500 and status not in RETRIED:
            told = status
        refusal = Refusal(told, what)
        hopeless = self.traffic.completions == 0 and self._failed_in_a_row >= GIVEN_UP_AFTER
        if status in FOR_GOOD or (hopeless and status in RETRIED):
            self._closed = refusal
            self._end("model")
        return refusal


class Relay:
    """Secret paths, each of which leads to one upstream."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session, self._upstreams, self.url = session, dict[str, Upstream](), ""

    def open(self, to: Destination) -> tuple[str, Upstream]:
        """A new path: its address, in OpenAI's form, and what it leads to."""
        name, upstream = secrets.token_urlsafe(16), Upstream(to, self._session)
        self._upstreams[name] = upstream
        return f"{self.url}/{name}/v1", upstream

    async def handle(self, request: web.Request) -> web.Response:
        """Forward one request."""
        upstream, path = self._upstreams.get(request.match_info["name"]), request.match_info["path"]
        try:
            if upstream is None or path not in PATHS:
                raise Refusal(404, f"There is no {path} here.")
            body = await request.json()
            if not isinstance(body, dict):
                raise ValueError
            return web.json_response(await upstream.ask(path, body))
        except ValueError:
            refusal = Refusal(400, "The body is no JSON object.")
        except Refusal as error:
            refusal = error
        answer = {"error": {"message": refusal.why, "code": refusal.status}}
        return web.json_response(answer, status=refusal.status)


@asynccontextmanager
async def relaying() -> AsyncIterator[Relay]:
    """A relay that answers inside; who hangs up takes back what was asked."""
    async with aiohttp.ClientSession(
        trust_env=True, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        relay = Relay(session)
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.router.add_post("/{name}/{path:.+}", relay.handle)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        try:
            await web.TCPSite(runner, LOOPBACK[0], 0).start()
            relay.url = f"http://{LOOPBACK[0]}:{runner.addresses[0][1]}"
            yield relay
        finally:
            await runner.cleanup()


def _num_requested(body: Body) -> int:
    """Completions that one request asks for."""
    params, prompt = body.get("sampling_params") or body, body.get("prompt")
    each = 1
    if isinstance(params, Mapping) and isinstance(params.get("n"), int):
        each = params["n"]
    several = 1
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        several = len(prompt)
    return max(1, each) * several


def _read(path: str, status: int, text: str) -> tuple[int, Any]:
    """Status and content. Some endpoints send an error, or nothing usable, with status 200: that is
    a 502.
    """
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    choices = None
    if isinstance(answer, dict):
        choices = answer.get("choices")
    has_choices = (
        isinstance(choices, list)
        and bool(choices)
        and all(isinstance(one, dict) for one in choices)
    )
    is_usable = has_choices
    if path == "generate":
        is_usable = isinstance(answer, list | dict)
    if status == 200 and is_usable:
        return 200, answer
    error = None
    if isinstance(answer, dict):
        error = answer.get("error") or answer.get("detail")
    code, message = None, error
    if isinstance(error, dict):
        code, message = error.get("code"), error.get("message")
    if status == 200:
        status = 502
        if isinstance(code, int) and 400 <= code < 600:
            status = code
    return status, " ".join(str(message or text)[:LONGEST_ERROR].split())


def _completions(answer: Any) -> list[Any]:
    if isinstance(answer, list):
        return answer
    choices = answer.get("choices")
    if isinstance(choices, list):
        return choices
    return [answer]


def _num_tokens(answer: Any) -> int:
    """Of all completions of an answer, as far as it says so."""
    usage = None
    if isinstance(answer, Mapping):
        usage = answer.get("usage")
    counted = [*map(_meta, _completions(answer)), usage or {}]
    return sum(one.get("completion_tokens") or 0 for one in counted)


def _meta(completion: Any) -> Mapping[str, Any]:
    if isinstance(completion, Mapping):
        return completion.get("meta_info") or {}
    return {}
