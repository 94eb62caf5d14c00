"""The relay: the only address that a tested environment knows.

Owns: a port of the loopback with one door for each model; only who was told a door's name finds it.
Never: tells an environment a key or where its requests go, forwards anything but completions.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from halteres.agent.trial.upstream import Destination, Refusal, Upstream
from halteres.config.environ import LOOPBACK

HOST = LOOPBACK[0]
PATHS = ("v1/chat/completions", "v1/completions", "generate")
LARGEST_REQUEST = 64 * 1024 * 1024  # bytes


class Relay:
    """Doors, each of which leads to one upstream."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session, self._doors, self.url = session, dict[str, Upstream](), ""

    def open(self, to: Destination) -> tuple[str, Upstream]:
        """A new door: its address, in OpenAI's form, and what it leads to."""
        name, upstream = secrets.token_urlsafe(16), Upstream(to, self._session)
        self._doors[name] = upstream
        return f"{self.url}/{name}/v1", upstream

    async def handle(self, request: web.Request) -> web.Response:
        """Forward one request."""
        upstream, path = self._doors.get(request.match_info["door"]), request.match_info["path"]
        if upstream is None or path not in PATHS:
            return _error(404, f"There is no {path} here.")
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise ValueError
        except ValueError:
            return _error(400, "The body is no JSON object.")
        try:
            return web.json_response(await upstream.ask(path, body))
        except Refusal as refusal:
            return _error(refusal.status, refusal.why)


@asynccontextmanager
async def relaying() -> AsyncIterator[Relay]:
    """A relay that answers inside; who hangs up takes back what was asked."""
    async with aiohttp.ClientSession(trust_env=True, connector=aiohttp.TCPConnector(limit=0)) as session:
        relay = Relay(session)
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.router.add_post("/{door}/{path:.+}", relay.handle)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, 0).start()
            relay.url = f"http://{HOST}:{runner.addresses[0][1]}"
            yield relay
        finally:
            await runner.cleanup()


def _error(status: int, why: str) -> web.Response:
    return web.json_response({"error": {"message": why, "code": status}}, status=status)
