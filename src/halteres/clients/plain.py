"""One request to a server of our own or beside us, without a proxy and without a client to keep.

Owns: GET and POST over urllib, of JSON or of bytes, their deadline, what can go wrong as two errors.
Never: asks a proxy (a server on 127.0.0.1 is not behind one, whatever `http_proxy` says), retries, keeps a connection.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar

from halteres.errors import InvalidConfig, NotReady, ProcessFailed

T = TypeVar("T")

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Refused(ProcessFailed):
    """The server answered, with an error; `answered` is its HTTP status, `told` the JSON object of its answer."""

    def __init__(self, what: str, why: str = "", next: str = "", **details: Any) -> None:
        super().__init__(what, why, next, **details)
        self.answered: int = details.get("answered", 500)
        self.told: dict[str, Any] = details.get("told", {})


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
    return _object(_answer(_request(url, key=key), deadline_s, json.loads))


def post_json(url: str, body: Any, deadline_s: float, key: str | None = None) -> dict[str, Any]:
    """POST a JSON body; otherwise as `get_json`."""
    return _object(_answer(_request(url, json.dumps(body).encode(), key), deadline_s, json.loads))


def post_bytes(url: str, body: bytes, deadline_s: float, *, content_type: str) -> bytes:
    """POST a body of any type for an answer of any type; otherwise as `get_json`."""
    return _answer(_request(url, body, content_type=content_type), deadline_s, bytes)


def _request(
    url: str, body: bytes | None = None, key: str | None = None, content_type: str = "application/json"
) -> urllib.request.Request:
    if not url.startswith(("http://", "https://")):
        raise InvalidConfig(f"'{url}' is no service address.", next="It begins with http:// or https://.")
    request = urllib.request.Request(url, data=body)  # noqa: S310 - scheme checked
    if body is not None:
        request.add_header("Content-Type", content_type)
    if key:  # the SDK's header is what a service of any make reads, Bearer what our trajectory server does
        request.add_unredirected_header("X-API-Key", key)
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    return request


def _answer(request: urllib.request.Request, deadline_s: float, read: Callable[[bytes], T]) -> T:
    try:
        with _direct.open(request, timeout=deadline_s) as answer:
            return read(answer.read())
    except urllib.error.HTTPError as error:
        raise _refused(request, error) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NotReady(
            f"{request.full_url} does not answer.", f"{error}.", "Check the address, and that its server runs."
        ) from error


def _object(told: Any) -> dict[str, Any]:
    return told if isinstance(told, dict) else {}


def _refused(request: urllib.request.Request, error: urllib.error.HTTPError) -> Refused:
    with error:
        try:
            text = error.read().decode(errors="replace").strip()
        except (OSError, http.client.HTTPException):
            text = ""
    try:
        told = json.loads(text)
    except ValueError:
        told = None
    told = _object(told)
    why = str(told.get("detail") or text or error.reason)
    return Refused(f"{request.full_url} refused the request ({error.code}).", why, answered=error.code, told=told)
