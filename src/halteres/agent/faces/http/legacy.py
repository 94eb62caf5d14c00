"""The routes that the seed's client calls, with the replies it knows.

Owns: which tool each route is; that every answer is a 200 (the client reads any other as "HTTP N: body") and comes
before it gives up, after 30 s.
Never: decides what a tool answers; authenticates (`guard`); lets a caller without the token choose what runs (`open`).

Source: seed 001, the client `rl_training_tool` over HTTP; spec agent-tools 1.10.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halteres.agent.faces.http.answers import answer, arguments_of, refused
from halteres.agent.faces.http.calls import Calls
from halteres.agent.faces.http.guard import carries_token
from halteres.agent.faces.http.open import beyond_open
from halteres.errors import UserError

LIMIT_S = 25
"""When a call is answered for a tool that is not done; those that wait are, within 25 s."""

TEST_WAIT_S = 20
"""How long a test is waited for; the answer of a longer one has a `test_id` to go on with."""

Endpoint = Callable[[Request], Awaitable[Response]]


class LegacyRoutes:
    """The seed's routes over the table of tools."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def table(self, guard: list[Middleware]) -> list[Route]:
        """The routes. Names may hold slashes: the client puts them into the URL as they are."""
        rows: list[tuple[str, str, Endpoint]] = [
            ("GET", "/environments", self.environments),
            ("POST", "/environments/{name:path}/select", self._tool("rl_select_environment")),
            ("GET", "/config", self._tool("rl_get_current_config", detail="full")),
            ("POST", "/config", self._tool("rl_edit_config")),
            ("POST", "/runs", self._tool("rl_start_training")),
            ("GET", "/runs", self._tool("rl_list_runs")),
            ("POST", "/runs/{run_id:path}/stop", self._tool("rl_stop_training")),
            ("GET", "/runs/{run_id:path}/metrics", self._tool("rl_get_results")),
            ("GET", "/runs/{run_id:path}", self._tool("rl_check_status")),
            ("POST", "/test/inference", self._tool("rl_test_inference", wait_s=TEST_WAIT_S)),
            ("GET", "/health", self._tool("rl_health_check")),
        ]
        return [Route(path, endpoint, methods=[method], middleware=guard) for method, path, endpoint in rows]

    async def environments(self, request: Request) -> Response:
        """GET /environments: a bare list, which the client wraps itself."""
        is_open = not carries_token(request.headers)
        reply = await self._calls.reply(request, "rl_list_environments", {}, LIMIT_S, is_open=is_open)
        return answer(reply.for_agents if reply.failed else reply.for_agents["environments"])

    def _tool(self, name: str, **fixed: Any) -> Endpoint:
        """The endpoint that calls a tool with the path's, the body's and these arguments."""

        async def endpoint(request: Request) -> Response:
            try:
                arguments = {**await arguments_of(request), **request.path_params, **fixed}
                is_open = not carries_token(request.headers)
                if is_open and (refusal := beyond_open(name, arguments)):
                    raise refusal
            except UserError as error:
                return refused(error, 200)
            reply = await self._calls.reply(request, name, arguments, LIMIT_S, is_open=is_open)
            return answer(reply.for_agents)

        return endpoint
