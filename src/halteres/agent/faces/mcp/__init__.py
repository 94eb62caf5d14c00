"""The tools over MCP, on stdio and on streamable HTTP, both current revisions.

Owns: what an integrator calls; the sentence that says how to install the extra.
Never: imports `mcp` before it is asked for something.
"""

from __future__ import annotations

import importlib.util

from halteres.errors import UserError

PATH = "/mcp"


class NotInstalled(UserError):
    """The extra is missing."""

    code = "not_installed"


def require() -> None:
    """Raises NotInstalled where the extra `mcp` is missing."""
    if importlib.util.find_spec("mcp") is None:
        raise NotInstalled("MCP needs the package `mcp`.", "It is not installed.", "pip install 'halteres[mcp]'")
