"""What calls to the trajectory server have in common.

Owns: how long they are repeated, how bodies are written, what a refusal is called.
Never: opens a connection.
"""

from __future__ import annotations

import gzip
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from halteres.errors import Conflict, HalteresError, InvalidData, NotFound, NotReady

REPLY_S = 60.0
"""How long a reply may take; the server answers in milliseconds, and holds a reply for seconds at most."""

POLL_S = 0.1
"""Pause between questions to a server that does not hold its reply."""

MOST_PROBLEMS = 8
"""Of a refusal that are told."""

LEAST_COMPRESSED = 1024
"""Bytes from which a body is worth compressing."""


class UnknownEnvironment(NotFound):
    """The server knows no environment of this id: it was reset, or another database is behind its URL."""

    code, status = "environment_unknown", 410


class KeyReused(InvalidData):
    """Another body came with this Idempotency-Key before."""

    code, status = "key_reused", 409


class LeaseLost(Conflict):
    """The batch was leased again meanwhile, or is settled: what was made of it must not count twice."""

    code, status = "lease_lost", 409


class NotAllowed(InvalidData):
    """The server asks for a token, and this is not it."""

    code, status = "not_allowed", 401


Refusals = Mapping[int, type[HalteresError]]
"""What a status means, where it is more than "refused"."""

EVERYWHERE: Refusals = {401: NotAllowed, 410: UnknownEnvironment}

_NEXT: Mapping[type[HalteresError], str] = {
    NotAllowed: "Put its token into HALTERES_TRAJECTORY_TOKEN, or into the URL: http://any:TOKEN@HOST:PORT.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long, and how often, a request is repeated while nobody answers, or the answer is a 5xx."""

    total_s: float = 30.0
    first_s: float = 0.05
    longest_s: float = 1.0

    def pauses(self) -> Iterator[float]:
        """Pauses between attempts, in s, each twice the one before; ends when `total_s` is used up."""
        ends, pause = time.monotonic() + self.total_s, self.first_s
        while time.monotonic() + pause < ends:
            yield pause
            pause = min(pause * 2, self.longest_s)


def encode(body: Mapping[str, Any]) -> bytes:
    """JSON. A NaN score goes as Python writes it, for the server to set aside and name; msgspec would say null."""
    scores = body.get("scores")
    if scores and not all(map(math.isfinite, scores)):
        return json.dumps(body).encode()
    return msgspec.json.encode(body)


def compress(body: bytes) -> bytes:
    """For the way to another machine. Level 1: numbers become a third of their size, at a fifth of level 9's cost."""
    return gzip.compress(body, compresslevel=1, mtime=0)


def checked(status: int, answer: bytes, path: str, refusals: Refusals = EVERYWHERE) -> bytes:
    """The answer's body.

    Raises:
        HalteresError: on a 4xx: what `refusals` says of it, else InvalidData.
        NotReady: on a 5xx.
    """
    if status < 400:
        return answer
    route, text = path.partition("?")[0], answer[:2000].decode(errors="replace")
    if status >= 500:
        raise NotReady(f"The trajectory server answered {route} with {status}.", text, "Look at its log.")
    kind = refusals.get(status, InvalidData)
    raise kind(f"The trajectory server refused {route} with {status}.", _sentence(answer) or text, _NEXT.get(kind, ""))


def _sentence(answer: bytes) -> str | None:
    """What a refusal says, of each field in words; None where it is of another form."""
    try:
        detail = msgspec.json.decode(answer, type=_Refusal).detail
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if isinstance(detail, str):
        return detail
    told = detail[:MOST_PROBLEMS]
    said = [f"{'.'.join(map(str, problem.loc[1:])) or 'body'}: {problem.msg.rstrip('.')}" for problem in told]
    return f"{'; '.join(said)}." if said else None


class _Problem(msgspec.Struct, frozen=True):
    loc: list[str | int]  # where: the first says in which part of the request
    msg: str


class _Refusal(msgspec.Struct, frozen=True):
    detail: str | list[_Problem]


def unreachable(url: str, error: Exception) -> NotReady:
    """The error for a server that gave no answer."""
    why = f"{type(error).__name__}: {error}."
    return NotReady(f"The trajectory server at {url} does not answer.", why, "Is it running?")
