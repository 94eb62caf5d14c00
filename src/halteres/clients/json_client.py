"""JSON over keep-alive connections, to a server that may not be ready yet.

aiohttp rather than httpx: an environment keeps hundreds of connections open at once, beside its own work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import msgspec

from halteres.clients.retries import until_ready
from halteres.errors import InvalidData, NotFound, NotReady, ServerError

if TYPE_CHECKING:  # 0.3 s: whoever only describes an environment does without
    import aiohttp

_NOT_READY = (408, 429, 503)  # statuses that mean: wait, and send it again


class Connected:
    """A client with connections: `async with` closes them, and so does `close`."""

    _session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()


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
        self.root, self.ready_within_s = root, ready_within_s
        self._repeatable, self._waits_for_start = repeatable, waits_for_start
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s, self._max_connections = timeout_s, max_connections

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

        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=self._timeout_s, connect=None),
                connector=aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=60),
            )
        url = self.root + path
        try:
            async with self._session.request(method, url, data=payload) as response:
                body = await response.read()
                return read_answer(url, response.status, body, response.headers.get("Retry-After"))
        except aiohttp.ClientConnectorError as error:
            if self._waits_for_start:
                raise NotReady(f"{url} cannot be reached.", f"{error}.") from error
            next = "Start it (again), or see to the address."
            raise NotFound(f"No server answers at {self.root}.", f"{error}.", next) from error
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            is_broken = self._repeatable and not isinstance(error, TimeoutError)
            kind = NotReady if is_broken else ServerError
            raise kind(f"{url} gave no answer.", f"{type(error).__name__}: {error}.") from error


def read_answer(url: str, status: int, body: bytes, retry_after: str | None = None) -> Any:
    """What an answer holds. Raises as `JsonClient.post_when_ready` does."""
    if status == 200:
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise ServerError(f"{url} answered something that is not JSON.", f"{error}.") from error
    what, why = f"{url} answered {status}.", refusal_text(body)
    if status in _NOT_READY:
        try:
            wait_s = max(0.0, float(retry_after or ""))
        except ValueError:  # there is none, or a date (inference servers send numbers)
            wait_s = None
        raise NotReady(what, why, retry_after_s=wait_s)
    raise (InvalidData if status < 500 else ServerError)(what, why)


def refusal_text(body: bytes) -> str:
    """The server's own sentence, where its body has the usual shape; else how the body begins."""
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        answer = None
    return error_text(answer) or body[:300].decode(errors="replace")


def error_text(answer: Any) -> str:
    """What an answer says went wrong; OpenAI's shape wraps it in an object. Nothing where it says nothing."""
    reason = (answer.get("detail") or answer.get("error")) if isinstance(answer, dict) else None
    return str((reason.get("message") if isinstance(reason, dict) else None) or reason or "")
