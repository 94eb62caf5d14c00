"""What became of the requests that a run's environment sends: how many were answered, how many refused, in which words.

POST /runs/RUN/…    below 400: answered    408, 429, 499, 503: come again, or gone: neither    other: refused
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from halteres.errors import shortened
from halteres.service.answers import answer
from halteres.service.tenancy.tenants import LOCAL, SCOPE_KEY, Tenant, tenant_of

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
