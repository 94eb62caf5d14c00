"""The MCP server: the table of tools, resources and prompts, on the SDK's low-level server; serving
it on stdio and on streamable HTTP.

One server speaks both revisions, 2025-11-25 and 2026-07-28: a client's first request decides. The
SDK's high-level server is not used: it drops arguments it does not know, and hides what went wrong
(mcp 2.3.0).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import anyio
import mcp_types as types
import uvicorn
from mcp.server import Server, ServerRequestContext
from mcp.server.caching import CacheHint
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http import MCP_SESSION_ID_HEADER
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.message import SessionMessage
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import halteres
from halteres import loopback, process
from halteres.agent.agent_clients import host_wait_s
from halteres.agent.call import Reply, call
from halteres.agent.table import BY_NAME, TOOLS
from halteres.agent.tool import Caller, ShownAlerts, Tool
from halteres.agent.transports.access import (
    FILE,
    Guard,
    refuse_elsewhere,
    refuse_without_token,
    token,
)
from halteres.agent.transports.functions import base64_of
from halteres.agent.transports.mcp import PATH, content
from halteres.config import environ

_log = logging.getLogger(__name__)

Context = ServerRequestContext[Any, Any]

PROGRESS_EVERY_S = 5.0  # how often a client that gave a token hears that its call still waits

# what depends on this version of the program alone
_UNCHANGING = CacheHint(ttl_ms=3_600_000, scope="public")


def build(
    caller_of: Callable[[Context], Caller], progress_every_s: float = PROGRESS_EVERY_S
) -> Server[Any]:
    """A server whose calls come from `caller_of(request)`."""

    async def list_tools(
        _: Context, __: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[types.Tool.model_validate(tool_definition(tool)) for tool in TOOLS]
        )

    async def call_tool(
        context: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        caller = replace(caller_of(context), host_wait_s=_host_wait_s(context))
        async with report_progress(context, params, progress_every_s):
            return _result(await call(params.name, params.arguments, caller))

    async def read_resource(
        context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        return await content.read_resource(context, params.uri, caller_of(context))

    return Server(
        "halteres",
        version=halteres.__version__,
        title="Halteres",
        instructions=content.INSTRUCTIONS,
        cache_hints={
            "tools/list": _UNCHANGING,
            "prompts/list": _UNCHANGING,
            "resources/templates/list": _UNCHANGING,
        },
        get_tool_input_schema=lambda name: BY_NAME[name].input_schema()
        if name in BY_NAME
        else None,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=content.list_resources,
        on_list_resource_templates=content.list_templates,
        on_read_resource=read_resource,
        on_list_prompts=content.list_prompts,
        on_get_prompt=content.get_prompt,
    )


def _host_wait_s(context: Context) -> float | None:
    client = context.session.client_params
    if client is None:
        return None
    return host_wait_s(client.client_info.name)


def tool_definition(tool: Tool[...]) -> dict[str, Any]:
    """One tool, with all four hints: a client takes one that is absent for the worst."""
    return {
        "name": tool.name,
        "title": tool.title,
        "description": tool.description,
        "inputSchema": tool.input_schema(),
        "outputSchema": tool.output_schema(),
        "annotations": {
            "readOnlyHint": tool.hints.read_only,
            "destructiveHint": tool.hints.destructive,
            "idempotentHint": tool.hints.idempotent,
            "openWorldHint": tool.hints.open_world,
        },
    }


def _result(reply: Reply) -> types.CallToolResult:
    """An answer on this wire: compact JSON as text and as structure, then its pictures."""
    body = reply.for_agents
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    pictures = [
        types.ImageContent(data=data, mime_type="image/png")
        for file in reply.images
        if (data := base64_of(file))
    ]
    return types.CallToolResult(
        content=[types.TextContent(text=text), *pictures],
        structured_content=body,
        is_error=reply.failed,
    )


@asynccontextmanager
async def report_progress(
    context: Context, params: types.CallToolRequestParams, every_s: float
) -> AsyncIterator[None]:
    """Report progress while the block runs: seconds that went by, of those the call asked to
    wait.
    """

    async def report() -> None:
        began = time.monotonic()
        wait_s = (params.arguments or {}).get("wait_s")
        total = None
        if isinstance(wait_s, int | float):
            total = float(wait_s)
        while True:
            await asyncio.sleep(every_s)
            gone_by = time.monotonic() - began
            # Says nothing where the client gave no token.
            await context.session.report_progress(gone_by, total, f"{params.name}: {gone_by:.0f} s")

    task = asyncio.create_task(report(), name=f"progress of {params.name}")
    try:
        yield
    finally:
        task.cancel()
        # Neither raises what the task ended with nor takes our own cancellation for the task's.
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            _log.warning("The progress of %s could not be sent.", params.name, exc_info=error)


def begin() -> None:
    """Set this process up as a tool server: no torch, the log on stderr without secrets, the SDK's
    chatter off.
    """
    process.begin("mcp")
    logging.getLogger("mcp").setLevel(logging.WARNING)


def serve_stdio() -> None:
    """Serve on standard input and output until standard input ends; nothing but the protocol
    reaches the latter.
    """
    # Ctrl-C ends it at once: there is nothing to put in order, and the thread that reads cannot be
    # interrupted.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # the process has one client, from its beginning to its end
    draft = environ.agent_session() or f"mcp-{secrets.token_hex(4)}"
    caller = Caller(draft=draft, shown_alerts=ShownAlerts())
    _log.info("MCP on standard input and output; the draft is %s.", caller.draft)
    asyncio.run(_serve_stdio(caller))


async def _serve_stdio(caller: Caller) -> None:
    server = build(lambda _: caller)
    async with stdio_server() as (read, write), anyio.create_task_group() as tasks:
        # Descriptor 1 is stderr's in here: what was printed before, and waits in a buffer, goes
        # there too. Earlier, stdio_server would take stderr for the wire (mcp 2.3.0).
        sys.stdout.flush()
        sys.stdout = sys.stderr
        forwarded, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)

        async def answer_broken_lines() -> None:
            async with forwarded:
                async for message in read:
                    if (refusal := _parse_error(message)) is None:
                        await forwarded.send(message)
                    else:
                        await write.send(SessionMessage(refusal))

        tasks.start_soon(answer_broken_lines)
        await server.run(received, write, server.create_initialization_options())
    # the wire is back on descriptor 1: whatever a library prints while the process ends must not be
    os.dup2(2, 1)


# of which it is kept which alerts they were shown; the oldest is forgotten, and shown them again
MOST_SESSIONS = 64

SESSION = "x-halteres-session"  # header that names the draft a client works on, unless a call does


class Endpoint:
    """An ASGI app that speaks MCP at whatever path it is mounted; it answers while `running`
    holds.
    """

    def __init__(self, progress_every_s: float = PROGRESS_EVERY_S) -> None:
        self._sessions = StreamableHTTPSessionManager(build(self._caller, progress_every_s))
        self._shown_alerts: dict[str, ShownAlerts] = {}  # by MCP session, oldest first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._sessions.handle_request(scope, receive, send)

    def running(self) -> AbstractAsyncContextManager[None]:
        """Hold sessions and calls under way; at the end they are cancelled. Once only."""
        return self._sessions.run()

    def _caller(self, context: Context) -> Caller:
        request = context.request
        if not isinstance(request, Request):
            return Caller.own()
        caller = Caller.own()
        if draft := request.headers.get(SESSION):
            caller = Caller(draft=draft)
        # Revision 2026-07-28 has no sessions: nothing tells one client from another.
        session = request.headers.get(MCP_SESSION_ID_HEADER)
        if session is None:
            return caller
        shown = self._shown_alerts.setdefault(session, ShownAlerts())
        if len(self._shown_alerts) > MOST_SESSIONS:
            del self._shown_alerts[next(iter(self._shown_alerts))]
        return replace(caller, shown_alerts=shown)


def guarded(endpoint: Endpoint) -> Starlette:
    """The endpoint at /mcp, for requests of this machine that carry the token."""
    return Starlette(
        routes=[Route(PATH, endpoint)],
        middleware=[
            Middleware(Guard, refusal=refuse_elsewhere),
            Middleware(Guard, refusal=refuse_without_token),
        ],
        lifespan=lambda _: endpoint.running(),
    )


def serve_http(port: int) -> None:
    """Serve until a signal.

    Raises:
        Conflict: the port is taken.
        InvalidConfig: the token cannot be read or made.
    """
    token()  # a client must find it before its first request
    with loopback.open_listener(port) as listening:
        config = uvicorn.Config(
            guarded(Endpoint()),
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=2,  # a client's idle event stream never ends by itself
        )
        url = f"{loopback.url_of(listening)}{PATH}"
        _log.info(
            "MCP at %s; send `Authorization: Bearer` with the token in %s.",
            url,
            environ.home() / FILE,
        )
        asyncio.run(loopback.Server(config).serve(sockets=[listening]))


_ID = r'"id"\s*:\s*(?:(\d{1,15})|"([\w.:-]{1,100})")'
_AT_THE_BEGINNING: Final = re.compile(
    rf'\s*\{{(?:\s*"(?:jsonrpc|method)"\s*:\s*"[\w./]*"\s*,)*\s*{_ID}\s*[,}}]'
)
_AT_THE_END: Final = re.compile(rf'"jsonrpc"\s*:\s*"2\.0"\s*,\s*{_ID}\s*\}}\s*$')


def _parse_error(message: SessionMessage | Exception) -> types.JSONRPCError | None:
    """The answer to a line that is no JSON; None to a message. The SDK would drop the line, and its
    caller wait.
    """
    if not isinstance(message, ValidationError):
        return None
    first = message.errors(include_url=False, include_context=False)[0]
    if first["type"] != "json_invalid":
        return None
    why = f"This line cannot be read, and nothing was done: {first['msg']}."
    error = types.ErrorData(code=types.PARSE_ERROR, message=why)
    return types.JSONRPCError(jsonrpc="2.0", id=request_id(str(first["input"])), error=error)


def request_id(line: str) -> int | str | None:
    """The id of a request that cannot be read, where it stands before or after all that a request
    carries.

    >>> request_id('{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"id":8')
    7
    >>> request_id('{"method":"tools/call","params":{"id":8')
    """
    found = _AT_THE_BEGINNING.match(line) or _AT_THE_END.search(line[-200:])
    if found is None:
        return None
    if found[1]:
        return int(found[1])
    return found[2]
