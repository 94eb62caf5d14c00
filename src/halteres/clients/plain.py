"""One request to a server of our own or beside us: no proxy is asked, nothing is retried, no connection is kept."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from halteres.clients.json_client import refusal_text
from halteres.errors import InvalidConfig, NotReady, ProcessFailed

if TYPE_CHECKING:
    import httpx


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

    if not url.startswith(("http://", "https://")):
        raise InvalidConfig(f"'{url}' is no service address.", next="It begins with http:// or https://.")
    headers = {} if body is None else {"Content-Type": content_type}
    if key:  # the SDK's header is what a service of any make reads, Bearer what our trajectory server does
        headers |= {"X-API-Key": key, "Authorization": f"Bearer {key}"}
    method = "GET" if body is None else "POST"
    try:
        answer = _client().request(method, url, content=body, headers=headers, timeout=deadline_s)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _no_answer(url, error) from error
    if answer.is_success:
        return answer.content
    why = refusal_text(answer.content) or answer.reason_phrase
    raise Refused(f"{url} refused the request ({answer.status_code}).", why, answered=answer.status_code)


@functools.cache
def _client() -> httpx.Client:
    import httpx

    return httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


def _object(url: str, answer: bytes) -> dict[str, Any]:
    try:
        content = json.loads(answer)
    except ValueError as error:
        raise _no_answer(url, error) from error
    return content if isinstance(content, dict) else {}


def _no_answer(url: str, error: Exception) -> NotReady:
    next = "Check the address, and that its server runs."
    return NotReady(f"{url} does not answer.", f"{error}.", next)
