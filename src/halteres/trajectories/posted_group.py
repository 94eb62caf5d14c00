"""A posted group: its schema, the batch element that is made of it, and what makes a group useless
to every trainer.

A body that needs no coercion is decoded to check it, and delivered as the bytes it came as: without
unknown keys, with absent ones as null, of a key that comes twice the last. Any other body is read
value by value, as the original reads it (numbers written as text, truth values, integral floats,
Python's NaN and Infinity), and written anew.

    body ──▶ strict ──────────────────────────────▶ ScoredData, element
               └── does not fit ──▶ lenient ──▶ the same, or a refusal

A group that cannot train anybody is data with a `Problem`, not an error.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, TypeVar, cast

import msgspec
from isal import isal_zlib
from msgspec import UNSET, Raw, UnsetType

from halteres.errors import shortened
from halteres.trajectories.records import Versions
from halteres.trajectories.schema import UNREADABLE, Key, Unprocessable, coerced, convert, refusal

# brackets within brackets: readers of JSON give up below 1,000, and one group must not spoil a
# batch
DEEPEST = 200
MOST_VALUES = 4_000_000  # values of a body that is read leniently, at 150 bytes and 1 us each
BLANKS = b" \t\n\r"  # what may stand before and behind a JSON value
LARGEST_TOKEN = 2**63  # a token id beyond it is none: no trainer can hold it
# bytes from which a body is read in a thread, which costs 0.1 ms; reading takes 2 ms up to here
LARGE = 512 * 1024
LARGE_LENIENT = 64 * 1024  # ... that needs coercions: at 80 ns per byte, 5 ms up to here
# objects of a list, its groups and those within them, from which a thread reads it: a group costs
# 40 us
MANY = 64
MOST_GROUPS = 16_384  # groups of one list: all are decided upon at once, while everybody else waits
# an id beyond it was never given by a server: no database has room for just any number
LARGEST_ENV_ID = 2**31
CONTEXT = -100  # in masks: not sampled
SENTINEL = 1.0  # in inference_logprobs: not sampled. No probability has this logarithm.
# Fields with a row per sequence, and an item per token; and those without which a trainer can do:
# that one of them does not fit the tokens is no reason to keep a group from it.
ARRAYS = (
    "masks",
    "inference_logprobs",
    "advantages",
    "ref_logprobs",
    "distill_token_ids",
    "distill_logprobs",
)
OPTIONAL = ("advantages", "ref_logprobs")
LISTS = ("scores", "messages", "overrides")  # fields with an item per sequence

T = TypeVar("T")
Version = Annotated[int, msgspec.Meta(ge=-1, le=2**31)]
# of all tokens, or the smallest and the largest per sequence
VersionTag = Version | list[tuple[Version, Version]]
Ordinal = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Episodes = list[Ordinal]
# sequence, start, stop, reward: see `types.Span`
SpanTuple = tuple[Ordinal, Ordinal, Ordinal, float]
Ints = list[list[int]]
Floats = list[list[float]]
Token = Annotated[int, msgspec.Meta(ge=-LARGEST_TOKEN, le=LARGEST_TOKEN - 1)]


class ScoredData(msgspec.Struct, kw_only=True):
    """POST /scored_data: G sequences, T_i tokens each; unknown keys are ignored.

    `policy_version` (one, or smallest and largest per sequence), `episodes` (which rollout of the
    group a sequence belongs to: 0, 1, ... in order), `spans` (turns and their rewards) and
    `halteres_key` are our extensions.
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


# keys of ours that a batch element has where the group had them
EXTENSIONS = ("policy_version", "episodes", "spans")
KEYS = tuple(
    name for name in ScoredData.__struct_fields__ if name not in (*EXTENSIONS, "halteres_key")
)
"""The 14 keys of a batch element."""


class _Strict(ScoredData, kw_only=True):
    """The same; a token beyond 64 bits is left to the lenient way, which says what is wrong."""

    tokens: list[list[Token]]


_fields = msgspec.json.Decoder(dict[str, Raw])
_strict = msgspec.json.Decoder(_Strict)
_SHAPE = msgspec.inspect.type_info(ScoredData)
_NULL = Raw(b"null")
_EPISODES, _SPANS = Episodes | None, list[SpanTuple] | None
# A text that cannot be a key is a mistake of a client of ours: it is refused, not passed over.
_OURS = {
    "policy_version": VersionTag | None,
    "episodes": _EPISODES,
    "spans": _SPANS,
    "halteres_key": str | None,
}


def read_strictly(body: bytes) -> tuple[ScoredData, bytes] | None:
    """A body that fits the schema as it is, and its batch element; None where it needs coercions,
    or fits not at all.

    Raises:
        RecursionError: it nests too deeply.
    """
    try:
        values = _fields.decode(body)
        names = (*KEYS, *(name for name in EXTENSIONS if name in values))
        parts = [
            part for name in names for part in (b',"%s":' % name.encode(), values.get(name, _NULL))
        ]
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
    """As `read_strictly`, with every coercion of the original; no element where JSON cannot say
    what the body says.

    Raises:
        Unprocessable: it does not fit the schema, or holds too many values.
        RecursionError: it nests too deeply.
    """
    values = read_values(body)
    # unknown keys that are called as our extensions are are ignored, too
    if isinstance(values, dict):
        posted = cast("dict[str, Any]", values)
        foreign = {
            name for name, kind in _OURS.items() if name in posted and not _fits(posted[name], kind)
        }
        values = {name: value for name, value in posted.items() if name not in foreign}
    group = convert(coerced(values, _SHAPE), ScoredData, "body")
    if (found := _without_role_or_content(group)) is not None:
        raise Unprocessable(
            [{"type": "missing", "loc": ["body", "messages", *found], "msg": "Field required"}]
        )
    _check_depth(group)
    if not_finite(group) is not None or has_endless_token(group):
        return group, None
    fields = [(name, getattr(group, name)) for name in (*KEYS, *EXTENSIONS)]
    try:
        return group, msgspec.json.encode(
            {name: value for name, value in fields if value is not UNSET}
        )
    except UnicodeEncodeError:
        return group, None


def read_values(body: bytes) -> Any:
    """What Python's reader makes of it, which accepts NaN.

    Raises:
        Unprocessable: it is no JSON, or would become more objects than one request may cost.
    """
    if (
        len(body) >= MOST_VALUES
        and sum(body.count(mark) for mark in (b",", b"[", b"{")) > MOST_VALUES
    ):
        text = f"A body that must be read value by value may hold {MOST_VALUES} of them."
        raise Unprocessable([{"type": "value_error", "loc": ["body"], "msg": text}])
    try:
        return json.loads(body.strip(BLANKS))  # which it would pass over at a tenth of the speed
    except ValueError as error:
        raise refusal(error, "body") from error


def not_finite(group: ScoredData) -> str | None:
    """The path of the first number that JSON cannot say."""
    return next(
        (
            path
            for name in group.__struct_fields__
            for path in _not_finite_in(getattr(group, name), name)
        ),
        None,
    )


def has_endless_token(group: ScoredData) -> bool:
    """Whether a token id is beyond 64 bits."""
    return any(not -LARGEST_TOKEN <= token < LARGEST_TOKEN for row in group.tokens for token in row)


def given(value: T | None | UnsetType) -> T | None:
    """None also where the key was absent."""
    return None if isinstance(value, UnsetType) else value


def _check_depth(group: ScoredData) -> None:
    """Raises RecursionError where a text nests deeper than every reader can read."""
    level: list[Any] = [
        group.messages,
        group.overrides,
        group.generation_params,
        group.group_overrides,
        group.images,
    ]
    for _ in range(DEEPEST):
        items = (
            each.values() if isinstance(each, dict) else each
            for each in level
            if isinstance(each, dict | list)
        )
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


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a group is set aside, or what is wrong with one that is served all the same."""

    code: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A posted group that fits the schema."""

    element: bytes  # JSON object with all 14 keys; never a non-finite number
    size: int  # rollouts: what it counts for in a batch
    env_id: int | None
    versions: Versions | None
    key: str | None
    fingerprint: int  # of the bytes as posted
    problem: Problem | None  # it is of no use
    flaw: Problem | None = None  # it is of use all the same


# -- reading


MOST_PARTS = 2**20
"""Lists, objects and their fields in one body: each takes 60 to 100 bytes and up to a microsecond,
and is two bytes of the body. Numbers count nothing.
"""

_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


class _Item(msgspec.Struct, gc=False):
    """What each item of a list must have at least."""

    tokens: Raw
    masks: Raw
    scores: Raw


_items = msgspec.json.Decoder(list[_Item])


def check_parts(body: bytes) -> None:
    """Raise Unprocessable where a body has more than MOST_PARTS parts: before any of them is
    made.
    """
    if len(body) < 2 * MOST_PARTS or _num_parts(body) <= MOST_PARTS:
        return
    # Texts may hold as many brackets as they like.
    if _num_parts(_TEXT.sub(b"", body)) > MOST_PARTS:
        text = (
            f"A body, which is read value by value, may hold {MOST_PARTS} lists, objects and "
            "fields: "
            "send fewer groups at once."
        )
        raise Unprocessable([{"type": "value_error", "loc": ["body"], "msg": text}])


def _num_parts(body: bytes) -> int:
    return sum(body.count(mark) for mark in (b"[", b"{", b":"))


def parse(body: bytes, key: str | None = None) -> Scored:
    """Read one posted group. Raises Unprocessable, or RecursionError where it nests too deeply."""
    check_parts(body)
    return _scored(body, key, *(read_strictly(body) or read_leniently(body)))


async def read(body: bytes, key: str | None = None) -> Scored:
    """As `parse`; what takes long, in a thread."""
    if len(body) > LARGE:
        return await asyncio.to_thread(parse, body, key)
    found = read_strictly(body)
    if found is None and len(body) > LARGE_LENIENT:
        return await asyncio.to_thread(parse, body, key)
    return _scored(body, key, *(found or read_leniently(body)))


async def read_list(body: bytes) -> list[Scored]:
    """As `parse_list`; what takes long, in a thread."""
    if len(body) > LARGE_LENIENT or body.count(b"{") > MANY:
        return await asyncio.to_thread(parse_list, body)
    return parse_list(body)


def parse_list(body: bytes) -> list[Scored]:
    """Read a list of posted groups; one that does not fit refuses them all. Raises as `parse`
    does.
    """
    check_parts(body)
    try:
        if len(body) > LARGE:
            # Ends at the first item that is no group: of any others there may be one in two bytes.
            _items.decode(body)
        bodies: list[Any] = msgspec.json.decode(body, type=list[Raw])
    except msgspec.ValidationError as error:
        raise refusal(error, "body") from error
    except UNREADABLE as error:
        values = read_values(body)
        if not isinstance(values, list):
            raise refusal(error, "body") from error
        bodies = values
    if len(bodies) > MOST_GROUPS:
        text = f"A list has at most {MOST_GROUPS} groups, not {len(bodies)}: send several."
        raise refusal(msgspec.ValidationError(text), "body")
    found = list[Scored]()
    for index, each in enumerate(bodies):
        try:
            found.append(parse(bytes(each) if isinstance(each, Raw) else json.dumps(each).encode()))
        except Unprocessable as refused:
            raise refused.of_item(index) from refused
    return found


def _scored(body: bytes, key: str | None, group: ScoredData, element: bytes | None) -> Scored:
    if element is not None:
        problem = next(_problems(group), None)
    elif (path := not_finite(group)) is not None:
        # JSON cannot say it.
        problem = Problem("not_finite", f"{path} is not a finite number.")
    elif has_endless_token(group):
        problem = Problem("token", "A token id in it is beyond 64 bits.")
    else:
        problem = Problem("text", "A text in it is no valid Unicode.")
    size, versions = len(group.tokens), None
    if problem is None:
        episodes = given(group.episodes)
        if episodes:
            size = episodes[-1] + 1
        versions = _versions(group)
    env_id = group.env_id
    if env_id is not None and not 0 <= env_id < LARGEST_ENV_ID:
        env_id = None
    flaw = None
    for name, why in _uneven_arrays(group):
        if name in OPTIONAL:
            flaw = Problem("optional_lengths", why)
            break
    if element is None:
        element = b"null"
    return Scored(
        element=element,
        size=size,
        env_id=env_id,
        versions=versions,
        key=key or given(group.halteres_key),
        fingerprint=isal_zlib.crc32(body) << 31 ^ len(body),
        problem=problem,
        flaw=flaw,
    )


def _versions(group: ScoredData) -> Versions | None:
    """The smallest and the largest policy version of its tokens; None: it says none."""
    tag = given(group.policy_version)
    if isinstance(tag, int):
        return tag, tag
    if isinstance(tag, list):
        return min(low for low, _ in tag), max(high for _, high in tag)
    return None


# -- what makes a group useless


def exceeds_batch(size: int, batch_size: int) -> Problem:
    """The problem of a group that no batch can hold."""
    return Problem("group_exceeds_batch", f"The group has {size} sequences, a batch {batch_size}.")


def stale(version: int, trainer: int, bound: int) -> Problem:
    """The problem of a group that came too late; `trainer`: the trainer's version."""
    return Problem(
        "stale",
        f"Sampled by version {version}; the trainer is at {trainer} and allows a lag of {bound}.",
    )


def too_far(versions: Versions | None, version: int | None, bound: int | None) -> Problem:
    """The problem of a group that waited until it was too old, or that a trainer went back
    behind.
    """
    trainer, lag = version or 0, bound or 0
    low, high = versions or (trainer, trainer)
    if low < trainer - lag:
        return stale(low, trainer, lag)
    return Problem(
        "ahead",
        f"Sampled by version {high}; the trainer is at {trainer}, and allows a distance of {lag}.",
    )


def _problems(group: ScoredData) -> Iterator[Problem]:
    if not group.tokens or not all(group.tokens):
        yield Problem("empty", "The group holds no sequence, or an empty one.")
        return
    if group.env_id is not None and not 0 <= group.env_id < LARGEST_ENV_ID:
        yield Problem(
            "env_id", f"env_id is {group.env_id}; ids are from 0 to {LARGEST_ENV_ID - 1}."
        )
    size = len(group.tokens)
    for name, why in _uneven_arrays(group):
        if name not in OPTIONAL:
            yield Problem("lengths", why)
    if not group.masks:
        yield Problem("lengths", f"masks holds no sequence, tokens {size}.")
    for name in LISTS:
        items: Sequence[object] = getattr(group, name) or ()
        if len(items) != size and (items or name == "scores"):
            yield Problem("lengths", f"{name} holds {len(items)} items, tokens {size} sequences.")
    versions, numbers = given(group.policy_version), given(group.episodes) or []
    if isinstance(versions, list) and (
        len(versions) != size or any(low > high for low, high in versions)
    ):
        yield Problem(
            "policy_version",
            f"policy_version must be one number, or {size} pairs [smallest, largest].",
        )
    if numbers and (
        len(numbers) != size
        or numbers[0] != 0
        or any(b - a not in (0, 1) for a, b in pairwise(numbers))
    ):
        yield Problem(
            "episodes", f"episodes must be {size} numbers, one per sequence: 0, 1, ... in order."
        )
    for sequence, start, stop, _ in given(group.spans) or ():
        if sequence >= size or not start < stop <= len(group.tokens[sequence]):
            why = (
                f"spans names tokens {start} to {stop} of sequence {sequence}, which the group "
                "does not have."
            )
            yield Problem("spans", why)


def _uneven_arrays(group: ScoredData) -> Iterator[tuple[str, str]]:
    """Names of arrays that do not fit the tokens, and what is wrong with each; an empty one counts
    as absent.
    """
    lengths = list(map(len, group.tokens))
    for name in ARRAYS:
        rows: Sequence[Sequence[object]] = getattr(group, name) or ()
        found = list(map(len, rows))
        if len(rows) not in (0, len(lengths)):
            yield name, f"{name} holds {len(found)} sequences, tokens {len(lengths)}."
        elif rows and found != lengths:
            row = next(
                row
                for row, (one, other) in enumerate(zip(found, lengths, strict=True))
                if one != other
            )
            yield name, f"{name}[{row}] is {found[row]} long, tokens[{row}] {lengths[row]}."


# -- strict mode: what a group must hold to beyond making sense (spec 5.7)


class _Numbers(msgspec.Struct):
    tokens: list[list[int]]
    masks: list[list[int]]
    inference_logprobs: list[list[float]] | None = None


_decoder = msgspec.json.Decoder(_Numbers)


def held_to_conventions(group: Scored, longest: int) -> Scored:
    """A group whose problem is the first convention that it breaks, where it has no other.

    `longest`: tokens that a sequence may have; 0 or less: any number.
    """
    if group.problem is not None:
        return group
    return replace(group, problem=next(_broken(_decoder.decode(group.element), longest), None))


def _broken(group: _Numbers, longest: int) -> Iterator[Problem]:
    for row, tokens in enumerate(group.tokens):
        if 0 < longest < len(tokens):
            yield Problem(
                "too_long", f"tokens[{row}] is {len(tokens)} long; the trainer takes {longest}."
            )
        if (at := _first(token < 0 for token in tokens)) is not None:
            yield Problem("token", f"tokens[{row}][{at}] is negative; ids start at 0.")
    for row, (masks, logprobs) in enumerate(
        zip(group.masks, group.inference_logprobs or (), strict=False)
    ):
        pairs = list(zip((mask == CONTEXT for mask in masks), logprobs, strict=True))
        if (
            at := _first((logprob == SENTINEL) != context for context, logprob in pairs)
        ) is not None:
            yield Problem(
                "sentinel",
                f"inference_logprobs[{row}][{at}] is {logprobs[at]:g}, masks[{row}][{at}] "
                f"{'is' if masks[at] == CONTEXT else 'is not'} {CONTEXT}: {SENTINEL} marks "
                "context, and nothing else.",
            )
        if (at := _first(logprob > 0 and not context for context, logprob in pairs)) is not None:
            yield Problem(
                "logprob", f"inference_logprobs[{row}][{at}] is {logprobs[at]:g}, above 0."
            )


def _first(found: Iterable[bool]) -> int | None:
    """The index of the first that is true."""
    return next((at for at, each in enumerate(found) if each), None)
