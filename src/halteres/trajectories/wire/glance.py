"""A posted group read at a glance: its numbers stay the bytes they came as.

Owns: the fast way of the usual body.
Never: decides that a body is wrong: whatever is unusual is left to `longhand`, and None says so.

simdjson reads every number (so there is no NaN, nothing infinite and no integer beyond 64 bits) onto a tape instead of
into objects; asking for a field as a buffer of one type says whether it holds nothing else.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import simdjson
from numpy.typing import NDArray

from halteres.trajectories.wire.contents import Outline
from halteres.trajectories.wire.longhand import (
    ARRAYS,
    EXTENSIONS,
    KEYS,
    Episodes,
    SpanTuple,
    VersionTag,
    holds_too_much,
    is_deep,
    missing_in,
)
from halteres.trajectories.wire.schema import Key

LARGEST = 4 * 1024 * 1024
"""Bytes of a body for which a parser is kept; it keeps several times as much memory."""

OPEN, BACKSLASH, FIVE, SMALL_B, CLOSE = b"[\\5b}"
_BEGINS = re.compile(rb"\s*\{")
_LOWER = 0x20

_INTEGERS = frozenset({"tokens", "masks", "distill_token_ids"})
_DEEP = frozenset({"distill_token_ids", "distill_logprobs"})
_KNOWN = frozenset({*KEYS, *EXTENSIONS})
_TEXTS = {
    "messages": msgspec.json.Decoder(list[list[dict[str, Any]]]),
    "overrides": msgspec.json.Decoder(list[dict[str, Any]]),
    "generation_params": msgspec.json.Decoder(dict[str, Any]),
    "group_overrides": msgspec.json.Decoder(dict[str, Any]),
    "images": msgspec.json.Decoder(Any),
    "policy_version": msgspec.json.Decoder(VersionTag),
    "episodes": msgspec.json.Decoder(Episodes),
    "spans": msgspec.json.Decoder(list[SpanTuple]),
}
"""What else may hold brackets. Its objects are made: that also says whether it nests deeper than clients can read."""
_all = msgspec.json.Decoder(dict[str, msgspec.Raw])
_key = msgspec.json.Decoder(Key | None)
_ITEM_BYTES = 8

Document = Any
"""simdjson's Object, Array, or a plain value; the first two live no longer than the parser's next document."""


class _Unusual(Exception):
    """Only objects can tell."""


_UNUSUAL = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, msgspec.DecodeError, _Unusual)
"""What simdjson says of anything that is not as asked for (a text where an array was meant has no `as_buffer`), and
what we do."""


class _Own(threading.local):
    """A parser of one thread: its memory is used again for the next document."""

    def __init__(self) -> None:
        self.parser = simdjson.Parser()


_own = _Own()


def read(body: bytes | memoryview) -> tuple[Outline, bytes] | None:
    """A body's outline, and its batch element; None where it must be read the long way."""
    if not _BEGINS.match(body):  # simdjson overlooks a byte order mark, which no element may hold
        return None
    try:
        return _parsed(body) or _parsed(*_stripped(body))
    except _UNUSUAL as unusual:
        unusual.__traceback__ = None  # its frames hold the document, and the parser takes no other until it is gone
        return None


def _parsed(body: bytes | memoryview, key: str | None = None) -> tuple[Outline, bytes] | None:
    """None where it holds more than a batch element does."""
    parser = _own.parser if len(body) <= LARGEST else simdjson.Parser()
    group: Document = parser.parse(body)
    names = list(group.keys())
    if len(set(names)) != len(names) or not _KNOWN.issuperset(names):
        return None
    return _outline(group, body, names, key), _element(body, names)


def _stripped(body: bytes | memoryview) -> tuple[bytes, str | None]:
    """A body without keys that nobody knows, of keys that come twice the last; and its `halteres_key`."""
    values = _all.decode(body)
    key = _key.decode(values["halteres_key"]) if "halteres_key" in values else None
    fields = [b'"%s":%s' % (name.encode(), values[name]) for name in values if name in _KNOWN]
    return b"{" + b",".join(fields) + b"}", key


def _outline(group: Document, body: bytes | memoryview, names: Sequence[str], key: str | None) -> Outline:
    values = {name: value for name in names if (value := group[name]) is not None}
    rows = {name: _lengths(values[name], name) for name in ("tokens", *ARRAYS) if name in values}
    texts = {name: _text(values[name]) for name in values.keys() & _TEXTS.keys()}
    plain = _plain(texts) if texts else {}
    lists = {"scores": _num_scores(values["scores"]), **_lists(plain)}
    if "masks" not in rows or _num_brackets(body, texts) != 1 + sum(map(_num_own_brackets, rows, rows.values())):
        raise _Unusual  # required; arrays within rows or scores
    return Outline(
        tokens=rows["tokens"],
        arrays={name: lengths for name, lengths in rows.items() if lengths and name != "tokens"},
        lists={name: num for name, num in lists.items() if num},
        env_id=_env_id(values.get("env_id")),
        version=plain.get("policy_version"),
        episodes=plain.get("episodes", ()),
        spans=plain.get("spans", ()),
        key=key,
    )


def _lengths(array: Document, name: str) -> list[int]:
    """Numbers, or lists of numbers, in each row."""
    rows = [row for row in array if type(row) is simdjson.Array]
    numbers = memoryview(array.as_buffer(of_type="i" if name in _INTEGERS else "d"))
    lengths = [len(row) for row in rows]
    if len(rows) != len(array) or (name not in _DEEP and sum(lengths) * _ITEM_BYTES != numbers.nbytes):
        raise _Unusual
    if name in _DEEP and any(type(position) is not simdjson.Array for row in rows for position in row):
        raise _Unusual
    return lengths


def _num_scores(scores: Document) -> int:
    return memoryview(scores.as_buffer(of_type="d")).nbytes // _ITEM_BYTES


def _text(value: Document) -> bytes:
    if isinstance(value, simdjson.Array | simdjson.Object):
        return cast(Document, value).mini
    return msgspec.json.encode(value)


def _plain(texts: Mapping[str, bytes]) -> dict[str, Any]:
    if holds_too_much(*texts.values()):
        raise _Unusual
    plain = {name: _TEXTS[name].decode(text) for name, text in texts.items()}
    if is_deep(plain):
        raise _Unusual
    return plain


def _lists(plain: Mapping[str, Any]) -> dict[str, int]:
    if missing_in(plain.get("messages", ())) is not None:
        raise _Unusual
    return {name: len(plain[name]) for name in ("messages", "overrides") if name in plain}


def _num_brackets(body: bytes | memoryview, texts: Mapping[str, bytes]) -> int:
    """How many open in the body, without those of its texts."""
    body_N = np.frombuffer(body, np.uint8)
    num_in_texts = sum(text.count(b"[") for text in texts.values())
    if num_in_texts and _has_escaped_bracket(body_N):
        raise _Unusual  # a text would count more than it has in the body, and hide those of a row
    return int(np.count_nonzero(body_N == OPEN)) - num_in_texts


def _has_escaped_bracket(body_N: NDArray[np.uint8]) -> bool:
    r"""Whether a `[` may be written as \u005b; searching for that text takes longer than all the rest."""
    found_N = (body_N[:-5] == BACKSLASH) & (body_N[4:-1] == FIVE) & (body_N[5:] | _LOWER == SMALL_B)
    return bool(found_N.any())


def _num_own_brackets(name: str, lengths: Sequence[int]) -> int:
    """As many as an array has at least, and has exactly if its rows hold nothing but numbers."""
    return 1 + len(lengths) + (sum(lengths) if name in _DEEP else 0)


def _env_id(value: Document) -> int | None:
    if value is not None and type(value) is not int:
        raise _Unusual
    return value


def _element(body: bytes | memoryview, names: Sequence[str]) -> bytes:
    """The body, with the absent keys as null; copied once: memory for large ones costs more than their bytes."""
    tail = "".join(f',"{name}":null' for name in KEYS if name not in names)
    end = len(body) - 1
    while body[end] != CLOSE:  # behind it are blanks
        end -= 1
    return b"".join((memoryview(body)[:end], tail.encode(), b"}"))
