"""The log of a tool server: on stderr, for standard output carries the protocol.

Owns: how much of the SDK's own chatter is kept.
Never: goes to standard output.
"""

from __future__ import annotations

import logging

from halteres import process


def begin() -> None:
    """Set this process up as a tool server: no torch, the log on stderr without secrets, the SDK's chatter off."""
    process.begin("mcp")
    logging.getLogger("mcp").setLevel(logging.WARNING)
