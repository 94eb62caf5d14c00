"""What surrounds every route: who may ask, from where, and how much; what became of requests below /runs/RUN.

a service without keys    Host, and Origin where there is one, name this machine; everybody is the tenant "local"
a service with keys       X-API-Key, or Authorization: Bearer; an Origin names this machine, or the server asked

POST /runs/RUN/…    below 400: answered    408, 429, 499, 503: come again, or gone: neither    other: refused
"""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from halteres.errors import HalteresError, shortened
from halteres.loopback import FOREIGN, Foreign, is_foreign, is_local
from halteres.service.answers import answer, refusal_at
from halteres.service.routes.downloads import SIGNED
from halteres.service.tenancy.keys import KeyRefused, Keys
from halteres.service.tenancy.limits import Allowances, Limits, TooLarge, overloaded, size_text
from halteres.service.tenancy.tenants import LOCAL, NOBODY, SCOPE_KEY, Tenant, tenant_of

BURST_S = 5.0
"""So many seconds' worth of requests may come at once."""


@dataclass(slots=True)
class Bucket:
    """Requests that may come now."""

    left: float
    filled_at: float  # s

    def take(self, per_s: float, now: float) -> float:
        """Take one; returns the seconds until there is one, 0 if it was taken."""
        full = max(1.0, per_s * BURST_S)
        self.left = min(full, self.left + (now - self.filled_at) * per_s)
        self.filled_at = now
        if self.left < 1:
            return (1 - self.left) / per_s
        self.left -= 1
        return 0.0


class Body:
    """One request's body, as it comes; it counts until the block ends that this is the context of."""

    def __init__(self, limits: Limits, receiving: Counter[Tenant], tenant: Tenant) -> None:
        self._limits, self._receiving, self._tenant = limits, receiving, tenant
        self._size = 0

    def __enter__(self) -> None:
        """Nothing has come yet."""

    def __exit__(self, *_: object) -> None:
        self._receiving[self._tenant] -= self._size

    def expect(self, size: int) -> None:
        """Raise TooLarge for a body of more bytes than it may have."""
        if size > self._limits.body_bytes:
            raise TooLarge(
                "The body is too large.", f"{size_text(self._limits.body_bytes)} are the limit.", "Send it in parts."
            )

    def add(self, size: int) -> None:
        """So many bytes more have come.

        Raises:
            TooLarge: the body has more than it may.
            Overloaded: this tenant sends more at once than it may.
        """
        self._size += size
        self._receiving[self._tenant] += size
        self.expect(self._size)
        if (receiving := self._receiving[self._tenant]) > self._limits.incoming_bytes:
            most = size_text(self._limits.incoming_bytes)
            raise overloaded(f"{size_text(receiving)} of requests are on their way.", f"{most} are the limit.", 1)


class Meter:
    """Counts for all tenants."""

    def __init__(self, allowances: Allowances, clock: Callable[[], float] = time.monotonic) -> None:
        self._allowances, self._clock = allowances, clock
        self._buckets: dict[Tenant, Bucket] = {}
        self._receiving: Counter[Tenant] = Counter()  # bytes

    def count(self, tenant: Tenant) -> None:
        """One request more.

        Raises:
            Overloaded: too many per second; the error says when to come again.
        """
        per_s, now = self._allowances.of(tenant).requests_per_s, self._clock()
        bucket = self._buckets.setdefault(tenant, Bucket(max(1.0, per_s * BURST_S), now))
        if wait_s := bucket.take(per_s, now):
            raise overloaded("Too many requests.", f"{per_s:g} a second are the limit.", wait_s)

    def body(self, tenant: Tenant, announced: int) -> Body:
        """The body of a request that begins.

        Raises:
            TooLarge: it says that it is larger than it may be.
        """
        body = Body(self._allowances.of(tenant), self._receiving, tenant)
        body.expect(announced)
        return body


HEALTH = "/api/v1/healthz"

_BEARER = "bearer "


class Guard:
    """ASGI middleware before all routes."""

    def __init__(self, app: ASGIApp, keys: Keys, meter: Meter) -> None:
        self._app, self._keys, self._meter = app, keys, meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, with the tenant in the scope, or refuse."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            tenant = scope[SCOPE_KEY] = self._tenant(scope["path"], headers)
            if tenant != NOBODY:
                self._meter.count(tenant)
            body = self._meter.body(tenant, _announced(headers))
        except HalteresError as error:
            await _refusal(scope["path"], error)(scope, receive, send)
            return
        with body:
            await self._app(scope, _counted(receive, body), send)

    def _tenant(self, path: str, headers: Headers) -> Tenant:
        if not self._keys.asked_for:
            if is_foreign(headers):
                raise FOREIGN
            return LOCAL
        _refuse_foreign_page(headers)
        if path == HEALTH or path.startswith(f"{SIGNED}/"):
            return NOBODY
        return self._keys.tenant(presented(headers))


def presented(headers: Headers) -> str | None:
    """The key that a request brings."""
    authorization = headers.get("authorization", "")
    bearer = authorization[len(_BEARER) :].strip() if authorization.lower().startswith(_BEARER) else None
    return headers.get("x-api-key") or bearer


def _refuse_foreign_page(headers: Headers) -> None:
    """A browser says whose page asks; only one of the server it asks, or of this machine, may."""
    origin = headers.get("origin")
    if origin is not None and not is_local(origin) and origin.partition("://")[2] != headers.get("host"):
        raise Foreign("A page of another origin may not use this service.", f"Its origin is {shortened(origin)}.")


def _refusal(path: str, error: HalteresError) -> Response:
    response = refusal_at(path, error)
    if isinstance(error, KeyRefused):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _announced(headers: Headers) -> int:
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


def _counted(receive: Receive, body: Body) -> Receive:
    async def counted() -> Message:
        message = await receive()
        body.add(len(message.get("body", b"")))
        return message

    return counted


RUN = re.compile(r"/runs/([^/]+)(/.*)")

NEITHER = frozenset((408, 429, 499, 503))

MOST_RUNS = 256
"""Of which counts are kept; anybody may name a run."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """One request that was not done."""

    status: int
    path: str  # below /runs/RUN
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
        """The route."""
        return [Route("/halteres/v1/runs/{run_id}/requests", self.requests)]

    async def requests(self, request: Request) -> Response:
        """GET /halteres/v1/runs/RUN/requests: of the caller's run of that name; zeros where nobody has asked for it."""
        return answer(self._by_run.get((tenant_of(request), request.path_params["run_id"])) or RunRequests())

    def answered(self, tenant: Tenant, run: str) -> None:
        """A request was answered."""
        counts = self._of(tenant, run)
        counts.answered += 1
        counts.refused_in_a_row = 0

    def refused(self, tenant: Tenant, run: str, refusal: Refusal) -> None:
        """A request was refused."""
        counts = self._of(tenant, run)
        counts.refused += 1
        counts.refused_in_a_row += 1
        counts.last_refusal = refusal

    def _of(self, tenant: Tenant, run: str) -> RunRequests:
        counts = self._by_run.setdefault((tenant, run), RunRequests())
        self._by_run.move_to_end((tenant, run))
        while len(self._by_run) > MOST_RUNS:
            self._by_run.popitem(last=False)
        return counts


class CountRequests:
    """ASGI middleware: counts what is posted to a run's address."""

    def __init__(self, app: ASGIApp, counts: RequestCounts) -> None:
        self._app, self._counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and look at the answer."""
        asked = RUN.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if asked is None:
            await self._app(scope, receive, send)
            return
        run, path = asked.groups()
        status = 200

        def tenant() -> Tenant:  # known once the guard has let the request in
            return scope.get(SCOPE_KEY, LOCAL)

        def refused(status: int, why: str) -> None:
            refusal = Refusal(status=status, path=path, why=shortened(why, 600), at=time.time())
            self._counts.refused(tenant(), run, refusal)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status < 400:
                    self._counts.answered(tenant(), run)
            elif status >= 400 and status not in NEITHER and not message.get("more_body"):
                refused(status, _sentence(message.get("body", b"")))
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            refused(500, f"{type(error).__name__}: {error}")
            raise


def _sentence(body: bytes) -> str:
    """What a refusal says, in any of the shapes that this service answers in."""
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace")
    if not isinstance(decoded, dict):
        return str(decoded)
    error = decoded.get("error")
    return str((error.get("message") if isinstance(error, dict) else decoded.get("detail")) or decoded)
