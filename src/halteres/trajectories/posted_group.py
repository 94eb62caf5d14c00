"""A posted group: what the server keeps of it, and what makes a group useless to every trainer, in sentences.

A group that cannot train anybody is data with a `Problem`, not an error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
from isal import isal_zlib

from halteres.trajectories import scored_data
from halteres.trajectories.records import Versions
from halteres.trajectories.schema import UNREADABLE, Unprocessable, refusal
from halteres.trajectories.scored_data import ScoredData, given, has_endless_token, not_finite

LARGE = 512 * 1024  # bytes from which a body is read in a thread, which costs 0.1 ms; reading takes 2 ms up to here
LARGE_LENIENT = 64 * 1024
"""Bytes from which a body that needs coercions is read in a thread: at 80 ns per byte, 5 ms up to here."""

MANY = 64
"""Objects of a list, its groups and those within them, from which a thread reads it: a group costs 40 us and more."""

MOST_GROUPS = 16_384  # groups of one list: all are decided upon at once, while everybody else waits
LARGEST_ENV_ID = 2**31  # an id beyond it was never given by a server: no database has room for just any number
CONTEXT = -100  # in masks: not sampled
SENTINEL = 1.0  # in inference_logprobs: not sampled. No probability has this logarithm.
ARRAYS = ("masks", "inference_logprobs", "advantages", "ref_logprobs", "distill_token_ids", "distill_logprobs")
"""Fields with a row per sequence, and an item per token."""

OPTIONAL = ("advantages", "ref_logprobs")
"""Arrays that a trainer can do without: one that does not fit the tokens is no reason to keep a group from it."""

LISTS = ("scores", "messages", "overrides")  # fields with an item per sequence


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


# -- reading -----------------------------------------------------------------------------------------------------------


def parse(body: bytes, key: str | None = None) -> Scored:
    """Read one posted group.

    Raises:
        Unprocessable: the body does not fit the schema.
        RecursionError: it nests too deeply.
    """
    return _scored(body, key, *(scored_data.read_strictly(body) or scored_data.read_leniently(body)))


async def read(body: bytes, key: str | None = None) -> Scored:
    """As `parse`; what takes long, in a thread."""
    if len(body) > LARGE:
        return await asyncio.to_thread(parse, body, key)
    found = scored_data.read_strictly(body)
    if found is None and len(body) > LARGE_LENIENT:
        return await asyncio.to_thread(parse, body, key)
    return _scored(body, key, *(found or scored_data.read_leniently(body)))


async def read_list(body: bytes) -> list[Scored]:
    """As `parse_list`; what takes long, in a thread."""
    if len(body) > LARGE_LENIENT or body.count(b"{") > MANY:
        return await asyncio.to_thread(parse_list, body)
    return parse_list(body)


def parse_list(body: bytes) -> list[Scored]:
    """Read a list of posted groups; one that does not fit refuses them all.

    Raises:
        Unprocessable: it is no list, or too long; a group does not fit the schema.
        RecursionError: it nests too deeply.
    """
    try:
        bodies: list[Any] = msgspec.json.decode(body, type=list[msgspec.Raw])
    except UNREADABLE as error:
        values = scored_data.read_values(body)
        if not isinstance(values, list):
            raise refusal(error, "body") from error
        bodies = values
    if len(bodies) > MOST_GROUPS:
        text = f"A list has at most {MOST_GROUPS} groups, not {len(bodies)}: send several."
        raise refusal(msgspec.ValidationError(text), "body")
    found = list[Scored]()
    for index, each in enumerate(bodies):
        try:
            found.append(parse(bytes(each) if isinstance(each, msgspec.Raw) else json.dumps(each).encode()))
        except Unprocessable as refused:
            raise refused.of_item(index) from refused
    return found


def _scored(body: bytes, key: str | None, group: ScoredData, element: bytes | None) -> Scored:
    problem = next(_problems(group), None) if element is not None else _why_not_json(group)
    episodes, tag = given(group.episodes), given(group.policy_version)
    versions = (tag, tag) if isinstance(tag, int) else None
    if isinstance(tag, list) and problem is None:
        versions = min(low for low, _ in tag), max(high for _, high in tag)
    flaw = next((why for name, why in _uneven_arrays(group) if name in OPTIONAL), None)
    return Scored(
        element=b"null" if element is None else element,
        size=len(group.tokens) if problem or not episodes else episodes[-1] + 1,
        env_id=group.env_id if group.env_id is not None and 0 <= group.env_id < LARGEST_ENV_ID else None,
        versions=None if problem else versions,
        key=key or given(group.halteres_key),
        fingerprint=isal_zlib.crc32(body) << 31 ^ len(body),
        problem=problem,
        flaw=None if flaw is None else Problem("optional_lengths", flaw),
    )


# -- what makes a group useless ----------------------------------------------------------------------------------------


def exceeds_batch(size: int, batch_size: int) -> Problem:
    """The problem of a group that no batch can hold."""
    return Problem("group_exceeds_batch", f"The group has {size} sequences, a batch {batch_size}.")


def stale(version: int, asked: int, bound: int) -> Problem:
    """The problem of a group that came too late."""
    return Problem("stale", f"Sampled by version {version}; the trainer is at {asked} and allows a lag of {bound}.")


def too_far(versions: Versions | None, version: int | None, bound: int | None) -> Problem:
    """The problem of a group that waited until it was too old, or that a trainer went back behind."""
    asked, lag = version or 0, bound or 0
    low, high = versions or (asked, asked)
    if low < asked - lag:
        return stale(low, asked, lag)
    return Problem("ahead", f"Sampled by version {high}; the trainer is at {asked}, and allows a distance of {lag}.")


def _why_not_json(group: ScoredData) -> Problem:
    """What JSON cannot say in a body that was read leniently."""
    if (path := not_finite(group)) is not None:
        return Problem("not_finite", f"{path} is not a finite number.")
    if has_endless_token(group):
        return Problem("token", "A token id in it is beyond 64 bits.")
    return Problem("text", "A text in it is no valid Unicode.")


def _problems(group: ScoredData) -> Iterator[Problem]:
    if not group.tokens or not all(group.tokens):
        yield Problem("empty", "The group holds no sequence, or an empty one.")
        return
    if group.env_id is not None and not 0 <= group.env_id < LARGEST_ENV_ID:
        yield Problem("env_id", f"env_id is {group.env_id}; ids are from 0 to {LARGEST_ENV_ID - 1}.")
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
    if isinstance(versions, list) and (len(versions) != size or any(low > high for low, high in versions)):
        yield Problem("policy_version", f"policy_version must be one number, or {size} pairs [smallest, largest].")
    if numbers and (len(numbers) != size or numbers[0] != 0 or any(b - a not in (0, 1) for a, b in pairwise(numbers))):
        yield Problem("episodes", f"episodes must be {size} numbers, one per sequence: 0, 1, ... in order.")
    for sequence, start, stop, _ in given(group.spans) or ():
        if sequence >= size or not start < stop <= len(group.tokens[sequence]):
            why = f"spans names tokens {start} to {stop} of sequence {sequence}, which the group does not have."
            yield Problem("spans", why)


def _uneven_arrays(group: ScoredData) -> Iterator[tuple[str, str]]:
    """Names of arrays that do not fit the tokens, and what is wrong with each; an empty one counts as absent."""
    lengths = list(map(len, group.tokens))
    for name in ARRAYS:
        rows: Sequence[Sequence[object]] = getattr(group, name) or ()
        found = list(map(len, rows))
        if len(rows) not in (0, len(lengths)):
            yield name, f"{name} holds {len(found)} sequences, tokens {len(lengths)}."
        elif rows and found != lengths:
            row = next(row for row, (one, other) in enumerate(zip(found, lengths, strict=True)) if one != other)
            yield name, f"{name}[{row}] is {found[row]} long, tokens[{row}] {lengths[row]}."


# -- strict mode: what a group must hold to beyond making sense (spec 5.7) ---------------------------------------------


class _Numbers(msgspec.Struct):
    tokens: list[list[int]]
    masks: list[list[int]]
    inference_logprobs: list[list[float]] | None = None


_decoder = msgspec.json.Decoder(_Numbers)


def broken_convention(element: bytes, longest: int) -> Problem | None:
    """The first convention that a batch element breaks.

    Args:
        element: of a group whose arrays fit each other.
        longest: tokens that a sequence may have; 0 or less: any number.
    """
    return next(_broken(_decoder.decode(element), longest), None)


def _broken(group: _Numbers, longest: int) -> Iterator[Problem]:
    for row, tokens in enumerate(group.tokens):
        if 0 < longest < len(tokens):
            yield Problem("too_long", f"tokens[{row}] is {len(tokens)} long; the trainer takes {longest}.")
        if (at := _first(token < 0 for token in tokens)) is not None:
            yield Problem("token", f"tokens[{row}][{at}] is negative; ids start at 0.")
    for row, (masks, logprobs) in enumerate(zip(group.masks, group.inference_logprobs or (), strict=False)):
        pairs = list(zip((mask == CONTEXT for mask in masks), logprobs, strict=True))
        if (at := _first((logprob == SENTINEL) != context for context, logprob in pairs)) is not None:
            yield Problem(
                "sentinel",
                f"inference_logprobs[{row}][{at}] is {logprobs[at]:g}, masks[{row}][{at}] "
                f"{'is' if masks[at] == CONTEXT else 'is not'} {CONTEXT}: {SENTINEL} marks context, and nothing else.",
            )
        if (at := _first(logprob > 0 and not context for context, logprob in pairs)) is not None:
            yield Problem("logprob", f"inference_logprobs[{row}][{at}] is {logprobs[at]:g}, above 0.")


def _first(found: Iterable[bool]) -> int | None:
    """The index of the first that is true."""
    return next((at for at, each in enumerate(found) if each), None)
