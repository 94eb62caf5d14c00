"""Progress of a call that waits.

Owns: that a client which gave a progress token hears, now and then, that its call is alive.
Never: knows what a tool waits for; is heard by a client that did not ask; spoils a call whose progress cannot be told.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
from mcp.server import ServerRequestContext

_log = logging.getLogger(__name__)


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
