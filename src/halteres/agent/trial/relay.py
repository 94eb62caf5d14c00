"""The relay between a tested environment and its model: the only address that the environment knows.

A port of the loopback with one secret path for each model. Requests are forwarded with bounded retries, for as many
completions as were wanted, and counted (`Traffic`). An environment is told neither a key nor where its requests go.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from halteres.agent.trial import wire
from halteres.agent.trial.outcome import Traffic
from halteres.agent.trial.wire import Body
from halteres.config.environ import LOOPBACK
from halteres.redaction import Redactor

ATTEMPTS = 3
RETRIED = frozenset((0, 408, 409, 429, 500, 502, 503, 504, 520, 522, 524, 529))  # 0: no answer at all
FOR_GOOD = frozenset((401, 402, 403, 404))  # no key, no money, not allowed, no such model: never asked again
NOT_SO = (400, 422)  # the request is at fault; `n` above 1 is to some endpoints
GIVEN_UP_AFTER = 2  # requests in a row, before any was answered
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0
GIVEN_UP = 424  # of our own: clients repeat a 5xx or a 429, and it was repeated already


class Refusal(Exception):
    """The model will not answer this request."""

    def __init__(self, status: int, why: str) -> None:
        self.status, self.why = status, why
        super().__init__(why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where one candidate's requests go, and what they may cost."""

    base_url: str  # OpenAI's form; sglang's /generate lies beside /v1
    model: str
    ends_at: float  # monotonic; no answer is waited for longer
    budget: int  # completions
    max_tokens: int | None = None  # of one of them, at most
    temperature: float | None = None  # instead of the environment's
    key: str | None = field(default=None, repr=False)
    parallel: int = 16  # requests


class Upstream:
    """One candidate's requests on their way to its model."""

    def __init__(self, to: Destination, session: aiohttp.ClientSession) -> None:
        self._to, self._session, self.traffic = to, session, Traffic()
        self._headers = {"Authorization": f"Bearer {to.key}"} if to.key else {}
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
        self.traffic.asked += wire.wanted(body)
        with self.traffic.under_way():
            try:
                if self.traffic.asked > self._to.budget:
                    raise self._spent()
                answer = await self._complete(path, self._mine(body))
            except Refusal as refusal:
                self.traffic.failed(refusal.status, refusal.why)
                raise
        self.traffic.answered(answer)
        return answer

    def _mine(self, body: Body) -> Body:
        """The request as this model gets it: its name, no streaming, the test's limits."""
        kept = {name: value for name, value in body.items() if name != "stream"} | {"model": self._to.model}
        params = kept.get("sampling_params")
        if isinstance(params, Mapping):
            return {**kept, "sampling_params": {**params, **self._limits(params, "max_new_tokens")}}
        limit = "max_completion_tokens" if "max_completion_tokens" in kept else "max_tokens"
        return {**kept, **self._limits(kept, limit)}

    def _limits(self, params: Body, limit: str) -> dict[str, Any]:
        most, temperature = self._to.max_tokens, self._to.temperature
        limited = {} if most is None else {limit: min(params.get(limit) or most, most)}
        return limited if temperature is None else {**limited, "temperature": temperature}

    async def _complete(self, path: str, body: Body) -> Any:
        """All choices. Many endpoints give one whatever `n` says: what is missing is asked for one by one."""
        if path == "generate" or isinstance(body.get("prompt"), list) or wire.wanted(body) == 1:
            return await self._send(path, body)
        answers = [] if self._takes_n is False else await self._at_once(path, body)
        had = len(answers[0]["choices"]) if answers else 0
        missing = range(had, wire.wanted(body))
        self._takes_n = not missing
        more = await asyncio.gather(*(self._send(path, wire.single(body, n)) for n in missing), return_exceptions=True)
        for one in more:
            if isinstance(one, BaseException):
                raise one
        return wire.joined([*answers, *more])

    async def _at_once(self, path: str, body: Body) -> list[Any]:
        """The answer with all choices, or some; none where the endpoint refuses `n`."""
        try:
            return [await self._send(path, body)]
        except Refusal as refusal:
            if refusal.status in NOT_SO and not self._takes_n:
                return []
            raise

    async def _send(self, path: str, body: Body) -> Any:
        """One answer, after bounded retries."""
        if self._closed is not None:
            raise self._closed
        wait_s = FIRST_WAIT_S
        for attempt in range(ATTEMPTS):
            self.traffic.retries += attempt > 0
            status, answer, asked_s = await self._once(path, body)
            if status == 200:
                self._failed_in_a_row = 0
                return answer
            left_s = self._to.ends_at - time.monotonic()
            if status not in RETRIED or attempt == ATTEMPTS - 1 or left_s <= wait_s:
                raise self._given_up(status, answer)
            await asyncio.sleep(min(max(wait_s, asked_s), LONGEST_WAIT_S, left_s))
            wait_s *= 2
        raise AssertionError("there is a last attempt")

    async def _once(self, path: str, body: Body) -> tuple[int, Any, float]:
        """Status, answer (or what went wrong), and the wait that was asked for in s."""
        limit = aiohttp.ClientTimeout(total=max(0.1, self._to.ends_at - time.monotonic()))
        post = self._session.post
        try:
            async with (
                self._slots,
                post(self._url(path), json=body, headers=self._headers, timeout=limit, allow_redirects=False) as reply,
            ):
                text = self._redactor.text((await reply.read()).decode(errors="replace"))
                return *wire.read(path, reply.status, text), wire.seconds(reply.headers.get("Retry-After"))
        except TimeoutError:
            return 0, "It gave no answer in time.", 0.0
        except aiohttp.ClientError as error:
            return 0, self._redactor.text(f"{type(error).__name__}: {error}"), 0.0

    def _given_up(self, status: int, why: Any) -> Refusal:
        self._failed_in_a_row += 1
        told = f"{self._to.model}: the endpoint answered {status}. {why}" if status else f"{self._to.model}: {why}"
        refusal = Refusal(status if 400 <= status < 500 and status not in RETRIED else GIVEN_UP, told)
        hopeless = self.traffic.completions == 0 and self._failed_in_a_row >= GIVEN_UP_AFTER
        if status in FOR_GOOD or (hopeless and status in RETRIED):
            self._closed, self.traffic.over = refusal, "model"
            self.over.set()
        return refusal

    def _spent(self) -> Refusal:
        self.traffic.over = self.traffic.over or "budget"
        self.over.set()
        return Refusal(GIVEN_UP, f"It asked for more than {self._to.budget} completions.")

    def _url(self, path: str) -> str:
        base = self._to.base_url.rstrip("/")
        return f"{base.removesuffix('/v1')}/generate" if path == "generate" else f"{base}/{path.removeprefix('v1/')}"


HOST = LOOPBACK[0]
PATHS = ("v1/chat/completions", "v1/completions", "generate")
LARGEST_REQUEST = 64 * 1024 * 1024  # bytes


class Relay:
    """Doors, each of which leads to one upstream."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session, self._doors, self.url = session, dict[str, Upstream](), ""

    def open(self, to: Destination) -> tuple[str, Upstream]:
        """A new door: its address, in OpenAI's form, and what it leads to."""
        name, upstream = secrets.token_urlsafe(16), Upstream(to, self._session)
        self._doors[name] = upstream
        return f"{self.url}/{name}/v1", upstream

    async def handle(self, request: web.Request) -> web.Response:
        """Forward one request."""
        upstream, path = self._doors.get(request.match_info["door"]), request.match_info["path"]
        if upstream is None or path not in PATHS:
            return _error(404, f"There is no {path} here.")
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise ValueError
        except ValueError:
            return _error(400, "The body is no JSON object.")
        try:
            return web.json_response(await upstream.ask(path, body))
        except Refusal as refusal:
            return _error(refusal.status, refusal.why)


@asynccontextmanager
async def relaying() -> AsyncIterator[Relay]:
    """A relay that answers inside; who hangs up takes back what was asked."""
    async with aiohttp.ClientSession(trust_env=True, connector=aiohttp.TCPConnector(limit=0)) as session:
        relay = Relay(session)
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.router.add_post("/{door}/{path:.+}", relay.handle)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, 0).start()
            relay.url = f"http://{HOST}:{runner.addresses[0][1]}"
            yield relay
        finally:
            await runner.cleanup()


def _error(status: int, why: str) -> web.Response:
    return web.json_response({"error": {"message": why, "code": status}}, status=status)
