"""How long a checkpoint lives.

Owns: the bounds of a time to live, and the sentence for one that is out of them.
Never: removes anything.
"""

from __future__ import annotations

from halteres.errors import InvalidData

SHORTEST_S = 3600
LONGEST_S = 10 * 366 * 24 * 3600
"""Ten years, however many of them are leap years."""


def checked_ttl(ttl_s: int | None) -> int | None:
    """A time to live in seconds; None is for ever.

    Raises:
        InvalidData: shorter than an hour or longer than ten years.
    """
    if ttl_s is not None and not SHORTEST_S <= ttl_s <= LONGEST_S:
        raise InvalidData(
            f"A checkpoint cannot expire after {ttl_s} s.",
            f"ttl_seconds is {SHORTEST_S} (an hour) to {LONGEST_S} (ten years).",
            "Choose another, or leave it out: the checkpoint then stays until it is deleted.",
        )
    return ttl_s


def end_of_life(ttl_s: int | None, now: float) -> float | None:
    """When a checkpoint that is made now expires, unix s; None: never."""
    return None if ttl_s is None else now + ttl_s
