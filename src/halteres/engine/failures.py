"""Errors that only engines raise.

Owns: the class and the words for memory that ran out.
Never: recognises what a library raised for it; each engine knows its own.
"""

from __future__ import annotations

from halteres.errors import ServerError


class EngineOutOfMemory(ServerError):
    """The device or the machine had no memory left for one request; that request failed, the engine goes on."""

    code = "gpu_oom"


def out_of_memory(where: str, said: str) -> EngineOutOfMemory:
    """The error for a request whose work at `where` ended so; `said` is the library's own text."""
    first = said.strip().splitlines()[0].rstrip(".") if said.strip() else "no further words"
    return EngineOutOfMemory(
        f"The engine ran out of memory in {where}; this request was given up, others go on.",
        f"It said: {first}.",
        "Send shorter sequences, ask for fewer samples or fewer datums at once, or give the engine smaller "
        "micro-batches and caches.",
    )
