"""The tools over HTTP: calls under way; /api/tools, /openapi.json, and the routes that the seed's
client calls.

The seed's routes can be asked without the token, by every user of this machine: such a request may
not name a program, a file or a folder, which would be run, read or written as this server's user.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

import halteres
from halteres.agent.call import Reply, call, record_defect
from halteres.agent.table import TOOLS
from halteres.agent.tool import Caller, OpenThreads
from halteres.agent.transports.access import JSON, answer, carries_token, error_response
from halteres.documents import parse_json
from halteres.errors import HalteresError, NotFound, NotReady, UserError, as_answer
from halteres.loopback import TooLarge, body_within, departure
from halteres.next_step import NextStep, as_call

# header that names the draft a call works on, unless its arguments do
SESSION = "X-Halteres-Session"
MAX_BODY_BYTES = 2**20  # arguments are short; the longest are prompts to try
# when a call of a seed's route is answered for a tool that is not done; those that wait are, within
# 25 s
LIMIT_S = 25
# how long a test is waited for; the answer of a longer one has a `test_id` to go on with
TEST_WAIT_S = 20

Endpoint = Callable[[Request], Awaitable[Response]]


async def arguments_of(request: Request) -> dict[str, Any]:
    """The JSON object in the body, whatever its declared type; an empty body holds no arguments.

    Raises:
        UserError: it is no JSON object, or too large.
    """
    try:
        body = await body_within(request, MAX_BODY_BYTES)
    except TooLarge as error:
        error.code = UserError.code  # the one that the tools' clients know
        raise
    try:
        value = {}
        if body.strip():
            value = msgspec.json.decode(body)
        # It is JSON; that each of its keys stands there once, msgspec does not look at.
        if value:
            parse_json(body.decode(), most_values=len(body))
    except (ValueError, RecursionError) as error:
        why = f"{error}."
    else:
        if isinstance(value, dict):
            return value
        why = f"It holds a value of type {type(value).__name__}."
    raise UserError(
        "The body is no JSON object of arguments.", why, 'Send {"argument": value, ...}.'
    )


class Calls:
    """The calls of one server. Each ends with its client, with the server, or at its route's
    limit.
    """

    def __init__(self) -> None:
        self._open_threads = OpenThreads()
        self._under_way: set[asyncio.Task[Reply]] = set()
        self.ended = asyncio.Event()  # for what is no call, and waits too

    async def reply(
        self,
        request: Request,
        name: str,
        arguments: Mapping[str, Any],
        limit_s: float | None = None,
        *,
        is_open: bool = False,
        takes_all: bool = False,
        write: Callable[[NextStep], str] = as_call,
    ) -> Reply:
        """Call a tool for a request whose body was read.

        Args:
            request: its client, when it leaves, takes the call along.
            name: of the tool.
            arguments: of the tool.
            limit_s: seconds after which the answer is `not_ready`; what a tool does in a thread
                goes on.
            is_open: it came without the token.
            takes_all: the answer is not cut to what a model reads.
            write: how the answer names a call.
        """
        session = request.headers.get(SESSION)
        if session:
            caller = Caller(draft=session, write=write)
        else:
            caller = Caller.own(write)
        caller = replace(caller, takes_all=takes_all)
        if is_open:
            caller = replace(caller, open_threads=self._open_threads)
        work = asyncio.create_task(call(name, arguments, caller), name=name)
        gone = asyncio.create_task(departure(request), name=f"client of {name}")
        self._under_way.add(work)
        try:
            done, _ = await asyncio.wait(
                (work, gone), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            self._under_way.discard(work)
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled():
            return work.result()
        why = "The server ends."
        if not done:
            why = f"{limit_s:g} s are the limit here; it may still go on."
        error = NotReady(f"{name} was not answered.", why, NextStep("rl_list_runs"))
        return Reply(body=as_answer(error), failed=True, status=error.status)

    def end(self) -> None:
        """End those that wait; their clients ask again."""
        self.ended.set()
        for work in tuple(self._under_way):
            work.cancel()


async def _on_error(_: Request, error: Any) -> Response:
    return error_response(error)


async def _on_missing(request: Request, error: Exception) -> Response:
    """No such route, or not this method."""
    what = f"There is no {request.method} {request.url.path} here."
    status = 404
    if isinstance(error, HTTPException):
        status = error.status_code
    return error_response(NotFound(what, "", "GET /api/tools lists the tools."), status)


async def _on_departure(_: Request, __: Exception) -> Response:
    """The client left while its body was read: nobody reads this answer, whose number is
    nginx's.
    """
    return Response(status_code=499)


async def _on_defect(request: Request, error: Exception) -> Response:
    return error_response(
        record_defect(f"{request.method} {request.url.path} raised {type(error).__name__}.", error)
    )


ERRORS: Final = {
    HalteresError: _on_error,
    HTTPException: _on_missing,
    ClientDisconnect: _on_departure,
    Exception: _on_defect,
}
"""Answers to what a route raises."""


def legacy_routes(calls: Calls, guard: list[Middleware]) -> list[Route]:
    """The seed's routes over the table of tools. Names may hold slashes: the client puts them into
    the URL as they are.
    """

    async def environments(request: Request) -> Response:
        """A bare list, which the client wraps itself."""
        is_open = not carries_token(request.headers)
        reply = await calls.reply(request, "rl_list_environments", {}, LIMIT_S, is_open=is_open)
        return answer(reply.for_agents if reply.failed else reply.for_agents["environments"])

    def of_tool(name: str, **fixed: Any) -> Endpoint:
        """The endpoint that calls a tool with the path's, the body's and these arguments."""

        async def endpoint(request: Request) -> Response:
            try:
                arguments = {**await arguments_of(request), **request.path_params, **fixed}
                is_open = not carries_token(request.headers)
            except UserError as error:
                return error_response(error, 200)
            reply = await calls.reply(request, name, arguments, LIMIT_S, is_open=is_open)
            return answer(reply.for_agents)

        return endpoint

    rows: list[tuple[str, str, Endpoint]] = [
        ("GET", "/environments", environments),
        ("POST", "/environments/{name:path}/select", of_tool("rl_select_environment")),
        ("GET", "/config", of_tool("rl_get_current_config", detail="full")),
        ("POST", "/config", of_tool("rl_edit_config")),
        ("POST", "/runs", of_tool("rl_start_training")),
        ("GET", "/runs", of_tool("rl_list_runs")),
        ("POST", "/runs/{run_id:path}/stop", of_tool("rl_stop_training")),
        ("GET", "/runs/{run_id:path}/metrics", of_tool("rl_get_results")),
        ("GET", "/runs/{run_id:path}", of_tool("rl_check_status")),
        ("POST", "/test/inference", of_tool("rl_test_inference", wait_s=TEST_WAIT_S)),
        ("GET", "/health", of_tool("rl_health_check")),
    ]
    return [
        Route(path, endpoint, methods=[method], middleware=guard) for method, path, endpoint in rows
    ]


def tool_routes(calls: Calls, guard: list[Middleware]) -> list[Route]:
    """The tools by name: GET /api/tools, POST /api/tools/{name}, GET /openapi.json."""

    async def tools(_: Request) -> Response:
        described = [
            {
                "name": tool.name,
                "title": tool.title,
                "description": tool.description,
                "hints": asdict(tool.hints),
                "input_schema": tool.input_schema(),
                "output_schema": tool.output_schema(),
            }
            for tool in TOOLS
        ]
        return answer({"tools": described})

    async def call_tool(request: Request) -> Response:
        """The arguments are the body, a JSON object; an error's status fits its kind."""
        reply = await calls.reply(request, request.path_params["name"], await arguments_of(request))
        return answer(reply.for_agents, reply.status)

    async def openapi(_: Request) -> Response:
        return answer(openapi_document())

    return [
        Route("/api/tools", tools, middleware=guard),
        Route("/api/tools/{name}", call_tool, methods=["POST"], middleware=guard),
        Route("/openapi.json", openapi, middleware=guard),
    ]


def openapi_document() -> dict[str, Any]:
    """The OpenAPI 3.1 document of /api/tools/{name}."""
    shared: dict[str, Any] = {}
    session = {
        "name": SESSION,
        "in": "header",
        "schema": {"type": "string"},
        "description": "the draft to work on",
    }
    names = ("error", "code", "next")
    failure = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": list(names),
    }

    def content(schema: dict[str, Any]) -> dict[str, Any]:
        """With the schema's definitions moved to the document's own: references are from the
        document's root.
        """
        moved = json.loads(json.dumps(schema).replace("#/$defs/", "#/components/schemas/"))
        shared.update(moved.pop("$defs", {}))
        return {"content": {JSON: {"schema": moved}}}

    paths: dict[str, Any] = {}
    for tool in TOOLS:
        operation = {
            "operationId": tool.name,
            "summary": tool.title,
            "description": tool.description,
            "parameters": [session],
            "requestBody": content(tool.input_schema()),
            "responses": {
                "200": {"description": "the answer", **content(tool.output_schema())},
                "default": {"description": "an error", **content(failure)},
            },
        }
        paths[f"/api/tools/{tool.name}"] = {"post": operation}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Halteres: tools for training by reinforcement learning",
            "version": halteres.__version__,
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": shared,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
