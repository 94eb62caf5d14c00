"""What all routes share: bodies, answers, errors as HTTP, and the guard before them.

    /v1/…, /runs/RUN/v1/…, /g/SESSION/v1/…, /oai/api/…   errors in OpenAI's shape; /inference/…,
                                                  /tokenize and /detokenize too
    …/v1/messages…, /anthropic/api/v1/…           in Anthropic's
    everything else                               {"detail": …}

    a service without keys    Host, and Origin where there is one, name this machine; everybody is
                              the tenant "local"
    a service with keys       X-API-Key, or Authorization: Bearer; an Origin names this machine, or
                              the server asked

    a gateway session         its id in the path, whatever the key; or its key, under its run's
                              path. That key opens nothing else

    POST /runs/RUN/…, and /g/SESSION/… of a run's session
                        below 400: answered    408, 410, 429, 499, 503: come again, or gone: neither
                        other: refused

Where no route answered (there is none, it has a bug, the guard refused), OpenAI's and Anthropic's
errors have the detail too. Source: OpenAI's and Anthropic's API references, errors.
"""

from __future__ import annotations

import datetime
import logging
import re
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from halteres.errors import (
    HalteresError,
    InvalidData,
    NotFound,
    ServerError,
    UserError,
    as_http,
    shortened,
    size_text,
)
from halteres.loopback import FOREIGN, Foreign, TooLarge, body_within, is_foreign, is_local
from halteres.service.context_window import ContextLengthExceeded
from halteres.service.keys import LOCAL, NOBODY, SCOPE_KEY, Keys, Tenant
from halteres.service.limits import Allowances, overloaded
from halteres.service.wire.bodies import JSON, SMALL_BYTES, read

T = TypeVar("T")

HEALTH = "/api/v1/healthz"

SIGNED = "/halteres/v1/files"
"""Routes below this ask for no key; every one of them checks a signature
(`service.routes.checkpoints`).
"""

BURST_S = 5.0  # so many seconds' worth of requests may come at once
MOST_RUNS = 256  # of which counts are kept; anybody may name a run

log = logging.getLogger(__name__)


def tenant_of(request: Request) -> Tenant:
    """Whom a request comes from."""
    return request.scope.get(SCOPE_KEY, LOCAL)


_SDK = re.compile(r"AsyncTinker/Python (\d{1,6})\.(\d{1,6})\.(\d{1,6})")


def sdk_before(request: Request, *version: int) -> bool:
    """Whether an SDK older than this sent the request; no other client is."""
    agent = _SDK.match(request.headers.get("user-agent", ""))
    return agent is not None and tuple(map(int, agent.groups())) < version


def route(path: str, handler: Callable[[Request], Awaitable[Any]], method: str = "GET") -> Route:
    """A route whose handler returns a response, or what is answered as JSON; None is 204."""

    async def endpoint(request: Request) -> Response:
        found = await handler(request)
        if isinstance(found, Response):
            return found
        return Response(status_code=204) if found is None else answer(found)

    return Route(path, endpoint, methods=[method])


def answer(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type=JSON)


async def body_of(request: Request, most: int = SMALL_BYTES) -> bytes:
    """The request's body; TooLarge where it has more bytes than these, which no client sends."""
    return await body_within(request, most)


async def read_body(request: Request, kind: type[T]) -> T:
    """A small body of the Tinker API."""
    return read(await body_of(request), kind)


def timestamp(at: float) -> str:
    """A time with its zone, as the SDK insists.

    >>> timestamp(0.0)
    '1970-01-01T00:00:00+00:00'
    """
    return datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat()


def texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Metadata as the SDK insists: nothing but texts.

    >>> texts({"run": "r1", "seed": 3})
    {'run': 'r1', 'seed': '3'}
    """
    return {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for name, value in metadata.items()
    }


def page_of(items: Sequence[T], request: Request) -> tuple[Sequence[T], dict[str, int]]:
    """The part of a list that limit and offset name, and its cursor."""
    given = [request.query_params.get("limit", "20"), request.query_params.get("offset", "0")]
    if not all(re.fullmatch(r"[0-9]{1,18}", text) for text in given):
        raise InvalidData("limit and offset are numbers, and not negative.")
    limit, offset = map(int, given)
    return items[offset : offset + limit], {
        "offset": offset,
        "limit": limit,
        "total_count": len(items),
    }


# Errors

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def openai_error(error: HalteresError) -> dict[str, Any]:
    """The body of an error in OpenAI's shape."""
    param = error.details.get("param")
    code = "model_not_found" if error.status == 404 and param == "model" else error.code
    kind = _error_type(error, "service_unavailable_error")
    return {"error": {"message": error.sentence, "type": kind, "param": param, "code": code}}


def anthropic_error(error: HalteresError) -> dict[str, Any]:
    """The body of an error in Anthropic's shape."""
    message = error.sentence
    if isinstance(error, ContextLengthExceeded):
        message = error.for_anthropic
    return {
        "type": "error",
        "error": {"type": _error_type(error, "overloaded_error"), "message": message},
    }


def _error_type(error: HalteresError, unavailable: str) -> str:
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    return unavailable if error.status == 503 else _ERROR_TYPES.get(error.status, fallback)


_SHAPES = (
    (re.compile(r"/anthropic/api(/|$)|(/(runs|g)/[^/]+)?/v1/messages(/|$)"), anthropic_error),
    (
        re.compile(r"/oai/api(/|$)|(/(runs|g)/[^/]+)?/(v1|inference|tokenize|detokenize)(/|$)"),
        openai_error,
    ),
)


def refusal_at(path: str, error: HalteresError, *, routed: bool = False) -> Response:
    """The answer to a request for this path, in the shape that its clients read. Where no route
    answers so, nobody knows whose client asked, and each shape has the detail beside.
    """
    shape = next((shape for paths, shape in _SHAPES if paths.match(path)), None)
    body = as_http(error) if shape is None else shape(error)
    if shape is not None and not routed:
        body = {"detail": error.sentence, **body}
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else dict[str, str]()
    if error.status in (429, 503):
        headers["Retry-After"] = str(error.details.get("retry_after_s", 1))
    return Response(msgspec.json.encode(body), error.status, headers, JSON)


class NoMethod(UserError):
    """The path is there, the method is not."""

    code, status = "no_such_method", 405


async def on_error(request: Request, error: Exception) -> Response:
    """A HalteresError raised in a route."""
    if not isinstance(error, HalteresError):
        raise error
    return refusal_at(request.url.path, error, routed=True)


async def on_missing(request: Request, error: Exception) -> Response:
    """No such route or method."""
    kind = (
        NoMethod
        if isinstance(error, HTTPException) and error.status_code == NoMethod.status
        else NotFound
    )
    why = (
        "The routes are those of the Tinker API (SDK 0.38), /v1/… of OpenAI's and Anthropic's, "
        "/runs/RUN/…, /gateway/sessions and /g/SESSION/…."
    )
    return refusal_at(request.url.path, kind(f"There is no {_called(request)} here.", why))


async def on_gone(_: Request, __: Exception) -> Response:
    """A client that closed its connection while its request was read; nobody reads this."""
    return Response(status_code=499)


async def on_bug(request: Request, error: Exception) -> Response:
    """A bug of ours, with an id that is also in the log."""
    what = f"{_called(request)} failed (error id {uuid.uuid4().hex[:8]})."
    log.error("%s", what, exc_info=error)
    found = ServerError(what, f"{type(error).__name__}: {error}.", "See the service's log.")
    return refusal_at(request.url.path, found)


def _called(request: Request) -> str:
    """Method and path, without the id of a gateway session, which is a secret."""
    path = re.sub(r"^/(g|gateway/sessions)/[^/]+", r"/\1/…", request.url.path)
    return f"{request.method} {shortened(path)}"


# The guard


SCOPE_SESSION = "halteres.gateway_session"
"""Where the guard leaves the gateway session of a request in its ASGI scope."""


class Session(Protocol):
    """A gateway session, as the guard knows it."""

    @property
    def tenant(self) -> Tenant:
        """Whose it is."""
        ...

    @property
    def run(self) -> str | None:
        """The run that it samples from; None: the base model."""
        ...


class SessionDoor(Protocol):
    """Which requests belong to a gateway session."""

    def admitted(self, path: str, key: str | None) -> Session | None:
        """The session that a request for this path, with this key, belongs to; None where it
        belongs to none. KeyRefused and KeyOfSession where the key is a session's, and not good
        here.
        """
        ...


class Meter:
    """Counts the requests per second of all tenants, and the bytes that they are sending."""

    def __init__(self, allowances: Allowances, clock: Callable[[], float] = time.monotonic) -> None:
        self._allowances, self._clock = allowances, clock
        self._left: dict[Tenant, tuple[float, float]] = {}  # requests that could come at a time (s)
        self._receiving: Counter[Tenant] = Counter()  # bytes

    def count(self, tenant: Tenant) -> None:
        """One request more; Overloaded where they are too many per second: the error says when to
        come again.
        """
        per_s, now = self._allowances.of(tenant).requests_per_s, self._clock()
        most = max(1.0, per_s * BURST_S)
        left, at = self._left.get(tenant, (most, now))
        left = min(most, left + (now - at) * per_s)
        self._left[tenant] = (left if left < 1 else left - 1), now
        if left < 1:
            raise overloaded(
                "Too many requests.", f"{per_s:g} a second are the limit.", (1 - left) / per_s
            )

    @contextmanager
    def body(self, tenant: Tenant, announced: int) -> Iterator[Callable[[int], None]]:
        """Count one request's body while the block runs; it yields what is called with the bytes of
        each piece. TooLarge where it has, or announces, too many bytes; Overloaded where this
        tenant sends too much at once.
        """
        limits, size = self._allowances.of(tenant), 0

        def add(more: int, announced: int = 0) -> None:
            nonlocal size
            size += more
            self._receiving[tenant] += more
            if max(size, announced) > limits.body_bytes:
                most = size_text(limits.body_bytes)
                raise TooLarge(
                    "The body is too large.", f"{most} are the limit.", "Send it in parts."
                )
            if more and (receiving := self._receiving[tenant]) > limits.incoming_bytes:
                most = size_text(limits.incoming_bytes)
                raise overloaded(
                    f"{size_text(receiving)} of requests are on their way.",
                    f"{most} are the limit.",
                    1,
                )

        add(0, announced)
        try:
            yield add
        finally:
            self._receiving[tenant] -= size


@dataclass(frozen=True, slots=True)
class Guard:
    """ASGI middleware before all routes."""

    app: ASGIApp
    keys: Keys
    meter: Meter
    sessions: SessionDoor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, with the tenant in the scope, or refuse."""
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        with ExitStack() as receiving:
            try:
                tenant = scope[SCOPE_KEY] = self._tenant(scope, headers)
                if tenant != NOBODY:
                    self.meter.count(tenant)
                add = receiving.enter_context(
                    self.meter.body(tenant, int(length) if length.isdecimal() else 0)
                )
            except HalteresError as error:
                await refusal_at(scope["path"], error)(scope, receive, send)
                return

            async def counted() -> Message:
                message = await receive()
                add(len(message.get("body", b"")))
                return message

            await self.app(scope, counted, send)

    def _tenant(self, scope: Scope, headers: Headers) -> Tenant:
        path = scope["path"]
        if not self.keys.required:
            if is_foreign(headers):
                raise FOREIGN
            return self._tenant_of_session(scope, headers) or LOCAL
        # A browser says whose page asks; only one of the server it asks, or of this machine, may.
        origin = headers.get("origin")
        if (
            origin is not None
            and not is_local(origin)
            and origin.partition("://")[2] != headers.get("host")
        ):
            raise Foreign(
                "A page of another origin may not use this service.",
                f"Its origin is {shortened(origin)}.",
            )
        if path == HEALTH or path.startswith(f"{SIGNED}/"):
            return NOBODY
        return self._tenant_of_session(scope, headers) or self.keys.tenant(presented(headers))

    def _tenant_of_session(self, scope: Scope, headers: Headers) -> Tenant | None:
        """Of a request within a gateway session, which is then in the scope; None for any other."""
        session = self.sessions.admitted(scope["path"], presented(headers))
        if session is None:
            return None
        if self.keys.required:
            self.keys.check_tenant(session.tenant)
        scope[SCOPE_SESSION] = session
        return session.tenant


def presented(headers: Headers) -> str | None:
    """The key that a request brings."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else None)


# Counts of requests


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """One request that was not done."""

    status: int
    path: str  # below /runs/RUN or /g/SESSION
    why: str  # the answer's own sentence
    at: float  # unix s


class RunRequests(msgspec.Struct, kw_only=True):
    """Of one run, since this service started."""

    answered: int = 0
    refused: int = 0
    refused_in_a_row: int = 0  # since one was answered
    last_refusal: Refusal | None = None


class RequestCounts:
    """The counts of one service."""

    def __init__(self) -> None:
        self._by_run: OrderedDict[tuple[Tenant, str], RunRequests] = OrderedDict()

    def table(self) -> list[Route]:
        """The route: of the caller's run of that name; zeros where nobody has asked for it."""

        async def requests(request: Request) -> Any:
            return (
                self._by_run.get((tenant_of(request), request.path_params["run_id"]))
                or RunRequests()
            )

        return [route("/halteres/v1/runs/{run_id}/requests", requests)]

    def count(self, tenant: Tenant, run: str, refusal: Refusal | None = None) -> None:
        """A request was answered, or refused."""
        counts = self._by_run.setdefault((tenant, run), RunRequests())
        counts.answered += refusal is None
        counts.refused += refusal is not None
        counts.refused_in_a_row = 0 if refusal is None else counts.refused_in_a_row + 1
        counts.last_refusal = refusal or counts.last_refusal
        self._by_run.move_to_end((tenant, run))
        while len(self._by_run) > MOST_RUNS:
            self._by_run.popitem(last=False)


_BELOW = re.compile(r"/(runs/(?P<run>[^/]+)|g/[^/]+)(?P<path>/.*)")
_NEITHER = frozenset((408, 410, 429, 499, 503))


@dataclass(frozen=True, slots=True)
class CountRequests:
    """ASGI middleware: counts what is posted to a run's address, or to that of a gateway session of
    the run.
    """

    app: ASGIApp
    counts: RequestCounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and look at the answer."""
        posted = None
        if scope["method"] == "POST":
            posted = _BELOW.fullmatch(scope["path"])
        if posted is None:
            await self.app(scope, receive, send)
            return
        path = posted["path"]
        status = 200

        def count(refused: str | None = None) -> None:
            # the guard, which stands behind this, has found the session meanwhile
            session: Session | None = scope.get(SCOPE_SESSION)
            run = posted["run"]
            if run is None and session is not None:
                run = session.run
            if run is None:
                return
            why = shortened(refused or "", 600)
            refusal = (
                None
                if refused is None
                else Refusal(status=status, path=path, why=why, at=time.time())
            )
            self.counts.count(scope.get(SCOPE_KEY, LOCAL), run, refusal)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status < 400:
                    count()
            elif status >= 400 and status not in _NEITHER and not message.get("more_body"):
                # of a refusal, in any of our shapes
                body = msgspec.json.decode(message.get("body", b""))
                error = body.get("error")
                count(
                    str(
                        (error.get("message") if isinstance(error, dict) else body.get("detail"))
                        or body
                    )
                )
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception as error:
            status = 500
            count(f"{type(error).__name__}: {error}")
            raise
