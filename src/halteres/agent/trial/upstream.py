"""One model behind one address: asked with bounded retries, for as many completions as were wanted.

Owns: the key (in this process's memory alone), retries, what is given up for good, the choices that are missing from
endpoints that ignore `n`.
Never: hands on an answer as it came: the key is struck out of every one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from halteres.agent.trial import wire
from halteres.agent.trial.traffic import Traffic
from halteres.agent.trial.wire import Body
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
