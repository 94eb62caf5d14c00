"""A posted group: from bytes to a verdict and the bytes that the trainer will get.

Owns: the ScoredData schema, the checks of a group's contents, the JSON element kept for delivery.
Never: queues anything. A group that cannot train anybody is data with a `Problem`, not an error.

The usual body is decoded once to be checked and then kept as it came, with the absent keys appended as null: no token
becomes an object again until the trainer reads it. Bodies that need coercion are encoded anew.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from halteres.trajectories.records import Versions
from halteres.trajectories.wire.schema import refusal

LARGEST_ENV_ID = 2**31
"""An id beyond it was never given by a server."""

Version = Annotated[int, msgspec.Meta(ge=-1, le=2**31)]
Ints = list[list[int]]
Floats = list[list[float]]
T = TypeVar("T")
Maybe = T | None | UnsetType


class ScoredData(msgspec.Struct, kw_only=True):
    """POST /scored_data: G sequences, T_i tokens each; unknown keys are ignored.

    `policy_version` (one, or smallest and largest per sequence) and `halteres_key` are our extensions.
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
    policy_version: Maybe[Version | list[tuple[Version, Version]]] = UNSET
    halteres_key: Maybe[str] = UNSET


class ExactScoredData(ScoredData, forbid_unknown_fields=True):
    """The same without unknown keys: such a body can be kept as it came."""


KEYS = tuple(name for name in ScoredData.__struct_fields__ if name not in ("policy_version", "halteres_key"))
"""The 14 keys of a batch element."""

_exact = msgspec.json.Decoder(ExactScoredData)
_loose = msgspec.json.Decoder(ScoredData, strict=False)


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a group is set aside."""

    code: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A posted group that fits the schema."""

    element: bytes  # JSON object with all 14 keys; never a non-finite number
    size: int  # sequences
    env_id: int | None
    versions: Versions | None
    key: str | None
    fingerprint: int  # of the bytes as posted
    problem: Problem | None


def parse(body: bytes, key: str | None = None) -> Scored:
    """Read one posted group.

    Raises:
        Unprocessable: the body does not fit the schema.
    """
    group, element = _read(body)
    problem = _unsayable(group) if element is None else find_problem(group)
    return Scored(
        element=element or b"null",
        size=len(group.tokens),
        env_id=_given(group.env_id),
        versions=None if problem else _span(group),
        key=key or _given(group.halteres_key),
        fingerprint=zlib.crc32(body) << 31 ^ len(body),
        problem=problem,
    )


def parse_list(body: bytes) -> list[Scored]:
    """Read a list of posted groups; one that does not fit refuses them all."""
    try:
        bodies = msgspec.json.decode(body, type=list[msgspec.Raw])
    except msgspec.DecodeError as error:
        values = _python_json(body, error)
        if not isinstance(values, list):
            raise refusal(error, "body") from error
        return [parse(json.dumps(value).encode()) for value in values]
    return [parse(bytes(each)) for each in bodies]


def find_problem(group: ScoredData) -> Problem | None:
    """The first thing that makes a group useless, as a sentence."""
    if not group.tokens or not all(group.tokens):
        return Problem("empty", "The group holds no sequence, or an empty one.")
    env_id = _given(group.env_id)
    if env_id is not None and not 0 <= env_id < LARGEST_ENV_ID:
        return Problem("env_id", f"env_id is {env_id}; ids start at 0.")
    return next(_problems(group), None)


def _problems(group: ScoredData) -> Iterator[Problem]:
    size, lengths = len(group.tokens), [len(tokens) for tokens in group.tokens]
    for name in ("masks", "inference_logprobs", "advantages", "ref_logprobs", "distill_token_ids", "distill_logprobs"):
        rows: Sequence[Sequence[Any]] | None = _given(getattr(group, name))
        if rows and [len(row) for row in rows] != lengths:
            yield Problem("lengths", _uneven(name, [len(row) for row in rows], lengths))
    if not group.masks:
        yield Problem("lengths", f"masks holds no sequence, tokens {size}.")
    for name in ("scores", "messages", "overrides"):
        items: Sequence[Any] | None = _given(getattr(group, name))
        if (items or name == "scores") and len(items or ()) != size:
            yield Problem("lengths", f"{name} holds {len(items or ())} items, tokens {size} sequences.")
    versions = _given(group.policy_version)
    if isinstance(versions, list) and (len(versions) != size or any(low > high for low, high in versions)):
        yield Problem("policy_version", f"policy_version must be one number, or {size} pairs [smallest, largest].")


def _uneven(name: str, found: list[int], lengths: list[int]) -> str:
    if len(found) != len(lengths):
        return f"{name} holds {len(found)} sequences, tokens {len(lengths)}."
    row = next(row for row, (one, other) in enumerate(zip(found, lengths, strict=True)) if one != other)
    return f"{name}[{row}] is {found[row]} long, tokens[{row}] {lengths[row]}."


def _unsayable(group: ScoredData) -> Problem:
    """What JSON cannot say in a body that was read the long way."""
    path = next(_not_finite(group), None)
    if path is None:
        return Problem("text", "A text in it is no valid Unicode.")
    return Problem("not_finite", f"{path} is not a finite number.")


def _not_finite(group: ScoredData) -> Iterator[str]:
    for name in group.__struct_fields__:
        yield from _not_finite_in(getattr(group, name), name)


def _not_finite_in(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_finite_in(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _not_finite_in(item, f"{path}.{name}")


def _span(group: ScoredData) -> Versions | None:
    versions = _given(group.policy_version)
    if versions is None:
        return None
    if isinstance(versions, int):
        return versions, versions
    return min(low for low, _ in versions), max(high for _, high in versions)


def _read(body: bytes) -> tuple[ScoredData, bytes | None]:
    """The group, and its element; None where JSON cannot say it."""
    try:
        group = _exact.decode(body)
    except msgspec.DecodeError:
        group = _read_loosely(body)
        return group, _encode(group)
    _check_messages(group)
    if group.halteres_key is not UNSET:
        return group, _encode(group)
    absent = [name for name in KEYS if getattr(group, name) is UNSET]
    tail = "".join(f',"{name}":null' for name in absent)
    end = len(body.rstrip()) - 1
    return group, b"".join((memoryview(body)[:end], tail.encode(), b"}"))  # one copy: large ones cost page faults


def _read_loosely(body: bytes) -> ScoredData:
    """With coercions, unknown keys, and Python's NaN and Infinity, which are no JSON."""
    try:
        group = _loose.decode(body)
    except msgspec.DecodeError as error:
        group = _convert(_python_json(body, error))
    _check_messages(group)
    return group


def _check_messages(group: ScoredData) -> None:
    for index, messages in enumerate(_given(group.messages) or ()):
        for message in messages:
            missing = next((name for name in ("role", "content") if name not in message), None)
            if missing:
                text = f"Object missing required field `{missing}` - at `$.messages[{index}]`"
                raise refusal(msgspec.ValidationError(text), "body")


def _convert(values: Any) -> ScoredData:
    scores = values.get("scores") if isinstance(values, dict) else None
    if isinstance(scores, list):  # rewards are often true or false; the original takes them as 1 and 0
        values = {**values, "scores": [float(score) if isinstance(score, bool) else score for score in scores]}
    try:
        return msgspec.convert(values, ScoredData, strict=False)
    except msgspec.ValidationError as error:
        raise refusal(error, "body") from error


def _encode(group: ScoredData) -> bytes | None:
    if any(_not_finite(group)):
        return None
    values = {name: _given(getattr(group, name)) for name in KEYS}
    if group.policy_version is not UNSET:
        values["policy_version"] = group.policy_version
    try:
        return msgspec.json.encode(values)
    except UnicodeEncodeError:
        return None


def _python_json(body: bytes, refused: msgspec.DecodeError) -> Any:
    """What Python's reader makes of it, which accepts NaN; otherwise the first refusal stands."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise refusal(refused, "body") from refused


def _given(value: T | None | UnsetType) -> T | None:
    return None if value is UNSET else cast("T | None", value)
