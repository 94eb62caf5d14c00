"""`uvicorn halteres.rl_api_server:app --port 8080`: the control server under the name that the
seed's client names.

`halteres serve control` starts the same app, and ends waiting calls in order. This machine alone is
served, whatever address uvicorn is given; nothing is done at import.
"""

from __future__ import annotations

import functools
import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from halteres import process


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI app; its first call is uvicorn's "startup"."""
    try:
        begun = _begun()
    except SystemExit as ended:
        if scope["type"] != "lifespan":
            raise
        # uvicorn takes what is raised for an app that has no startup, and would go on.
        await send({"type": "lifespan.startup.failed", "message": str(ended)})
        return
    await begun(scope, receive, send)


@functools.cache
def _begun() -> ASGIApp:
    from halteres.agent.transports.http_server import create_app

    process.begin("control")
    logging.getLogger("mcp").setLevel(logging.WARNING)
    # whose own handlers strike nothing out
    for name in ("uvicorn", "uvicorn.access", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    return create_app()
