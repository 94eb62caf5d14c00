"""The tools over MCP, on stdio and on streamable HTTP, both current revisions.

Owns: what an integrator calls; the sentence that says how to install the extra.
Never: imports `mcp` before it is asked for something.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from halteres.errors import UserError

if TYPE_CHECKING:
    from halteres.agent.faces.mcp.http import Endpoint

PATH = "/mcp"


class NotInstalled(UserError):
    """The extra is missing."""

    code = "not_installed"


def require() -> None:
    """Raises NotInstalled where the extra `mcp` is missing."""
    if importlib.util.find_spec("mcp") is None:
        raise NotInstalled("MCP needs the package `mcp`.", "It is not installed.", "pip install 'halteres[mcp]'")


def http_app() -> Endpoint:
    """The tools as an ASGI app for any path; it answers while `async with app.running()` holds.

    It asks nobody who they are: mount it behind a guard.

        app = http_app()
        Route("/mcp", TokenOnly(app))  # a Route, not a Mount, which would redirect /mcp to /mcp/
        # and, in the lifespan of what it is mounted in:
        async with app.running(): ...

    Raises:
        NotInstalled: the extra is missing.
    """
    require()
    from halteres.agent.faces.mcp.http import Endpoint

    return Endpoint()
