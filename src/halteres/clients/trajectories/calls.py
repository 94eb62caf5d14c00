"""What calls to the trajectory server have in common: how bodies are written, what a refusal is
called; and a client of plain calls.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from halteres.clients.retries import Retries
from halteres.clients.trajectories.address import Address
from halteres.errors import Conflict, HalteresError, InvalidConfig, InvalidData, NotFound, NotReady

if TYPE_CHECKING:
    import httpx

# how long a reply may take; the server answers in milliseconds, and holds a reply for seconds at
# most
REPLY_S = 60.0
POLL_S = 0.1  # pause between questions to a server that does not hold its reply
MOST_PROBLEMS = 8  # of a refusal that are shown
LEAST_COMPRESSED = 1024  # bytes from which a body is worth compressing
RETRIES = Retries.for_seconds(30.0)  # while nobody answers, or the answer is a 5xx


class UnknownEnvironment(NotFound):
    """The server knows no environment of this id: it was reset, or another database is behind its
    URL.
    """

    code, status = "environment_unknown", 410


class KeyReused(InvalidData):
    """Another body came with this Idempotency-Key before."""

    code, status = "key_reused", 409


class LeaseLost(Conflict):
    """The batch was leased again meanwhile, or is settled: what was made of it must not count
    twice.
    """

    code, status = "lease_lost", 409


class NotAllowed(InvalidData):
    """The server asks for a token, and this is not it."""

    code, status = "not_allowed", 401


Refusals = Mapping[int, type[HalteresError]]  # what a status means, where it is more than "refused"
EVERYWHERE: Refusals = {401: NotAllowed, 410: UnknownEnvironment}

_NEXT: Mapping[type[HalteresError], str] = {
    NotAllowed: (
        "Put its token into HALTERES_TRAJECTORY_TOKEN, or into the URL: http://any:TOKEN@HOST:PORT."
    ),
}


def encode(body: Mapping[str, Any]) -> bytes:
    """JSON. A NaN score goes as Python writes it, for the server to set aside and name; msgspec
    would say null.
    """
    scores = body.get("scores")
    if scores and not all(map(math.isfinite, scores)):
        return json.dumps(body).encode()
    return msgspec.json.encode(body)


def compress(body: bytes) -> bytes:
    """For the way to another machine. Level 1: numbers become a third of their size, at a fifth of
    level 9's cost.
    """
    return gzip.compress(body, compresslevel=1, mtime=0)


class _Problem(msgspec.Struct, frozen=True):
    loc: list[str | int]  # where: the first says in which part of the request
    msg: str


class _Refusal(msgspec.Struct, frozen=True):
    detail: str | list[_Problem]


def checked(status: int, answer: bytes, path: str, refusals: Refusals) -> bytes:
    """The answer's body.

    Raises:
        HalteresError: on a 4xx: what `refusals` says of it, else InvalidData.
        NotReady: on a 5xx.
    """
    if status < 400:
        return answer
    route, text = path.partition("?")[0], answer[:2000].decode(errors="replace")
    if status >= 500:
        raise NotReady(
            f"The trajectory server answered {route} with {status}.", text, "Look at its log."
        )
    try:
        detail = msgspec.json.decode(answer, type=_Refusal).detail
    except (msgspec.DecodeError, UnicodeDecodeError):
        detail = ""
    if isinstance(detail, list):  # of each field in words
        problems = [
            f"{'.'.join(map(str, each.loc[1:])) or 'body'}: {each.msg.rstrip('.')}"
            for each in detail
        ]
        detail = f"{'; '.join(problems[:MOST_PROBLEMS])}." if problems else ""
    kind = refusals.get(status, InvalidData)
    raise kind(
        f"The trajectory server refused {route} with {status}.", detail or text, _NEXT.get(kind, "")
    )


def unreachable(url: str, error: Exception) -> NotReady:
    """The error for a server that gave no answer."""
    why = f"{type(error).__name__}: {error}."
    return NotReady(f"The trajectory server at {url} does not answer.", why, "Is it running?")


class PlainClient:
    """Plain calls, without an event loop: one connection, one caller at a time, any thread."""

    refusals: ClassVar[Refusals] = EVERYWHERE

    def __init__(self, url: str, retries: Retries = RETRIES) -> None:
        self.at, self._retries = Address.of(url), retries
        self._connection: httpx.Client | None = None

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> bytes:
        """What is answered; sent again while the server is away, as long as `retries` say and it is
        not over.

        Raises:
            NotReady: it stayed away.
            HalteresError: it refuses the request, see `checked`.
        """
        data = None if body is None else encode(body)
        return self._retries.call_blocking(
            lambda: checked(*self.ask_once(method, path, data), path, self.refusals),
            is_over=is_over,
        )

    def ask_once(self, method: str, path: str, data: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of an answer. NotReady: there is none."""
        import ssl

        import httpx  # 0.1 s: whoever imports this room for a name does without

        try:
            if self._connection is None:
                # The system's authorities, as the environments' client has them; a context takes 20
                # ms.
                trusted = (
                    ssl.create_default_context() if self.at.url.startswith("https:") else False
                )
                headers = {
                    **self.at.headers,
                    "Accept-Encoding": "identity" if self.at.is_here else "gzip",
                }
                self._connection = httpx.Client(
                    headers=headers, timeout=REPLY_S, trust_env=False, verify=trusted
                )
            answer = self._connection.request(method, self.at.url + path, content=data)
            return answer.status_code, answer.content
        except (httpx.InvalidURL, httpx.LocalProtocolError, ValueError) as error:
            # A path or a token with a character that has no place in a request.
            what = f"Nothing can be sent to {self.at.url}."
            raise InvalidConfig(what, f"{error}.", "Correct the URL or the token.") from error
        except httpx.HTTPError as error:
            self.close()
            raise unreachable(self.at.url, error) from error

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
