"""JSON over HTTP: single requests past any proxy, whose answer may be a stream of events, and a
client with connections to a server that may not be ready yet.

Single requests are httpx's. The client is aiohttp's: an environment has hundreds of requests open
at once, for each of which httpx takes 60 times the processor time (256 at once: 8.4 ms, not 0.14).
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote, urlsplit

import msgspec

from halteres.clients.retries import until_ready
from halteres.errors import (
    InvalidConfig,
    InvalidData,
    NotFound,
    NotReady,
    ProcessFailed,
    ServerError,
)
from halteres.logins import ADDRESS_FORM, is_web_address, refused

if TYPE_CHECKING:  # 0.3 s, 0.1 s: whoever only describes an environment does without
    import aiohttp
    import httpx

_NOT_READY = (408, 429, 503)  # statuses that mean: wait, and send it again

# -- single requests: no proxy is asked, nothing is retried, no connection is kept


class Refused(ProcessFailed):
    """The server answered, with an error."""

    @property
    def answered(self) -> int:
        """Its HTTP status."""
        return self.details["answered"]


def get_json(url: str, deadline_s: float, key: str | None = None) -> dict[str, Any]:
    """The JSON object behind a URL; {} where the answer is JSON of another kind.

    Args:
        url: http or https.
        deadline_s: seconds to wait for the connection, and for each part of the answer.
        key: of a server that asks for one.

    Raises:
        Refused: the server answered with an error. NotReady: it gave no usable answer in time.
        InvalidConfig: this is no address of a web server.
    """
    return _object(url, _answer(url, deadline_s, key=key))


def post_json(url: str, body: Any, deadline_s: float, key: str | None = None) -> dict[str, Any]:
    """POST a JSON body; otherwise as `get_json`."""
    return _object(url, _answer(url, deadline_s, json.dumps(body).encode(), key=key))


def post_bytes(url: str, body: bytes, deadline_s: float, *, content_type: str) -> bytes:
    """POST a body of any type for an answer of any type; otherwise as `get_json`."""
    return _answer(url, deadline_s, body, content_type=content_type)


def _answer(
    url: str,
    deadline_s: float,
    body: bytes | None = None,
    *,
    key: str | None = None,
    content_type: str = "application/json",
) -> bytes:
    import httpx

    headers = _headers(url, key)
    if body is not None:
        headers["Content-Type"] = content_type
    method = "GET" if body is None else "POST"
    try:
        answer = _one_request().request(
            method, url, content=body, headers=headers, timeout=deadline_s
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _no_answer(url, error) from error
    if answer.is_success:
        return answer.content
    raise _refused(url, answer)


async def post_for_events(
    url: str, body: Any, deadline_s: float, key: str | None = None
) -> AsyncGenerator[dict[str, Any], None]:
    """POST a JSON body for server-sent events: the JSON object of each, until `[DONE]`. Closed
    before that, it closes the connection.

    Args:
        url: http or https.
        body: as JSON.
        deadline_s: seconds to wait for the connection, and for each part of the answer.
        key: of a server that asks for one.

    Raises:
        Refused: the server answered with an error. NotReady: it gave no usable answer in time, or
            broke off. ProcessFailed: it says in an event that it failed under way.
        InvalidConfig: this is no address of a web server.
    """
    import httpx

    headers = _headers(url, key)
    rest = b""
    try:
        async with (
            httpx.AsyncClient(trust_env=False, timeout=deadline_s) as client,
            client.stream("POST", url, json=body, headers=headers) as answer,
        ):
            if not answer.is_success:
                await answer.aread()
                raise _refused(url, answer)
            # httpx 0.28 would end a line also at a U+2028 within a text
            async for part in answer.aiter_bytes():
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if not line.startswith(_EVENT):
                        continue
                    text = line.removeprefix(_EVENT)
                    if text == b"[DONE]":
                        return
                    yield _event(url, text)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _no_answer(url, error) from error
    raise NotReady(f"{url} broke off its answer.", "The stream has no end.", "Ask again.")


_EVENT = b"data: "


def _event(url: str, text: bytes) -> dict[str, Any]:
    event = _object(url, text)
    if "error" in event:
        raise ProcessFailed(f"{url} failed under way.", error_text(event))
    return event


def _headers(url: str, key: str | None) -> dict[str, str]:
    if not is_web_address(url.partition("?")[0]):
        raise InvalidConfig(f"'{refused(url)}' is no service address.", next=f"It {ADDRESS_FORM}.")
    if not key:
        return {}
    # the SDK's header is what a service of any make reads, Bearer what our trajectory server does
    return {"X-API-Key": key, "Authorization": f"Bearer {key}"}


def _refused(url: str, answer: httpx.Response) -> Refused:
    why = _refusal_text(answer.content) or answer.reason_phrase
    return Refused(
        f"{url} refused the request ({answer.status_code}).", why, answered=answer.status_code
    )


@functools.cache
def _one_request() -> httpx.Client:
    import httpx

    return httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


def _object(url: str, answer: bytes) -> dict[str, Any]:
    try:
        content = json.loads(answer)
    except ValueError as error:
        raise _no_answer(url, error) from error
    return content if isinstance(content, dict) else {}


def _no_answer(url: str, error: Exception) -> NotReady:
    why = str(error) or type(error).__name__
    return NotReady(
        f"{url} does not answer.", f"{why}.", "Check the address, and that its server runs."
    )


# -- a client with connections


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
        root: the address that paths are appended to. A login in it is sent where there is no
            `api_key`, and is not part of the client's `root`, which its errors name.
        api_key: sent as `Authorization: Bearer`; nothing where it is empty.
        timeout_s: of one request; None: the caller sets a deadline.
        ready_within_s: how long a server may refuse connections, or say 503, 429 or 408, before the
            wait is given up.
        repeatable: what is asked for changes nothing at the server: a request whose connection
            broke is sent again.
        waits_for_start: a refused connection is one of a server that starts yet; otherwise it is
            NotFound at once.
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
        self.root, basic = _without_login(root)
        self.ready_within_s = ready_within_s
        self._repeatable, self._waits_for_start = repeatable, waits_for_start
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        elif basic:
            self._headers["Authorization"] = f"Basic {basic}"
        self._timeout_s, self._max_connections = timeout_s, max_connections

    async def post_when_ready(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST until the server is ready; its answer, an object or a list.

        Raises:
            InvalidData: the server refuses the request (4xx but 408 and 429); its details have the
                status, `answered`.
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


def _without_login(root: str) -> tuple[str, str]:
    """An address without its login, and that as HTTP's Basic scheme has it; empty where there is
    none.
    """
    parts = urlsplit(root)
    login, at, host = parts.netloc.rpartition("@")
    if not at:
        return root, ""
    user, _, password = login.partition(":")
    basic = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    return parts._replace(netloc=host).geturl(), basic


def read_answer(url: str, status: int, body: bytes, retry_after: str | None = None) -> Any:
    """What an answer holds. Raises as `JsonClient.post_when_ready` does."""
    if status == 200:
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise ServerError(f"{url} answered something that is not JSON.", f"{error}.") from error
    what, why = f"{url} answered {status}.", _refusal_text(body)
    if status in _NOT_READY:
        try:
            wait_s = max(0.0, float(retry_after or ""))
        except ValueError:  # there is none, or a date (inference servers send numbers)
            wait_s = None
        raise NotReady(what, why, retry_after_s=wait_s)
    if status >= 500:
        raise ServerError(what, why)
    raise InvalidData(what, why, answered=status)


def _refusal_text(body: bytes) -> str:
    """The server's own sentence, where its body has the usual shape; else how the body begins."""
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        answer = None
    return error_text(answer) or body[:300].decode(errors="replace")


def error_text(answer: Any) -> str:
    """What an answer says went wrong; OpenAI's shape wraps it in an object. Nothing where it says
    nothing.
    """
    reason = (answer.get("detail") or answer.get("error")) if isinstance(answer, dict) else None
    return str((reason.get("message") if isinstance(reason, dict) else None) or reason or "")
