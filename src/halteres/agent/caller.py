"""Who calls a tool.

Owns: the noun: which draft the call works on where it names none, through which face it came.
Never: authenticates anybody; a face does.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Where a call comes from."""

    draft: str = "default"  # handle of the draft it works on, unless the call names one
    face: str = "python"  # mcp, http, cli, python, hermes: for logs alone, no answer depends on it
