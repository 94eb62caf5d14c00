"""Keys, as the SDK's command line asks about them.

Source: tinker SDK 0.38.0, cli/auth_api.py; lib/_jwt_auth.py for the token, which it asks for only where
`pjwt_auth_enabled` is on.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halteres.errors import UserError
from halteres.service.answers import answer
from halteres.service.routes.guard import presented
from halteres.service.service import Service
from halteres.service.tenancy.keys import Key, KeyFile
from halteres.service.tenancy.tenants import tenant_of


class AccessRoutes:
    """What `tinker auth` calls."""

    def __init__(self, service: Service) -> None:
        self._keys = KeyFile(service.state)

    def table(self) -> list[Route]:
        """The routes."""
        return [
            Route("/api/v1/auth/token", self.token, methods=["POST"]),
            Route("/api/v1/auth/apikey/me", self.key),
            Route("/api/v1/auth/apikey/me", self.revoke, methods=["DELETE"]),
        ]

    async def token(self, _: Request) -> Response:
        """POST auth/token: refused."""
        raise UserError(
            "This service gives no tokens.",
            "Keys are sent plainly with each request: client/config says pjwt_auth_enabled=false.",
            "Set TINKER_API_KEY to a key; on the service's own machine any text that begins with tml- will do.",
        )

    async def key(self, request: Request) -> Response:
        """GET auth/apikey/me: whose the key of this request is."""
        found, tenant = await self._found(request), tenant_of(request)
        details = {"org_details": {"name": tenant}, "user_details": {"email": f"{tenant}@localhost"}}
        return answer(
            {
                "key_id": int(found.id, 16) if found else 0,
                "name": found.name if found else tenant,
                "note": found.note if found else "This service asks for no key.",
                "details": details,
            }
        )

    async def revoke(self, request: Request) -> Response:
        """DELETE auth/apikey/me: the key of this request is good no more."""
        if (found := await self._found(request)) is not None:
            await asyncio.to_thread(self._keys.revoke, found.id)
        return Response(status_code=204)

    async def _found(self, request: Request) -> Key | None:
        """The key of a request that the guard let pass; None where no key is asked for."""
        key_id, tenant = (presented(request.headers) or "").split("-")[1:2], tenant_of(request)
        known = await asyncio.to_thread(self._keys.read)
        return next((key for key in known if [key.id] == key_id and key.tenant == tenant), None)
