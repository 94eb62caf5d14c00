"""How deep the arguments of a call may be nested.

Owns: the limit: what is deeper would end whatever walks through it by recursion.
Never: recurses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from halteres.errors import UserError

MAX_DEPTH: Final = 32


def check_depth(arguments: Any) -> None:
    """Raise UserError where values are nested deeper than MAX_DEPTH."""
    layer = [arguments]
    for _ in range(MAX_DEPTH):
        # Each value once: a few that hold each other twice would be as many as 2**MAX_DEPTH.
        layer = list({id(item): item for outer in layer for item in _items(outer)}.values())
    if layer:
        raise UserError("The arguments cannot be used.", f"They are nested deeper than {MAX_DEPTH} levels.")


def _items(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()
