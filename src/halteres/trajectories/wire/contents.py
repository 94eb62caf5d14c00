"""What makes a group useless, whoever asks for it.

Owns: the checks of a group's contents, in sentences; what of a group they look at.
Never: reads bytes (`glance` and `longhand` do), knows a run (`intake.fitness` does).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from halteres.trajectories.records import Versions

LARGEST_ENV_ID = 2**31
"""An id beyond it was never given by a server."""

VersionTag = int | Sequence[tuple[int, int]]
"""Of all tokens, or the smallest and the largest per sequence."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a group is set aside, or what is wrong with one that is served all the same."""

    code: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A group without its numbers."""

    tokens: Sequence[int]  # per sequence, how many
    arrays: Mapping[str, Sequence[int]] = field(default_factory=dict)  # the same of arrays beside them; no empty ones
    lists: Mapping[str, int] = field(default_factory=dict)  # items of lists with one per sequence; no empty ones
    env_id: int | None = None
    version: VersionTag | None = None
    episodes: Sequence[int] = ()  # per sequence, which rollout of the group it belongs to; none: each is one
    spans: Sequence[tuple[int, int, int, float]] = ()  # sequence, start, stop, reward
    key: str | None = None
    unsayable: Problem | None = None  # it cannot be said in JSON

    @property
    def num_rollouts(self) -> int:
        """What the group counts for in a batch."""
        return self.episodes[-1] + 1 if self.episodes else len(self.tokens)

    @property
    def versions(self) -> Versions | None:
        """The smallest and the largest policy version."""
        if self.version is None or isinstance(self.version, int):
            return None if self.version is None else (self.version, self.version)
        return min(low for low, _ in self.version), max(high for _, high in self.version)

    @property
    def possible_env_id(self) -> int | None:
        """An id that a server may have given: no database has room for just any number."""
        return self.env_id if self.env_id is not None and 0 <= self.env_id < LARGEST_ENV_ID else None


OPTIONAL = ("advantages", "ref_logprobs")
"""Arrays that a trainer can do without: one that does not fit the tokens is no reason to keep a group from it."""


def find_problem(group: Outline) -> Problem | None:
    """The first thing that makes a group useless, as a sentence."""
    if group.unsayable is not None:
        return group.unsayable
    if not group.tokens or not all(group.tokens):
        return Problem("empty", "The group holds no sequence, or an empty one.")
    if group.env_id != group.possible_env_id:
        return Problem("env_id", f"env_id is {group.env_id}; ids are from 0 to {LARGEST_ENV_ID - 1}.")
    return next(_problems(group), None)


def find_flaw(group: Outline) -> Problem | None:
    """The first thing that is wrong with a group and keeps nobody from training on it, as a sentence."""
    why = next((why for name, why in _uneven_arrays(group) if name in OPTIONAL), None)
    return None if why is None else Problem("optional_lengths", why)


def _problems(group: Outline) -> Iterator[Problem]:
    size = len(group.tokens)
    for name, why in _uneven_arrays(group):
        if name not in OPTIONAL:
            yield Problem("lengths", why)
    if "masks" not in group.arrays:
        yield Problem("lengths", f"masks holds no sequence, tokens {size}.")
    for name, num in {"scores": 0, **group.lists}.items():
        if num != size:
            yield Problem("lengths", f"{name} holds {num} items, tokens {size} sequences.")
    versions = group.version
    if not isinstance(versions, int | None) and (len(versions) != size or any(low > high for low, high in versions)):
        yield Problem("policy_version", f"policy_version must be one number, or {size} pairs [smallest, largest].")
    numbers = group.episodes
    if numbers and (len(numbers) != size or numbers[0] != 0 or any(b - a not in (0, 1) for a, b in pairwise(numbers))):
        yield Problem("episodes", f"episodes must be {size} numbers, one per sequence: 0, 1, ... in order.")
    for sequence, start, stop, _ in group.spans:
        if sequence >= size or not start < stop <= group.tokens[sequence]:
            why = f"spans names tokens {start} to {stop} of sequence {sequence}, which the group does not have."
            yield Problem("spans", why)


def _uneven_arrays(group: Outline) -> Iterator[tuple[str, str]]:
    """Names of arrays that do not fit the tokens, and what is wrong with each."""
    for name, lengths in group.arrays.items():
        if list(lengths) != list(group.tokens):
            yield name, _uneven(name, lengths, group.tokens)


def _uneven(name: str, found: Sequence[int], lengths: Sequence[int]) -> str:
    if len(found) != len(lengths):
        return f"{name} holds {len(found)} sequences, tokens {len(lengths)}."
    row = next(row for row, (one, other) in enumerate(zip(found, lengths, strict=True)) if one != other)
    return f"{name}[{row}] is {found[row]} long, tokens[{row}] {lengths[row]}."
