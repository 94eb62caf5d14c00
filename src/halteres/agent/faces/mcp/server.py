"""The MCP server: the table of tools, and small extras, on the SDK's low-level server.

Owns: which requests are answered, and how an answer of a tool looks on this wire.
Never: decides what a tool answers; lets an exception of one out (the protocol would make it an error of its own);
depends on a back channel to the client (revision 2026-07-28 has none).

One server speaks both revisions, 2025-11-25 and 2026-07-28: a client's first request decides. The SDK's high-level
server is not used: it drops arguments it does not know, and hides what went wrong (mcp 2.3.0).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self

import mcp_types as types
from mcp.server import Server, ServerRequestContext
from mcp.server.caching import CacheHint
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

import halteres
from halteres import process
from halteres.agent.call import Reply, call
from halteres.agent.caller import Caller
from halteres.agent.faces.functions import base64_of
from halteres.agent.faces.mcp import prompts, resources
from halteres.agent.faces.mcp.prompts import INSTRUCTIONS
from halteres.agent.table import BY_NAME, TOOLS
from halteres.agent.tool import Tool

_log = logging.getLogger(__name__)


def described(tool: Tool) -> dict[str, Any]:
    """One tool. All four hints are told: a host takes one that is absent for the worst."""
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


@asynccontextmanager
async def reporting(
    context: ServerRequestContext[Any, Any], params: types.CallToolRequestParams, every_s: float
) -> AsyncIterator[None]:
    """Report while the block runs: seconds that went by, of those the call asked to wait."""
    task = asyncio.create_task(_report(context, params, every_s), name=f"progress of {params.name}")
    try:
        yield
    finally:
        task.cancel()
        # Neither raises what the task ended with nor takes our own cancellation for the task's.
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            _log.warning("The progress of %s could not be told.", params.name, exc_info=error)


async def _report(context: ServerRequestContext[Any, Any], params: types.CallToolRequestParams, every_s: float) -> None:
    began = time.monotonic()
    wait_s = (params.arguments or {}).get("wait_s")
    total = float(wait_s) if isinstance(wait_s, int | float) else None
    while True:
        await asyncio.sleep(every_s)
        gone_by = time.monotonic() - began
        # Says nothing where the client gave no token.
        await context.session.report_progress(gone_by, total, f"{params.name}: {gone_by:.0f} s")


Context = ServerRequestContext[Any, Any]

PROGRESS_EVERY_S = 5.0
"""How often a client that gave a token hears that its call still waits."""

_FRESH_MS = 3_600_000
_UNCHANGING = CacheHint(ttl_ms=_FRESH_MS, scope="public")  # what depends on this version of the program alone


def build(caller_of: Callable[[Context], Caller], progress_every_s: float = PROGRESS_EVERY_S) -> Server[Any]:
    """A server whose calls come from `caller_of(request)`."""

    async def call_tool(context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        async with reporting(context, params, progress_every_s):
            return result(await call(params.name, params.arguments, caller_of(context)))

    async def read_resource(context: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        return await resources.read(context, params.uri, caller_of(context))

    return Server(
        "halteres",
        version=halteres.__version__,
        title="Halteres",
        instructions=INSTRUCTIONS,
        cache_hints={"tools/list": _UNCHANGING, "prompts/list": _UNCHANGING, "resources/templates/list": _UNCHANGING},
        get_tool_input_schema=lambda name: BY_NAME[name].input_schema() if name in BY_NAME else None,
        on_list_tools=_list_tools,
        on_call_tool=call_tool,
        on_list_resources=resources.listed,
        on_list_resource_templates=resources.templates,
        on_read_resource=read_resource,
        on_list_prompts=prompts.listed,
        on_get_prompt=prompts.get,
    )


async def _list_tools(_: Context, __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    return types.ListToolsResult(tools=[types.Tool.model_validate(described(tool)) for tool in TOOLS])


def result(reply: Reply) -> types.CallToolResult:
    """An answer on this wire: compact JSON as text and as structure, then its pictures."""
    body = reply.for_agents
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    pictures = [
        types.ImageContent(data=data, mime_type="image/png") for file in reply.images if (data := base64_of(file))
    ]
    return types.CallToolResult(
        content=[types.TextContent(text=text), *pictures],
        structured_content=body,
        is_error=reply.failed,
    )


def begin() -> None:
    """Set this process up as a tool server: no torch, the log on stderr without secrets, the SDK's chatter off."""
    process.begin("mcp")
    logging.getLogger("mcp").setLevel(logging.WARNING)


_ID = r'"id"\s*:\s*(?:(\d{1,15})|"([\w.:-]{1,100})")'
_AT_THE_BEGINNING: Final = re.compile(rf'\s*\{{(?:\s*"(?:jsonrpc|method)"\s*:\s*"[\w./]*"\s*,)*\s*{_ID}\s*[,}}]')
_AT_THE_END: Final = re.compile(rf'"jsonrpc"\s*:\s*"2\.0"\s*,\s*{_ID}\s*\}}\s*$')
_END_LENGTH = 200


class Answering:
    """What is read from a client, without the lines that are no JSON: those are answered."""

    def __init__(self, read: Any, write: Any) -> None:
        self._read, self._write = read, write

    @property
    def last_context(self) -> Any:
        """Of the sender, as the SDK's own streams tell it."""
        return getattr(self._read, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        """The next message that can be read."""
        while await self._is_answered(message := await self._read.receive()):
            pass
        return message

    async def aclose(self) -> None:
        """Close what is read from."""
        await self._read.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        while await self._is_answered(message := await anext(self._read)):
            pass
        return message

    async def _is_answered(self, message: SessionMessage | Exception) -> bool:
        if not isinstance(message, ValidationError) or (line := _broken(message)) is None:
            return False
        await self._write.send(SessionMessage(_refusal(line, message)))
        return True

    async def __aenter__(self) -> Self:
        await self._read.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> bool | None:
        return await self._read.__aexit__(exc_type, exc_val, exc_tb)


def request_id(line: str) -> int | str | None:
    """The id of a request that cannot be read, where it stands before or after all that a request carries.

    >>> request_id('{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"id":8')
    7
    >>> request_id('{"method":"tools/call","params":{"id":8')
    """
    found = _AT_THE_BEGINNING.match(line) or _AT_THE_END.search(line[-_END_LENGTH:])
    return None if found is None else int(found[1]) if found[1] else found[2]


def _broken(error: ValidationError) -> str | None:
    """The line, where it is no JSON; None where it is, and no message of the protocol."""
    first = error.errors(include_url=False, include_context=False)[0]
    return str(first["input"]) if first["type"] == "json_invalid" else None


def _refusal(line: str, error: ValidationError) -> types.JSONRPCError:
    why = error.errors(include_url=False)[0]["msg"]
    told = types.ErrorData(code=types.PARSE_ERROR, message=f"This line cannot be read, and nothing was done: {why}.")
    return types.JSONRPCError(jsonrpc="2.0", id=request_id(line), error=told)
