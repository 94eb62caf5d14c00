"""/api/tools: the table, and a call of each; /openapi.json, which describes both.

Owns: these routes and what they tell of a tool.
Never: knows one tool from another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import halteres
from halteres.agent.faces.http.answers import JSON, answer, arguments_of
from halteres.agent.faces.http.calls import SESSION, Calls
from halteres.agent.table import TOOLS
from halteres.agent.tool import Tool


class ToolRoutes:
    """The tools by name."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def table(self, guard: list[Middleware]) -> list[Route]:
        """The routes."""
        return [
            Route("/api/tools", self.tools, middleware=guard),
            Route("/api/tools/{name}", self.call, methods=["POST"], middleware=guard),
            Route("/openapi.json", self.openapi, middleware=guard),
        ]

    async def tools(self, _: Request) -> Response:
        """GET /api/tools."""
        return answer({"tools": [told(tool) for tool in TOOLS]})

    async def call(self, request: Request) -> Response:
        """POST /api/tools/{name}: its arguments as a JSON object; an error's status fits its kind."""
        reply = await self._calls.reply(request, request.path_params["name"], await arguments_of(request))
        return answer(reply.for_agents, reply.status)

    async def openapi(self, _: Request) -> Response:
        """GET /openapi.json."""
        return answer(openapi(TOOLS))


def told(tool: Tool) -> dict[str, Any]:
    """What a client needs to know of a tool."""
    return {
        "name": tool.name,
        "title": tool.title,
        "description": tool.description,
        "hints": asdict(tool.hints),
        "input_schema": tool.input_schema(),
        "output_schema": tool.output_schema(),
    }


def openapi(tools: Iterable[Tool]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of /api/tools/{name}."""
    shared: dict[str, Any] = {}
    paths = {f"/api/tools/{tool.name}": {"post": _operation(tool, shared)} for tool in tools}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Halteres: tools for training by reinforcement learning", "version": halteres.__version__},
        "security": [{"token": []}],
        "paths": paths,
        "components": {"schemas": shared, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(tool: Tool, shared: dict[str, Any]) -> dict[str, Any]:
    session = {"name": SESSION, "in": "header", "schema": {"type": "string"}, "description": "the draft to work on"}
    return {
        "operationId": tool.name,
        "summary": tool.title,
        "description": tool.description,
        "parameters": [session],
        "requestBody": _content(_hoisted(tool.input_schema(), shared)),
        "responses": {
            "200": {"description": "the answer", **_content(_hoisted(tool.output_schema(), shared))},
            "default": {"description": "an error", **_content(_ERROR)},
        },
    }


_ERROR = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("error", "code", "next")},
    "required": ["error", "code", "next"],
}


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {JSON: {"schema": schema}}}


def _hoisted(schema: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """The schema with its definitions moved to the document's own: references are from the document's root."""
    moved = json.loads(json.dumps(schema).replace("#/$defs/", "#/components/schemas/"))
    shared.update(moved.pop("$defs", {}))
    return moved
