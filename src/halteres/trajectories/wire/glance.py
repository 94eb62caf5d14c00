"""A posted group read at a glance: its numbers stay the bytes they came as.

Owns: the fast way of the usual body.
Never: decides that a body is wrong: whatever is unusual is left to `longhand`, and None says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from halteres.trajectories.wire.arrays import row_lengths
from halteres.trajectories.wire.contents import Outline
from halteres.trajectories.wire.longhand import KEYS, Version, missing_in
from halteres.trajectories.wire.schema import UNREADABLE, Key

_ABSENT = Raw()
_NULLS = (b"", b"null")


class _Glance(msgspec.Struct, kw_only=True):
    """ScoredData, with everything that may be long left as it stands. Of a key that comes twice, the last counts."""

    tokens: Raw
    masks: Raw
    scores: list[float]
    advantages: Raw = _ABSENT
    ref_logprobs: Raw = _ABSENT
    messages: Raw = _ABSENT
    generation_params: Raw = _ABSENT
    inference_logprobs: Raw = _ABSENT
    overrides: Raw = _ABSENT
    group_overrides: Raw = _ABSENT
    images: Raw = _ABSENT
    env_id: int | None = None
    distill_token_ids: Raw = _ABSENT
    distill_logprobs: Raw = _ABSENT
    policy_version: Version | list[tuple[Version, Version]] | None | UnsetType = UNSET
    halteres_key: Key | None = None


_decoder = msgspec.json.Decoder(_Glance)
_messages = msgspec.json.Decoder(list[list[dict[str, Any]]])
_objects = msgspec.json.Decoder(list[dict[str, Any]])
_object = msgspec.json.Decoder(dict[str, Any])
_anything = msgspec.json.Decoder(Any)

_FLOATS = ("inference_logprobs", "advantages", "ref_logprobs")
_OBJECTS = {"generation_params": _object, "group_overrides": _object, "images": _anything}
_RAW = tuple(name for name in KEYS if name not in ("scores", "env_id"))


class _Unusual(Exception):
    """Only objects can tell."""


def read(body: bytes) -> tuple[Outline, bytes] | None:
    """A body's outline, and its batch element; None where it must be read the long way."""
    try:
        group = _decoder.decode(body)
        return _outline(group), _element(group)
    except (_Unusual, *UNREADABLE):
        return None


def _outline(group: _Glance) -> Outline:
    if any(_is_given(getattr(group, name)) for name in ("distill_token_ids", "distill_logprobs")):
        raise _Unusual
    arrays = {"masks": _rows(group.masks, integers=True)}
    arrays |= {name: _rows(raw, integers=False) for name in _FLOATS if _is_given(raw := getattr(group, name))}
    for name, decoder in _OBJECTS.items():
        if _is_given(raw := getattr(group, name)):
            decoder.decode(raw)  # numbers beyond a float's, broken text
    return Outline(
        tokens=_rows(group.tokens, integers=True),
        arrays=arrays,
        lists=dict(_lists(group)),
        env_id=group.env_id,
        version=None if isinstance(group.policy_version, UnsetType) else group.policy_version,
        key=group.halteres_key,
    )


def _rows(raw: Raw, *, integers: bool) -> list[int]:
    lengths = row_lengths(raw, integers=integers)
    if lengths is None:
        raise _Unusual
    return lengths.tolist()


def _lists(group: _Glance) -> Iterator[tuple[str, int]]:
    if group.scores:
        yield "scores", len(group.scores)
    if _is_given(group.messages):
        conversations = _messages.decode(group.messages)
        if missing_in(conversations) is not None:
            raise _Unusual
        if conversations:
            yield "messages", len(conversations)
    if _is_given(group.overrides) and (overrides := _objects.decode(group.overrides)):
        yield "overrides", len(overrides)


def _is_given(raw: Raw) -> bool:
    return len(memoryview(raw)) > len("null") or bytes(raw) not in _NULLS


def _element(group: _Glance) -> bytes:
    parts: list[bytes | Raw] = [b'{"scores":', msgspec.json.encode(group.scores)]
    parts += [b',"env_id":', msgspec.json.encode(group.env_id)]
    for name in _RAW:
        raw = getattr(group, name)
        parts += [b',"%s":' % name.encode(), raw if _is_given(raw) else b"null"]
    if group.policy_version is not UNSET:
        parts += [b',"policy_version":', msgspec.json.encode(group.policy_version)]
    parts.append(b"}")
    return b"".join(map(memoryview, parts))
