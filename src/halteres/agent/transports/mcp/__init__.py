"""The tools over MCP, on stdio and on streamable HTTP, both current revisions.

Everything below needs the package `mcp`; this module alone does not.
"""

from __future__ import annotations

import importlib.util

from halteres.errors import UserError

PATH = "/mcp"


class NotInstalled(UserError):
    """The extra is missing."""

    code = "not_installed"


def is_installed() -> bool:
    """Whether the extra `mcp` is there."""
    return importlib.util.find_spec("mcp") is not None


def require() -> None:
    """Raise NotInstalled where the extra `mcp` is missing."""
    if not is_installed():
        raise NotInstalled(
            "MCP needs the package `mcp`.", "It is not installed.", "pip install 'halteres[mcp]'"
        )
