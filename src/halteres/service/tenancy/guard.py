"""Who may ask, from where, and how much: what is settled before any route is reached.

Owns: the keys that requests bring, the paths that need none, the check against pages of other origins, 401, 403, 413
and 429 as answers.
Never: knows what is asked for; writes a key anywhere.

    a service without keys    Host, and Origin where there is one, name this machine; everybody is the tenant "local"
    a service with keys       X-API-Key, or Authorization: Bearer; an Origin names this machine, or the server asked
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from halteres.errors import HalteresError, shortened
from halteres.loopback import FOREIGN, Foreign, is_foreign, is_local
from halteres.service.routes.failures import refusal_at
from halteres.service.tenancy.keys import KeyRefused, Keys
from halteres.service.tenancy.meter import Body, Meter
from halteres.service.tenancy.tenants import LOCAL, NOBODY, SCOPE_KEY, Tenant

HEALTH = "/api/v1/healthz"

SIGNED = "/halteres/v1/files/"
"""Downloads, whose addresses are signed: the SDK fetches them without headers of its own."""

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
        if path == HEALTH or path.startswith(SIGNED):
            return NOBODY
        return self._keys.tenant(presented(headers))


def presented(headers: Headers) -> str | None:
    """The key that a request brings."""
    authorization = headers.get("authorization", "")
    bearer = authorization[len(_BEARER) :].strip() if authorization.lower().startswith(_BEARER) else None
    return headers.get("x-api-key") or bearer


def _refuse_foreign_page(headers: Headers) -> None:
    """A browser says whose page asks; only one of the server it asks, or of this machine, may.

    Raises:
        Foreign: another one.
    """
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
