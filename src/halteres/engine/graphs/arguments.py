"""The arguments of a custom loss's operations: which forms they may have.

Owns: those forms and the sentences that name what has another one.
Never: decodes them (an engine does).

Numbers, texts and lists stand for themselves; anything else is an object with one key: ref, tuple, slice, ellipsis,
float, dtype, device, layout, memory_format.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from halteres.engine.graphs.names import ATTRIBUTES, DTYPES, KEYWORDS, OFF, PLACEMENT
from halteres.errors import InvalidData

MAX_VALUES = 1024  # in one node's arguments
MAX_DEPTH = 8  # of lists within lists
MAX_TEXT = 64


def check_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse arguments that are not of the forms above, or refer to a node that is not among the known ones.

    Raises:
        InvalidData: as said; its sentence begins with `where`.
    """
    leaves = [leaf for value in (*args, *kwargs.values()) for leaf in _leaves(value, where, 0)]
    if len(leaves) > MAX_VALUES:
        raise InvalidData(f"{where} has {len(leaves)} values in its arguments.", f"It may have {MAX_VALUES}.")
    check_references([name for kind, name in leaves if kind == "ref"], known, where)
    for key, value in kwargs.items():
        if key not in KEYWORDS | PLACEMENT | OFF or (key in OFF and value not in (None, False)):
            raise InvalidData(f"{where}: the argument '{key[:100]}' is not allowed here.")


def check_attribute(args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
    """Refuse an attribute that a graph may not read.

    Raises:
        InvalidData: it names those that it may.
    """
    kinds = [kind for value in args for kind, _ in _leaves(value, where, 0)]
    if kinds != ["ref", "plain"] or kwargs or args[1] not in ATTRIBUTES:
        wanted = _told(args[1]) if len(args) > 1 else "nothing"
        raise InvalidData(
            f"{where}: only the attributes {', '.join(sorted(ATTRIBUTES))} can be read.", f"This one reads {wanted}."
        )


def check_references(names: Sequence[Any], known: Collection[str], where: str) -> None:
    """Refuse names that no node before this one has.

    Raises:
        InvalidData: it names the first of them.
    """
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise InvalidData(f"{where} refers to '{str(name)[:100]}'.", "No node before it has that name.")


def _leaves(value: Any, where: str, depth: int) -> Iterator[tuple[str, Any]]:
    """The values within an argument, each with its kind."""
    if depth > MAX_DEPTH:
        raise InvalidData(f"{where}: an argument is nested more than {MAX_DEPTH} deep.")
    kind, held = "plain", value
    if isinstance(value, list):
        kind = "list"
    elif isinstance(value, dict):
        kind, held = _object(value, where)
    elif not _is_plain(value):
        raise InvalidData(f"{where}: {_told(value)} is not allowed as an argument.")
    yield kind, held
    for one in held if kind in ("list", "tuple", "slice") else ():
        yield from _leaves(one, where, depth + 1)


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    if isinstance(value, int):
        return abs(value) < 2**63
    return value is None or (isinstance(value, float) and math.isfinite(value))


def _object(value: Mapping[str, Any], where: str) -> tuple[str, Any]:
    """The one key of an object, and what it holds."""
    (kind, held), *others = [*value.items()] or [("", None)]
    sound = {
        "ref": isinstance(held, str),
        "tuple": isinstance(held, list),
        "slice": isinstance(held, list) and len(held) == 3,
        "ellipsis": held is True,
        "float": held in ("inf", "-inf", "nan"),
        "dtype": isinstance(held, str) and held in DTYPES,
        "device": isinstance(held, str) and len(held) <= MAX_TEXT,
        "layout": held == "strided",
        "memory_format": isinstance(held, str) and len(held) <= MAX_TEXT,
    }
    if others or not sound.get(kind, False):
        raise InvalidData(
            f"{where}: {_told(value)} is not allowed as an argument.", f"Objects have one key, of {', '.join(sound)}."
        )
    return kind, held


def _told(value: Any) -> str:
    """A value as a sentence names it; nothing of it is trusted to be short."""
    if isinstance(value, str):
        return f"'{value[:100]}'"
    if isinstance(value, dict):
        return "an object of " + (", ".join(f"'{str(key)[:30]}'" for key in [*value][:3]) or "no key")
    return f"a {type(value).__name__}" + (" out of range" if isinstance(value, int | float) else "")
