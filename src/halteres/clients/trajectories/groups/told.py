"""What the server tells of a group, and of its tokens.

Owns: the forms of GET /v1/groups as a client reads them; an element read leniently, because a group that was set aside
may be crooked.
Never: asks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import msgspec

PlaceName = Literal["queued", "buffered", "out", "delivered", "set_aside", "archived"]
PLACES: tuple[PlaceName, ...] = ("queued", "buffered", "out", "delivered", "set_aside", "archived")
WAITING: tuple[PlaceName, ...] = ("queued", "buffered", "out")
"""Places that a group leaves for another."""

CONTEXT = -100
"""The mask of a token that the policy was given, rather than sampled."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One group, as GET /v1/groups tells it."""

    id: int
    env_id: int | None
    size: int  # sequences
    num_bytes: int  # of the element
    received_at: float  # unix s
    place: PlaceName
    policy_version: tuple[int, int] | None  # smallest and largest
    reason: str | None = None  # code, where set aside, or served with a flaw
    why: str | None = None  # one sentence, as well
    batch_id: int | None = None
    element: msgspec.Raw = msgspec.Raw(b"")  # b"" where not asked for, b"null" where it is kept no more

    @property
    def has_tokens(self) -> bool:
        """What a trainer would get of it came along."""
        return bytes(self.element) not in (b"", b"null")


class Page(msgspec.Struct, frozen=True):
    """GET /v1/groups."""

    groups: list[Told]
    next: int | None  # the `after` of the page behind; None on the last


class Environment(msgspec.Struct, frozen=True):
    """One of GET /v1/diagnostics."""

    env_id: int
    name: str


class Diagnostics(msgspec.Struct, frozen=True):
    """GET /v1/diagnostics, as far as it is of use here."""

    environments: list[Environment]


class Element(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer gets of a group, as far as it is shown: G sequences, where nothing was set aside."""

    tokens: list[list[int]] = []
    masks: list[list[int]] = []
    scores: list[float] = []
    advantages: list[list[float]] | None = None
    inference_logprobs: list[list[float]] | None = None
    messages: Any = None


@dataclass(frozen=True)
class Group:
    """A group to be shown: what is known of it, whose it is, and its element where that is kept."""

    told: Told
    env_name: str  # harmless; "" where it has none, or an unknown one

    @cached_property
    def element(self) -> Element:
        """Read when it is looked at; an empty one where there is none."""
        if not self.told.has_tokens:
            return Element()
        return msgspec.json.decode(self.told.element, type=Element)

    @property
    def num_sequences(self) -> int:
        """Those that can be shown."""
        return len(self.element.tokens)

    @property
    def mean(self) -> float | None:
        """Of the scores."""
        return _mean(self.element.scores)

    def score(self, at: int) -> float | None:
        """Of a sequence."""
        scores = self.element.scores
        return scores[at] if at < len(scores) else None

    def mask(self, at: int) -> list[int]:
        """Of a sequence; as long as its tokens, whatever was posted."""
        masks, length = self.element.masks, len(self.element.tokens[at])
        mask = masks[at][:length] if at < len(masks) else []
        return mask + [CONTEXT] * (length - len(mask))

    def num_sampled(self, at: int) -> int:
        """Tokens of a sequence that the policy sampled."""
        mask = self.mask(at)
        return len(mask) - mask.count(CONTEXT)

    def logprobs(self, at: int) -> list[float] | None:
        """Of a sequence's tokens, as the policy sampled them; None where they do not fit."""
        return self._per_token(self.element.inference_logprobs, at)

    def advantage(self, at: int) -> float | None:
        """Mean advantage of a sequence's sampled tokens."""
        return self._mean_of_sampled(self._per_token(self.element.advantages, at), at)

    def mean_logprob(self, at: int) -> float | None:
        """Mean log-probability of a sequence's sampled tokens."""
        return self._mean_of_sampled(self.logprobs(at), at)

    def _per_token(self, rows: list[list[float]] | None, at: int) -> list[float] | None:
        fits = rows is not None and at < len(rows) and len(rows[at]) == len(self.element.tokens[at])
        return rows[at] if rows is not None and fits else None

    def _mean_of_sampled(self, values: list[float] | None, at: int) -> float | None:
        masked = zip(values or (), self.mask(at), strict=False)
        return _mean([value for value, mask in masked if mask != CONTEXT])

    @property
    def extremes(self) -> tuple[int, ...]:
        """The best and the worst sequence, the first of each; one where all are alike."""
        scores = self.element.scores[: self.num_sequences]
        if not scores:
            return (0,) if self.num_sequences else ()
        best, worst = scores.index(max(scores)), scores.index(min(scores))
        return (best,) if best == worst else (best, worst)


def _mean(values: Sequence[float]) -> float | None:
    """None of no values. A sum that is too large for a float has a mean all the same."""
    if not values:
        return None
    total = sum(values)
    return total / len(values) if math.isfinite(total) else sum(value / len(values) for value in values)
