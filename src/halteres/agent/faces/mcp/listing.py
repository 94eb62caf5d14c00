"""How a tool is described to MCP hosts.

Owns: the wire form of the table, as in `tools/list`.
Never: imports `mcp`: `halteres tools --format mcp` works without it.
"""

from __future__ import annotations

from typing import Any

from halteres.agent.tool import Tool


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
