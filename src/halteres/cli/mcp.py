"""`halteres mcp`: the tools for hosts that speak MCP."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_PORT = 8765


def mcp(
    http: Annotated[bool, typer.Option("--http", help="Streamable HTTP instead of standard input and output.")] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1, with --http; 0 takes a free one.")
    ] = DEFAULT_PORT,
) -> None:
    """Serve the rl_* tools over MCP (`halteres install-agent` sets a host up to start this)."""
    from halteres.agent.faces import mcp as face

    face.require()
    from halteres.agent.faces.mcp import server

    server.begin()
    if http:
        from halteres.agent.faces.mcp.http import serve as serve_http

        serve_http(port)
    else:
        from halteres.agent.faces.mcp.stdio import serve as serve_stdio

        serve_stdio()
