"""The tools over MCP on standard input and output.

Owns: that nothing but the protocol reaches standard output; the draft of this process.
Never: outlives its client, which ends it by closing standard input; ties a run to itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys

from mcp.server.stdio import stdio_server

from halteres.agent.caller import Caller
from halteres.agent.faces.mcp.server import Answering, build
from halteres.config import environ

_log = logging.getLogger(__name__)


def serve() -> None:
    """Serve until standard input ends."""
    # Ctrl-C ends it at once: there is nothing to put in order, and the thread that reads cannot be interrupted.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    caller = Caller(draft=environ.agent_session() or f"mcp-{secrets.token_hex(4)}", face="mcp")
    _log.info("MCP on standard input and output; the draft is %s.", caller.draft)
    asyncio.run(_serve(caller))


async def _serve(caller: Caller) -> None:
    server = build(lambda _: caller)
    async with stdio_server() as (read, write):
        # Descriptor 1 is stderr's in here: what was printed before, and waits in a buffer, goes there too. Earlier,
        # stdio_server would take stderr for the wire (mcp 2.3.0).
        sys.stdout.flush()
        sys.stdout = sys.stderr
        await server.run(Answering(read, write), write, server.create_initialization_options())
    os.dup2(2, 1)  # the wire is back on descriptor 1: whatever a library prints while the process ends must not be
