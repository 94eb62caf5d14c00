"""Which item is rolled out, and every random number that follows from it.

Promise: a run that is repeated, or resumed at a step, draws the same items and asks for the same
samples, and so does its environment when it is started again within a step: what the batch holds
already has its key, and counts once.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import Literal, TypeVar

Split = Literal["train", "eval"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The place of one item: the `ordinal`-th that was drawn for the optimiser step after
    `step`.
    """

    seed: int  # of the run
    step: int  # batches delivered when it was drawn
    ordinal: int  # from 0 within the step
    split: Split = "train"
    # of the weights that sample it, where the run is deterministic; None: the newest
    version: int | None = None
    life: int = 0  # which of several environments of one name, on one trajectory server, draws it

    def rng(self) -> random.Random:
        """A fresh generator for drawing the item itself."""
        return random.Random(self._number("item"))  # noqa: S311 - tasks, not secrets

    def episode_rng(self) -> random.Random:
        """A fresh generator for an episode of the item: the same for every rollout of a group."""
        return random.Random(self._number("episode"))  # noqa: S311 - tasks, not secrets

    def sampling_seed(self, rollout: int, attempt: int, call: int) -> int:
        """The seed of one sampling request: 31 bits, so that every server takes it."""
        return self._number(f"sample/{rollout}/{attempt}/{call}") >> 33

    def _number(self, purpose: str) -> int:
        life = f"life {self.life}/" if self.life else ""  # the first life's numbers are on record
        name = (
            f"halteres/draws/1:{self.seed}/{self.split}/{self.step}/{self.ordinal}/{life}{purpose}"
        )
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def held_out_seeds(count: int) -> list[int]:
    """The seeds of held-out episodes, 32 bits each: the same for every run."""
    return [
        Draw(seed=0, step=0, ordinal=n, split="eval").rng().getrandbits(32) for n in range(count)
    ]


_draw: ContextVar[Draw | None] = ContextVar("halteres_draw", default=None)
_seeds: ContextVar[Iterator[int] | None] = ContextVar("halteres_seeds", default=None)


@contextmanager
def rolling_out(draw: Draw) -> Iterator[None]:
    """Inside, this task and the tasks that it starts work on the item of `draw`."""
    with _within(_draw, draw), one_rollout(0, 0):
        yield


@contextmanager
def one_rollout(rollout: int, attempt: int) -> Iterator[None]:
    """Inside, sampling seeds are those of the item's `rollout`-th rollout at its `attempt`-th
    attempt.
    """
    draw = _draw.get()
    with _within(
        _seeds,
        None if draw is None else (draw.sampling_seed(rollout, attempt, call) for call in count()),
    ):
        yield


@contextmanager
def _within(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def current_draw() -> Draw | None:
    """The draw of the item that is rolled out here; None outside of any."""
    return _draw.get()


def pinned_version() -> int | None:
    """The policy version that the running rollout is sampled by; None: the newest."""
    draw = _draw.get()
    return None if draw is None else draw.version


def episode_rng() -> random.Random:
    """A fresh generator for an episode of the item that is rolled out; outside of any, of the first
    of seed 0.
    """
    return (_draw.get() or Draw(seed=0, step=0, ordinal=0)).episode_rng()


def next_sampling_seed() -> int | None:
    """The seed of the running rollout's next sampling request; None outside of any."""
    seeds = _seeds.get()
    return None if seeds is None else next(seeds)
