"""The body of a posted group as JSON: its schema, and the batch element that is made of it.

A body that needs no coercion is decoded to check it, and delivered as the bytes it came as: without unknown keys, with
absent ones as null, of a key that comes twice the last. Any other body is read value by value, as the original reads it
(numbers written as text, truth values, integral floats, Python's NaN and Infinity), and written anew.

    body ──▶ strict ──────────────────────────────▶ ScoredData, element
               └── does not fit ──▶ lenient ──▶ the same, or a refusal
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import UNSET, Raw, UnsetType

from halteres.errors import shortened
from halteres.trajectories.schema import UNREADABLE, Key, coerced, convert, refusal

DEEPEST = 200
"""Brackets within brackets. Readers of JSON give up somewhere below 1,000, and one group must not spoil a batch."""

MOST_VALUES = 4_000_000  # values of a body that is read leniently, at 150 bytes and 1 us each
BLANKS = b" \t\n\r"  # what may stand before and behind a JSON value
LARGEST_TOKEN = 2**63  # a token id beyond it is none: no trainer can hold it
T = TypeVar("T")
Version = Annotated[int, msgspec.Meta(ge=-1, le=2**31)]
VersionTag = Version | list[tuple[Version, Version]]  # of all tokens, or the smallest and the largest per sequence
Place = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Episodes = list[Place]
SpanTuple = tuple[Place, Place, Place, float]  # sequence, start, stop, reward: see `types.Span`
Ints = list[list[int]]
Floats = list[list[float]]
Token = Annotated[int, msgspec.Meta(ge=-LARGEST_TOKEN, le=LARGEST_TOKEN - 1)]


class ScoredData(msgspec.Struct, kw_only=True):
    """POST /scored_data: G sequences, T_i tokens each; unknown keys are ignored.

    `policy_version` (one, or smallest and largest per sequence), `episodes` (which rollout of the group a sequence
    belongs to: 0, 1, ... in order), `spans` (turns and their rewards) and `halteres_key` are our extensions.
    """

    tokens: Ints
    masks: Ints
    scores: list[float]
    advantages: Floats | None = None
    ref_logprobs: Floats | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: Floats | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    distill_token_ids: list[Ints] | None = None
    distill_logprobs: list[Floats] | None = None
    policy_version: VersionTag | None | UnsetType = UNSET
    episodes: Episodes | None | UnsetType = UNSET
    spans: list[SpanTuple] | None | UnsetType = UNSET
    halteres_key: Key | None | UnsetType = UNSET


EXTENSIONS = ("policy_version", "episodes", "spans")  # keys of ours that a batch element has where the group had them
KEYS = tuple(name for name in ScoredData.__struct_fields__ if name not in (*EXTENSIONS, "halteres_key"))
"""The 14 keys of a batch element."""


class _Strict(ScoredData, kw_only=True):
    """The same; a token beyond 64 bits is left to the lenient way, which says what is wrong."""

    tokens: list[list[Token]]


_fields = msgspec.json.Decoder(dict[str, Raw])
_strict = msgspec.json.Decoder(_Strict)
_SHAPE = msgspec.inspect.type_info(ScoredData)
_NULL = Raw(b"null")
_OURS = {
    "policy_version": VersionTag | None,
    "episodes": Episodes | None,
    "spans": list[SpanTuple] | None,
    "halteres_key": str | None,
}
"""A text that cannot be a key is a mistake of a client of ours: it is refused, not passed over."""


def read_strictly(body: bytes) -> tuple[ScoredData, bytes] | None:
    """A body that fits the schema as it is, and its batch element; None where it needs coercions, or fits not at all.

    Raises:
        RecursionError: it nests too deeply.
    """
    try:
        values = _fields.decode(body)
        names = (*KEYS, *(name for name in EXTENSIONS if name in values))
        parts = [part for name in names for part in (b',"%s":' % name.encode(), values.get(name, _NULL))]
        element = b"".join((b"{" + parts[0][1:], *parts[1:], b"}"))
        group = _strict.decode(element)
        if "halteres_key" in values:
            group.halteres_key = msgspec.json.decode(values["halteres_key"], type=Key | None)
    except UNREADABLE:
        return None
    if _without_role_or_content(group) is not None:
        return None
    _check_depth(group)
    return group, element


def read_leniently(body: bytes) -> tuple[ScoredData, bytes | None]:
    """As `read_strictly`, with every coercion of the original; no element where JSON cannot say what the body says.

    Raises:
        Unprocessable: it does not fit the schema, or holds too many values.
        RecursionError: it nests too deeply.
    """
    values = read_values(body)
    if isinstance(values, dict):  # unknown keys that are called as our extensions are are ignored, too
        posted = cast("dict[str, Any]", values)
        foreign = {name for name, kind in _OURS.items() if name in posted and not _fits(posted[name], kind)}
        values = {name: value for name, value in posted.items() if name not in foreign}
    group = convert(coerced(values, _SHAPE), ScoredData, "body")
    if (found := _without_role_or_content(group)) is not None:
        text = f"Object missing required field `{found[1]}` - at `$.messages[{found[0]}]`"
        raise refusal(msgspec.ValidationError(text), "body")
    _check_depth(group)
    if not_finite(group) is not None or has_endless_token(group):
        return group, None
    fields = [(name, getattr(group, name)) for name in (*KEYS, *EXTENSIONS)]
    try:
        return group, msgspec.json.encode({name: value for name, value in fields if value is not UNSET})
    except UnicodeEncodeError:
        return group, None


def read_values(body: bytes) -> Any:
    """What Python's reader makes of it, which accepts NaN.

    Raises:
        Unprocessable: it is no JSON, or would become more objects than one request may cost.
    """
    if len(body) >= MOST_VALUES and sum(body.count(mark) for mark in (b",", b"[", b"{")) > MOST_VALUES:
        text = f"A body that must be read value by value may hold {MOST_VALUES} of them."
        raise refusal(msgspec.ValidationError(text), "body")
    try:
        return json.loads(body.strip(BLANKS))  # which it would pass over at a tenth of the speed
    except ValueError as error:
        raise refusal(error, "body") from error


def not_finite(group: ScoredData) -> str | None:
    """The path of the first number that JSON cannot say."""
    return next((path for name in group.__struct_fields__ for path in _not_finite_in(getattr(group, name), name)), None)


def has_endless_token(group: ScoredData) -> bool:
    """Whether a token id is beyond 64 bits."""
    return any(not -LARGEST_TOKEN <= token < LARGEST_TOKEN for row in group.tokens for token in row)


def given(value: T | None | UnsetType) -> T | None:
    """None also where the key was absent."""
    return None if isinstance(value, UnsetType) else value


def _check_depth(group: ScoredData) -> None:
    """Raises RecursionError where a text nests deeper than every reader can read."""
    level: list[Any] = [group.messages, group.overrides, group.generation_params, group.group_overrides, group.images]
    for _ in range(DEEPEST):
        items = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [item for each in items for item in each if isinstance(item, dict | list)]
        if not level:
            return
    raise RecursionError


def _without_role_or_content(group: ScoredData) -> tuple[int, str] | None:
    """The first sequence with a message that lacks what every message must have, and what."""
    for index, conversation in enumerate(group.messages or ()):
        for message in conversation:
            if missing := next((name for name in ("role", "content") if name not in message), None):
                return index, missing
    return None


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind, strict=False)
    except (msgspec.ValidationError, UnicodeEncodeError):
        return False
    return True


def _not_finite_in(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _not_finite_in(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _not_finite_in(item, f"{path}.{shortened(ascii(name)[1:-1], 40)}")
