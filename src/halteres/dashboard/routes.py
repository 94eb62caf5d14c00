"""The page's routes.

Owns: which there are, who is let to each, how a query's words become arguments.
Never: reads a run (the modules beside this one and the tools do), opens or closes what is behind the routes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

import halteres
from halteres.agent.arguments import chosen_run
from halteres.agent.faces.http.calls import Calls, arguments_of
from halteres.agent.faces.responses import JSON, answer
from halteres.dashboard.access import PageOnly, Tickets, WithHeaders, cookie_name, is_admitted, page_key, proof
from halteres.dashboard.curves import RecentCurves
from halteres.dashboard.listing import listed
from halteres.dashboard.stream import Changes, Events
from halteres.dashboard.view import evaluated, settings_of, view_of
from halteres.errors import UserError
from halteres.redaction import Redactor
from halteres.runs.directory import RunDirectory

STATIC: Final = Path(__file__).parent / "static"

ASSETS = "/ui"
"""Where the page's own files are; they tell nothing of a run, and are open."""

_NONCE = re.compile(r"[A-Za-z0-9_-]{16,64}")

Endpoint = Callable[[Request], Awaitable[Response]]


class _NotAdmitted(UserError):
    code, status = "unauthorized", 401


class Dashboard:
    """The page and what it asks for."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._changes = Changes(calls.ended)
        self._curves = RecentCurves()
        self._tickets = Tickets()

    def table(self) -> list[BaseRoute]:
        """The routes."""
        headers = Middleware(WithHeaders)
        open_to_all = [
            Route("/", self.page, middleware=[headers]),
            Route("/api/session", self.prove, middleware=[headers]),
            Route("/api/session", self.admit, methods=["POST"], middleware=[headers]),
            Mount(ASSETS, StaticFiles(directory=STATIC), middleware=[headers]),
        ]
        guarded: list[tuple[str, str, Endpoint]] = [
            ("GET", "/api/events", self.events),
            ("GET", "/api/runs", self.runs),
            ("GET", "/api/runs/{run_id}", self._of_run(view_of)),
            ("GET", "/api/runs/{run_id}/metrics", self.metrics),
            ("GET", "/api/runs/{run_id}/settings", self._of_run(settings_of)),
            ("GET", "/api/runs/{run_id}/evals", self._of_run(evaluated)),
            ("GET", "/api/runs/{run_id}/status", self._tool("rl_check_status")),
            ("GET", "/api/runs/{run_id}/results", self._tool("rl_get_results")),
            ("GET", "/api/runs/{run_id}/rollouts", self._tool("rl_get_rollouts", "step", "which", "n")),
            ("GET", "/api/runs/{run_id}/logs", self._tool("rl_get_logs", "role", "lines", "grep")),
            ("POST", "/api/runs/{run_id}/stop", self.stop),
        ]
        guard = [headers, Middleware(PageOnly)]
        return [
            *open_to_all,
            *(Route(path, endpoint, methods=[method], middleware=guard) for method, path, endpoint in guarded),
        ]

    async def page(self, request: Request) -> Response:
        """GET /: the page, or a 401 that says how to open it (and opens it, for a link of `halteres ui`)."""
        admitted = is_admitted(request.headers)
        file = STATIC / ("index.html" if admitted else "door.html")
        return FileResponse(file, 200 if admitted else _NotAdmitted.status, {"Cache-Control": "no-store"})

    async def prove(self, request: Request) -> Response:
        """GET /api/session?nonce=...: shows who asks that this is a server of the same home."""
        nonce = request.query_params.get("nonce", "")
        if not _NONCE.fullmatch(nonce):
            raise UserError("There is no nonce of 16 to 64 letters and digits.", "", "GET /api/session?nonce=NONCE")
        return answer({"halteres": halteres.__version__, "proof": proof(nonce)})

    async def admit(self, request: Request) -> Response:
        """POST /api/session {token}: a cookie for a ticket, or for the token itself."""
        given = (await arguments_of(request)).get("token")
        if not isinstance(given, str) or not self._tickets.admits(given):
            raise _NotAdmitted("This link was used before, is too old, or is of another home.", "", "Run: halteres ui")
        response = Response(status_code=204)
        response.set_cookie(cookie_name(request.headers), page_key(), httponly=True, samesite="strict")
        return response

    async def events(self, _: Request) -> Response:
        """GET /api/events."""
        return Events(self._changes)

    async def runs(self, request: Request) -> Response:
        """GET /api/runs, GET /api/runs?ids=A,B."""
        ids = request.query_params.get("ids")
        return await _told(listed, None if ids is None else set(ids.split(",")))

    async def metrics(self, request: Request) -> Response:
        """GET /api/runs/{id}/metrics?names=A,B: the curves of these metrics, and all evaluations."""
        names = request.query_params.get("names", "").split(",")

        def curves(run_id: str) -> dict[str, Any]:
            return self._curves.curves(chosen_run(run_id).path / "metrics.jsonl").told(names)

        return await _told(curves, request.path_params["run_id"])

    async def stop(self, request: Request) -> Response:
        """POST /api/runs/{id}/stop {mode}."""
        arguments = {**await arguments_of(request), **request.path_params}
        reply = await self._calls.reply(request, "rl_stop_training", arguments)
        return answer(reply.body, reply.status)

    def _of_run(self, reader: Callable[[RunDirectory], dict[str, Any]]) -> Endpoint:
        """The endpoint that tells what a function reads of a run."""

        async def endpoint(request: Request) -> Response:
            return await _told(lambda run_id: reader(chosen_run(run_id)), request.path_params["run_id"])

        return endpoint

    def _tool(self, name: str, *queries: str) -> Endpoint:
        """The endpoint that gives a tool's own answer."""

        async def endpoint(request: Request) -> Response:
            given = {word: _value(request.query_params[word]) for word in queries if word in request.query_params}
            reply = await self._calls.reply(request, name, {**given, **request.path_params})
            return answer(reply.body, reply.status)

        return endpoint


def _value(word: str) -> Any:
    """A word of a query as the tools want it; what is no number is left for them to refuse."""
    return int(word) if word.isdecimal() and len(word) < 10 else word


async def _told(reader: Callable[..., dict[str, Any]], *arguments: Any) -> Response:
    """What a reader of files says, without secrets; where a number is not finite, null."""
    body = Redactor.of_this_process().json(await asyncio.to_thread(reader, *arguments))
    return Response(msgspec.json.encode(body), media_type=JSON, headers={"Cache-Control": "no-store"})
