"""A posted group read the long way: every number an object, with all the coercions of the original.

Owns: the ScoredData schema; numeric strings, integral floats, truth values, Python's NaN and Infinity; which keys with
our extensions' names are somebody else's.
Never: is in a hurry. Bodies as our own and the original's clients write them are read at a glance (`glance`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from halteres.errors import shortened
from halteres.trajectories.wire.contents import Outline, Problem
from halteres.trajectories.wire.leniency import coerced
from halteres.trajectories.wire.schema import UNREADABLE, Key, convert, refusal

DEEPEST = 200
"""Brackets within brackets. Readers of JSON give up somewhere below 1,000, and one group must not spoil a batch."""

MOST_VALUES = 4_000_000
"""Values of a body that become objects, at 150 bytes and 1 us each."""

BLANKS = b" \t\n\r"
"""What may stand before and behind a JSON value."""

LARGEST_TOKEN = 2**63
"""A token id beyond it is none: no trainer can hold it."""

Version = Annotated[int, msgspec.Meta(ge=-1, le=2**31)]
VersionTag = Version | list[tuple[Version, Version]]
Place = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Episodes = list[Place]
SpanTuple = tuple[Place, Place, Place, float]
"""sequence, start, stop, reward: see `types.Span`."""
Ints = list[list[int]]
Floats = list[list[float]]
T = TypeVar("T")
Maybe = T | None | UnsetType


class ScoredData(msgspec.Struct, kw_only=True):
    """POST /scored_data: G sequences, T_i tokens each; unknown keys are ignored.

    `policy_version` (one, or smallest and largest per sequence), `episodes` (which rollout of the group a sequence
    belongs to: 0, 1, ... in order), `spans` (turns and their rewards) and `halteres_key` are our extensions.
    """

    tokens: Ints
    masks: Ints
    scores: list[float]
    advantages: Maybe[Floats] = UNSET
    ref_logprobs: Maybe[Floats] = UNSET
    messages: Maybe[list[list[dict[str, Any]]]] = UNSET
    generation_params: Maybe[dict[str, Any]] = UNSET
    inference_logprobs: Maybe[Floats] = UNSET
    overrides: Maybe[list[dict[str, Any]]] = UNSET
    group_overrides: Maybe[dict[str, Any]] = UNSET
    images: Any = UNSET
    env_id: Maybe[int] = UNSET
    distill_token_ids: Maybe[list[Ints]] = UNSET
    distill_logprobs: Maybe[list[Floats]] = UNSET
    policy_version: Maybe[VersionTag] = UNSET
    episodes: Maybe[Episodes] = UNSET
    spans: Maybe[list[SpanTuple]] = UNSET
    halteres_key: Maybe[Key] = UNSET


EXTENSIONS = ("policy_version", "episodes", "spans")
"""Keys of ours that a batch element has where the group had them."""

KEYS = tuple(name for name in ScoredData.__struct_fields__ if name not in (*EXTENSIONS, "halteres_key"))
"""The 14 keys of a batch element."""

ARRAYS = ("masks", "inference_logprobs", "advantages", "ref_logprobs", "distill_token_ids", "distill_logprobs")
"""Those with a row per sequence, and an item per token."""

TEXTS = ("messages", "overrides", "generation_params", "group_overrides", "images")
"""Those of any form."""

LISTS = ("scores", "messages", "overrides")
"""Those with an item per sequence."""

_loose = msgspec.json.Decoder(ScoredData, strict=False)
_SHAPE = msgspec.inspect.type_info(ScoredData)
_OURS = {
    "policy_version": VersionTag | None,
    "episodes": Episodes | None,
    "spans": list[SpanTuple] | None,
    "halteres_key": str | None,
}
"""A text that cannot be a key is a mistake of a client of ours, which is told."""


def read(body: bytes) -> tuple[Outline, bytes]:
    """A body's outline, and its batch element; "null" for what JSON cannot say.

    Raises:
        Unprocessable: it does not fit the schema.
        RecursionError: it nests too deeply.
    """
    if holds_too_much(body):
        text = f"A body that must be read value by value may hold {MOST_VALUES} of them."
        raise refusal(msgspec.ValidationError(text), "body")
    group = _read(body)
    texts = [_given(getattr(group, name)) for name in TEXTS]
    if is_deep(texts):
        raise RecursionError
    element = _encode(group)
    return outline(group, None if element else _unsayable(group)), element or b"null"


def read_python(body: bytes, refused: Exception) -> Any:
    """What Python's reader makes of it, which accepts NaN; otherwise the first refusal stands."""
    if holds_too_much(body):
        raise refusal(refused, "body") from refused
    try:
        return json.loads(body.strip(BLANKS))  # which it would pass over at a tenth of the speed
    except (ValueError, RecursionError):
        raise refusal(refused, "body") from refused


def outline(group: ScoredData, unsayable: Problem | None = None) -> Outline:
    """What the checks look at."""
    arrays = {name: [len(row) for row in rows] for name in ARRAYS if (rows := _given(getattr(group, name)))}
    return Outline(
        tokens=[len(tokens) for tokens in group.tokens],
        arrays=arrays,
        lists={name: len(items) for name in LISTS if (items := _given(getattr(group, name)))},
        env_id=_given(group.env_id),
        version=_given(group.policy_version),
        episodes=_given(group.episodes) or (),
        spans=_given(group.spans) or (),
        key=_given(group.halteres_key),
        unsayable=unsayable,
    )


def holds_too_much(*texts: bytes) -> bool:
    """Whether texts of JSON would become more objects than one request may cost."""
    if sum(map(len, texts)) < MOST_VALUES:
        return False
    return sum(text.count(mark) for text in texts for mark in (b",", b"[", b"{")) > MOST_VALUES


def is_deep(value: Any) -> bool:
    """Whether a value nests deeper than every reader can read."""
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        level = [item for each in level for item in _inside(each)]
        if not level:
            return False
    return True


def _inside(value: Any) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in items if isinstance(item, dict | list)]


def missing_in(messages: Sequence[Sequence[dict[str, Any]]]) -> tuple[int, str] | None:
    """The first sequence with a message that lacks what every message must have, and what."""
    for index, conversation in enumerate(messages):
        for message in conversation:
            if missing := next((name for name in ("role", "content") if name not in message), None):
                return index, missing
    return None


def _read(body: bytes) -> ScoredData:
    """With coercions, unknown keys, and Python's NaN and Infinity, which are no JSON."""
    try:
        group = _loose.decode(body)
    except UNREADABLE as error:
        group = _convert(read_python(body, error))
    _check_messages(group)
    return group


def _check_messages(group: ScoredData) -> None:
    found = missing_in(_given(group.messages) or ())
    if found is not None:
        text = f"Object missing required field `{found[1]}` - at `$.messages[{found[0]}]`"
        raise refusal(msgspec.ValidationError(text), "body")


def _convert(values: Any) -> ScoredData:
    if isinstance(values, dict):
        values = _without_foreign(cast("dict[str, Any]", values))
    return convert(coerced(values, _SHAPE), ScoredData, "body")


def _without_foreign(values: dict[str, Any]) -> dict[str, Any]:
    """Without keys that are called as our extensions are and hold something else: unknown keys, to be ignored."""
    foreign = {name for name, kind in _OURS.items() if name in values and not _fits(values[name], kind)}
    return {name: value for name, value in values.items() if name not in foreign}


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind, strict=False)
    except (msgspec.ValidationError, UnicodeEncodeError):
        return False
    return True


def _unsayable(group: ScoredData) -> Problem:
    """What JSON cannot say in a body that was read the long way."""
    path = next(_not_finite(group), None)
    if path is None and _has_endless_token(group.tokens):
        return Problem("token", "A token id in it is beyond 64 bits.")
    if path is None:
        return Problem("text", "A text in it is no valid Unicode.")
    return Problem("not_finite", f"{path} is not a finite number.")


def _not_finite(group: ScoredData) -> Iterator[str]:
    for name in group.__struct_fields__:
        yield from _not_finite_in(getattr(group, name), name)


def _not_finite_in(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _not_finite_in(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _not_finite_in(item, f"{path}.{shortened(ascii(name)[1:-1], 40)}")


def _encode(group: ScoredData) -> bytes | None:
    if any(_not_finite(group)) or _has_endless_token(group.tokens):
        return None
    values = {name: _given(getattr(group, name)) for name in KEYS}
    values |= {name: value for name in EXTENSIONS if (value := getattr(group, name)) is not UNSET}
    try:
        return msgspec.json.encode(values)
    except UnicodeEncodeError:
        return None


def _has_endless_token(tokens: Ints) -> bool:
    return any(not -LARGEST_TOKEN <= token < LARGEST_TOKEN for row in tokens for token in row)


def _given(value: T | None | UnsetType) -> T | None:
    return None if isinstance(value, UnsetType) else value
