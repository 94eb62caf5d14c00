"""The MCP server: the table of tools, and small extras, on the SDK's low-level server.

Owns: which requests are answered, and how an answer of a tool looks on this wire.
Never: decides what a tool answers; lets an exception of one out (the protocol would make it an error of its own);
depends on a back channel to the client (revision 2026-07-28 has none).

One server speaks both revisions, 2025-11-25 and 2026-07-28: a client's first request decides. The SDK's high-level
server is not used: it drops arguments it does not know, and hides what went wrong (mcp 2.3.0).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import mcp_types as types
from mcp.server import Server, ServerRequestContext
from mcp.server.caching import CacheHint

import halteres
from halteres.agent.call import Reply, call
from halteres.agent.caller import Caller
from halteres.agent.faces.instructions import INSTRUCTIONS
from halteres.agent.faces.mcp import prompts, resources
from halteres.agent.faces.mcp.listing import described
from halteres.agent.faces.mcp.progress import reporting
from halteres.agent.faces.pictures import base64_of
from halteres.agent.table import BY_NAME, TOOLS

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
