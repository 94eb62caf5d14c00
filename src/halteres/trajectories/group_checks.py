"""What makes a group useless to every trainer, in sentences: its contents, and in strict mode its conventions too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from halteres.trajectories.scored_data import ScoredData, given, has_endless_token, not_finite

LARGEST_ENV_ID = 2**31
"""An id beyond it was never given by a server."""

CONTEXT = -100
"""In masks: not sampled."""

SENTINEL = 1.0
"""In inference_logprobs: not sampled. No probability has this logarithm."""

ARRAYS = ("masks", "inference_logprobs", "advantages", "ref_logprobs", "distill_token_ids", "distill_logprobs")
"""Fields with a row per sequence, and an item per token."""

OPTIONAL = ("advantages", "ref_logprobs")
"""Arrays that a trainer can do without: one that does not fit the tokens is no reason to keep a group from it."""

LISTS = ("scores", "messages", "overrides")
"""Fields with an item per sequence."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a group is set aside, or what is wrong with one that is served all the same."""

    code: str
    why: str


def find_problem(group: ScoredData) -> Problem | None:
    """The first thing that makes a group useless, as a sentence."""
    if not group.tokens or not all(group.tokens):
        return Problem("empty", "The group holds no sequence, or an empty one.")
    if group.env_id != possible_env_id(group):
        return Problem("env_id", f"env_id is {group.env_id}; ids are from 0 to {LARGEST_ENV_ID - 1}.")
    return next(_problems(group), None)


def find_flaw(group: ScoredData) -> Problem | None:
    """The first thing that is wrong with a group and keeps nobody from training on it, as a sentence."""
    why = next((why for name, why in _uneven_arrays(group) if name in OPTIONAL), None)
    return None if why is None else Problem("optional_lengths", why)


def why_not_json(group: ScoredData) -> Problem:
    """What JSON cannot say in a body that was read leniently."""
    if (path := not_finite(group)) is not None:
        return Problem("not_finite", f"{path} is not a finite number.")
    if has_endless_token(group):
        return Problem("token", "A token id in it is beyond 64 bits.")
    return Problem("text", "A text in it is no valid Unicode.")


def possible_env_id(group: ScoredData) -> int | None:
    """An id that a server may have given: no database has room for just any number."""
    return group.env_id if group.env_id is not None and 0 <= group.env_id < LARGEST_ENV_ID else None


def exceeds_batch(size: int, batch_size: int) -> Problem:
    """The problem of a group that no batch can hold."""
    return Problem("group_exceeds_batch", f"The group has {size} sequences, a batch {batch_size}.")


def stale(version: int, asked: int, bound: int) -> Problem:
    """The problem of a group that came too late."""
    return Problem("stale", f"Sampled by version {version}; the trainer is at {asked} and allows a lag of {bound}.")


def _problems(group: ScoredData) -> Iterator[Problem]:
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
    yield from _extension_problems(group, size)


def _extension_problems(group: ScoredData, size: int) -> Iterator[Problem]:
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
        if rows and (found := list(map(len, rows))) != lengths:
            yield name, _uneven(name, found, lengths)


def _uneven(name: str, found: Sequence[int], lengths: Sequence[int]) -> str:
    if len(found) != len(lengths):
        return f"{name} holds {len(found)} sequences, tokens {len(lengths)}."
    row = next(row for row, (one, other) in enumerate(zip(found, lengths, strict=True)) if one != other)
    return f"{name}[{row}] is {found[row]} long, tokens[{row}] {lengths[row]}."


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
        yield from _broken_logprobs(row, [mask == CONTEXT for mask in masks], logprobs)


def _broken_logprobs(row: int, is_context: Sequence[bool], logprobs: Sequence[float]) -> Iterator[Problem]:
    pairs = list(zip(is_context, logprobs, strict=True))
    if (at := _first((logprob == SENTINEL) != context for context, logprob in pairs)) is not None:
        yield Problem(
            "sentinel",
            f"inference_logprobs[{row}][{at}] is {logprobs[at]:g}, masks[{row}][{at}] "
            f"{'is' if is_context[at] else 'is not'} {CONTEXT}: {SENTINEL} marks context, and nothing else.",
        )
    if (at := _first(logprob > 0 and not context for context, logprob in pairs)) is not None:
        yield Problem("logprob", f"inference_logprobs[{row}][{at}] is {logprobs[at]:g}, above 0.")


def _first(found: Iterable[bool]) -> int | None:
    """The index of the first that is true."""
    return next((at for at, each in enumerate(found) if each), None)
