"""JSON over keep-alive connections, to a server that may not be ready yet.

Owns: connections that stay open until it is closed; one request and what its answer means; waiting for a server that
cannot be reached, or asks for a wait.
Never: repeats what a server refused; knows what is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from halteres.errors import InvalidData, NotFound, NotReady, ServerError

if TYPE_CHECKING:  # 0.3 s: whoever only describes an environment does without
    import aiohttp


log = logging.getLogger(__name__)


class Connected:
    """A client with connections: `async with` closes them, and so does `close`."""

    _session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()


_NOT_READY = (408, 429, 503)
"""Statuses that mean: wait, and send it again."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0
_TELL_AFTER_S = 3.0


class JsonClient(Connected):
    """A client of one server.

    Args:
        root: the address that paths are appended to.
        api_key: sent as `Authorization: Bearer`; nothing where it is empty.
        timeout_s: of one request; None: the caller sets a deadline.
        ready_within_s: how long a server may refuse connections, or say 503, 429 or 408, before the wait is given up.
        repeatable: what is asked for changes nothing at the server: a request whose connection broke is sent again.
        waits_for_start: a refused connection is one of a server that starts yet; otherwise it is NotFound at once.
    """

    def __init__(
        self,
        root: str,
        *,
        api_key: str = "",
        timeout_s: float | None,
        ready_within_s: float,
        max_connections: int = 512,
        repeatable: bool = False,
        waits_for_start: bool = True,
    ) -> None:
        self.root = root
        self.ready_within_s = ready_within_s
        self._repeatable, self._waits_for_start = repeatable, waits_for_start
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._max_connections = max_connections

    async def post_when_ready(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST until the server is ready; its answer, an object or a list.

        Raises:
            InvalidData: the server refuses the request (4xx but 408 and 429).
            NotReady: the server was not ready within `ready_within_s`.
            ServerError: 5xx, a broken connection, a time-out or an answer of another shape.
        """
        payload = msgspec.json.encode(body)
        answer = await until_ready(lambda: self._send("POST", path, payload), self.ready_within_s)
        if not isinstance(answer, dict | list):
            raise ServerError(f"{self.root}{path} answered {type(answer).__name__}, not an object.")
        return answer

    async def get(self, path: str) -> Any:
        """GET once. Raises as `post_when_ready` does, NotReady at once."""
        return await self._send("GET", path, None)

    async def _send(self, method: str, path: str, payload: bytes | None) -> Any:
        import aiohttp

        url = self.root + path
        try:
            async with self._connected().request(method, url, data=payload) as response:
                body = await response.read()
                return read_answer(url, response.status, body, response.headers.get("Retry-After"))
        except aiohttp.ClientConnectorError as error:
            if self._waits_for_start:
                raise NotReady(f"{url} cannot be reached.", f"{error}.") from error
            raise NotFound(
                f"No server answers at {self.root}.", f"{error}.", "Start it (again), or see to the address."
            ) from error
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            broken = self._repeatable and not isinstance(error, TimeoutError)
            kind = NotReady if broken else ServerError
            raise kind(f"{url} gave no answer.", f"{type(error).__name__}: {error}.") from error

    def _connected(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={"Content-Type": "application/json", **self._headers},
                timeout=aiohttp.ClientTimeout(total=self._timeout_s, connect=None),
                connector=aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=60),
            )
        return self._session


async def until_ready(call: Callable[[], Awaitable[Any]], within_s: float) -> Any:
    """Repeat a call that raises NotReady, with growing waits or those the server asks for, for `within_s` at most."""
    began = time.monotonic()
    deadline, warned = began + within_s, False
    wait = _FIRST_WAIT_S
    while True:
        try:
            return await call()
        except NotReady as error:
            if not warned and time.monotonic() - began > _TELL_AFTER_S:
                warned = True
                log.warning("Waiting, for %g s at most: %s", within_s, error.sentence)
            asked_s = error.details.get("retry_after_s") or 0.0
            if time.monotonic() + max(wait, asked_s) > deadline:
                why = f"It was waited for {within_s:g} s. {error.why}".strip()
                raise NotReady(error.what, why, "Start the server, or look at its log.") from error
        spread = random.uniform(0.8, 1.2)  # noqa: S311 - of many callers; decides nothing
        await asyncio.sleep(max(wait * spread, asked_s))
        wait = min(wait * 1.5, _LONGEST_WAIT_S)


def read_answer(url: str, status: int, body: bytes, retry_after: str | None = None) -> Any:
    """What an answer holds. Raises as `JsonClient.post_when_ready` does."""
    if status == 200:
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise ServerError(f"{url} answered something that is not JSON.", f"{error}.") from error
    what, why = f"{url} answered {status}.", _detail(body)
    if status in _NOT_READY:
        raise NotReady(what, why, retry_after_s=_seconds(retry_after))
    raise (InvalidData if status < 500 else ServerError)(what, why)


def _seconds(retry_after: str | None) -> float | None:
    """A Retry-After header in s; None where there is none, or a date (inference servers send numbers)."""
    try:
        return max(0.0, float(retry_after or ""))
    except ValueError:
        return None


def _detail(body: bytes) -> str:
    """The server's own sentence, where its body has the usual shape."""
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        answer = None
    return error_text(answer) or body[:300].decode(errors="replace")


def error_text(answer: Any) -> str:
    """What an answer says went wrong; OpenAI's shape wraps it in an object. Nothing where it says nothing."""
    reason = (answer.get("detail") or answer.get("error")) if isinstance(answer, dict) else None
    return str((reason.get("message") if isinstance(reason, dict) else None) or reason or "")
