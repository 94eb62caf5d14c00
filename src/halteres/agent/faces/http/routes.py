"""The routes of the tools: /api/tools and /openapi.json, and those that the seed's client calls.

The seed's routes can be asked without the token, by every user of this machine: such a request may not name a program,
a file or a folder, which would be run, read or written as this server's user.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import halteres
from halteres.agent.caller import TokenNeeded
from halteres.agent.faces.guard import carries_token
from halteres.agent.faces.http.calls import SESSION, Calls, arguments_of
from halteres.agent.faces.responses import JSON, answer, refused
from halteres.agent.table import TOOLS
from halteres.agent.tool import Tool
from halteres.agent.trial.request import LOCAL
from halteres.config.discovery import is_path
from halteres.config.edits import ENVIRONMENT, Edit
from halteres.errors import UserError
from halteres.models import known_folder, model_folder
from halteres.runs.starting.base_model import models_home

NAMES_A_PROGRAM: Final = frozenset({ENVIRONMENT, "run.interpreter", "run.working_directory"})
"""Settings whose value is run, or says which files of a user are read by what is run."""

NAMES_A_FOLDER: Final = frozenset(
    {"env.spool_dir", "env.data_dir_to_save_evals", "env.data_path_to_save_groups", "run.sinks"}
)
"""Settings whose value is, or decides, where something is written."""

MODEL: Final = "inference.model"

IS_TEXT: Final = frozenset({"env.system_prompt"})
"""Settings of an environment whose value may look like a path: Qwen3's "/no_think"."""

NAMES_AN_ENVIRONMENT: Final[Mapping[str, str]] = {
    "rl_select_environment": "name",
    "rl_start_training": "environment",
}
"""Tool -> its argument that may be the path of a file."""

_PATH: Final = re.compile(r"/|~|file:|\.[\w/]|\.$")
"""How a path that leads elsewhere begins, or one of a hidden file; not ".*", a pattern."""

_WHY = "What it names would be run, read or written as this server's user"


def beyond_open(tool: str, arguments: Mapping[str, Any]) -> TokenNeeded | None:
    """The refusal of a call that would choose what runs by more than an environment's name, or reach a folder by its
    path; None of any other."""
    named = arguments.get(NAMES_AN_ENVIRONMENT.get(tool, ""))
    if isinstance(named, str) and is_path(named):
        return TokenNeeded.of("Without the token an environment is chosen by its name, not by its file.", _WHY)
    for setting, value in _settings(arguments):
        key = Edit(name=setting, value=None).key
        is_text = not key.startswith("env.") or key in IS_TEXT
        if key in NAMES_A_PROGRAM | NAMES_A_FOLDER or (not is_text and _is_path(value)):
            return TokenNeeded.of(f"'{setting}' cannot be set without the token.", _WHY, field=setting)
        if key == MODEL and _is_model_elsewhere(value):
            what = "Without the token a model is named, or a run, or tinker:// weights of one: not a folder."
            return TokenNeeded.of(what, _WHY, field=setting)
    return None


def _settings(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that a call changes and their values, in either form of it; a model to test is one."""
    changes, models = arguments.get("changes"), arguments.get("models")
    yield from (changes if isinstance(changes, dict) else {}).items()
    yield from ((MODEL, model) for model in (models if isinstance(models, list) else ()))
    if isinstance(name := arguments.get("field"), str):
        yield name, arguments.get("value")


def _is_model_elsewhere(value: Any) -> bool:
    """Whether it is a folder neither built-in nor in the store: also one below the server's working directory."""
    name = value.removeprefix(LOCAL) if isinstance(value, str) else ""
    return _is_path(name) or (
        known_folder(name, models_home()) is None and model_folder(name, models_home()) is not None
    )


def _is_path(value: Any) -> bool:
    """Whether a value, or one within it, leads elsewhere than to a name below a folder of ours: `openai/gsm8k` does
    not."""
    if isinstance(value, dict | list):
        return any(map(_is_path, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and (_PATH.match(value) is not None or ".." in value.split("/"))


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
        return answer({"tools": [described(tool) for tool in TOOLS]})

    async def call(self, request: Request) -> Response:
        """POST /api/tools/{name}: its arguments as a JSON object; an error's status fits its kind."""
        reply = await self._calls.reply(request, request.path_params["name"], await arguments_of(request))
        return answer(reply.for_agents, reply.status)

    async def openapi(self, _: Request) -> Response:
        """GET /openapi.json."""
        return answer(openapi(TOOLS))


def described(tool: Tool) -> dict[str, Any]:
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
