"""What surrounds every route: who may ask, from where, and how much; what became of requests below /runs/RUN.

a service without keys    Host, and Origin where there is one, name this machine; everybody is the tenant "local"
a service with keys       X-API-Key, or Authorization: Bearer; an Origin names this machine, or the server asked

POST /runs/RUN/…    below 400: answered    408, 429, 499, 503: come again, or gone: neither    other: refused
"""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from halteres.errors import HalteresError, shortened
from halteres.loopback import FOREIGN, Foreign, is_foreign, is_local
from halteres.service.answers import refusal_at, route
from halteres.service.routes.checkpoints import SIGNED
from halteres.service.tenancy.keys import Keys
from halteres.service.tenancy.limits import Allowances, TooLarge, overloaded, size_text
from halteres.service.tenancy.tenants import LOCAL, NOBODY, SCOPE_KEY, Tenant, tenant_of

HEALTH = "/api/v1/healthz"

BURST_S = 5.0  # so many seconds' worth of requests may come at once


class Meter:
    """Counts the requests per second of all tenants, and the bytes that they are sending."""

    def __init__(self, allowances: Allowances, clock: Callable[[], float] = time.monotonic) -> None:
        self._allowances, self._clock = allowances, clock
        self._left: dict[Tenant, tuple[float, float]] = {}  # requests that could come at a time (s)
        self._receiving: Counter[Tenant] = Counter()  # bytes

    def count(self, tenant: Tenant) -> None:
        """One request more.

        Raises:
            Overloaded: too many per second; the error says when to come again.
        """
        per_s, now = self._allowances.of(tenant).requests_per_s, self._clock()
        most = max(1.0, per_s * BURST_S)
        left, at = self._left.get(tenant, (most, now))
        left = min(most, left + (now - at) * per_s)
        self._left[tenant] = (left if left < 1 else left - 1), now
        if left < 1:
            raise overloaded("Too many requests.", f"{per_s:g} a second are the limit.", (1 - left) / per_s)

    @contextmanager
    def body(self, tenant: Tenant, announced: int) -> Iterator[Callable[[int], None]]:
        """Count one request's body while the block runs; it yields what is called with the bytes of each piece.

        Raises:
            TooLarge: it has, or announces, more bytes than it may have.
            Overloaded: this tenant sends more at once than it may.
        """
        limits, size = self._allowances.of(tenant), 0

        def add(more: int, announced: int = 0) -> None:
            nonlocal size
            size += more
            self._receiving[tenant] += more
            if max(size, announced) > limits.body_bytes:
                most = size_text(limits.body_bytes)
                raise TooLarge("The body is too large.", f"{most} are the limit.", "Send it in parts.")
            if more and (receiving := self._receiving[tenant]) > limits.incoming_bytes:
                most = size_text(limits.incoming_bytes)
                raise overloaded(f"{size_text(receiving)} of requests are on their way.", f"{most} are the limit.", 1)

        add(0, announced)
        try:
            yield add
        finally:
            self._receiving[tenant] -= size


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
        length = headers.get("content-length", "")
        with ExitStack() as receiving:
            try:
                tenant = scope[SCOPE_KEY] = self._tenant(scope["path"], headers)
                if tenant != NOBODY:
                    self._meter.count(tenant)
                add = receiving.enter_context(self._meter.body(tenant, int(length) if length.isdecimal() else 0))
            except HalteresError as error:
                await refusal_at(scope["path"], error)(scope, receive, send)
                return

            async def counted() -> Message:
                message = await receive()
                add(len(message.get("body", b"")))
                return message

            await self._app(scope, counted, send)

    def _tenant(self, path: str, headers: Headers) -> Tenant:
        if not self._keys.asked_for:
            if is_foreign(headers):
                raise FOREIGN
            return LOCAL
        # A browser says whose page asks; only one of the server it asks, or of this machine, may.
        origin = headers.get("origin")
        if origin is not None and not is_local(origin) and origin.partition("://")[2] != headers.get("host"):
            raise Foreign("A page of another origin may not use this service.", f"Its origin is {shortened(origin)}.")
        if path == HEALTH or path.startswith(f"{SIGNED}/"):
            return NOBODY
        return self._keys.tenant(presented(headers))


def presented(headers: Headers) -> str | None:
    """The key that a request brings."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else None)


MOST_RUNS = 256  # of which counts are kept; anybody may name a run


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
        return [route("/halteres/v1/runs/{run_id}/requests", self._requests)]

    async def _requests(self, request: Request) -> Any:
        """Of the caller's run of that name; zeros where nobody has asked for it."""
        return self._by_run.get((tenant_of(request), request.path_params["run_id"])) or RunRequests()

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


_RUN = re.compile(r"/runs/([^/]+)(/.*)")
_NEITHER = frozenset((408, 429, 499, 503))


@dataclass(frozen=True, slots=True)
class CountRequests:
    """ASGI middleware: counts what is posted to a run's address."""

    app: ASGIApp
    counts: RequestCounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and look at the answer."""
        posted = _RUN.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if posted is None:
            await self.app(scope, receive, send)
            return
        run, path = posted.groups()
        status = 200

        def count(refused: str | None = None) -> None:
            why = shortened(refused or "", 600)
            refusal = None if refused is None else Refusal(status=status, path=path, why=why, at=time.time())
            self.counts.count(scope.get(SCOPE_KEY, LOCAL), run, refusal)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status < 400:
                    count()
            elif status >= 400 and status not in _NEITHER and not message.get("more_body"):
                count(_sentence(message.get("body", b"")))
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception as error:
            status = 500
            count(f"{type(error).__name__}: {error}")
            raise


def _sentence(body: bytes) -> str:
    """What a refusal says, in any of the shapes that this service answers in."""
    decoded = msgspec.json.decode(body)
    error = decoded.get("error")
    return str((error.get("message") if isinstance(error, dict) else decoded.get("detail")) or decoded)
