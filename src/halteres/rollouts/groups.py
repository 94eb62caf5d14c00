"""One group: as many rollouts of one item as it needs, completed by bounded repetition.

`settle` is the one place where a failure becomes data.
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from halteres.errors import HalteresError, RolloutFailed, SamplerFailed, ScorerFailed
from halteres.types import FailedRollout

T = TypeVar("T")

Round = Callable[[int, int], Awaitable[Sequence[T | FailedRollout]]]
"""(number of rollouts, attempt from 0) -> one outcome for each."""


class GroupFailed(RolloutFailed):
    """A group that could not be completed; `failures` says what went wrong in it, in order."""

    code = "group_failed"

    def __init__(self, failures: Sequence[FailedRollout], size: int) -> None:
        self.failures = tuple(failures)
        last = self.failures[-1].why if self.failures else "no rollout came back."
        super().__init__(f"A group of {size} could not be completed.", f"Last failure: {last}")


def as_data(failure: HalteresError) -> FailedRollout:
    """The failure without its exception; where foreign code raised, with its place."""
    frames = traceback.extract_tb(failure.__cause__.__traceback__) if failure.__cause__ else []
    place = f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno})" if len(frames) > 1 else ""
    return FailedRollout(code=failure.code, why=failure.sentence + place)


async def settle(attempt: Awaitable[T]) -> T | FailedRollout:
    """The attempt's result, or its failure as data. Cancellation and what is no failed rollout pass
    through.
    """
    try:
        return await attempt
    except RolloutFailed as failure:
        return as_data(failure)


async def complete(
    size: int, attempt: Round[T], retries: int
) -> tuple[list[T], list[FailedRollout]]:
    """Run rounds until `size` rollouts succeeded: the first asks for all, each further one for what
    is missing; the rollouts, and the attempts that failed.

    Raises:
        GroupFailed: rollouts were still missing after `retries` further rounds, or the sampler or a
            scorer gave up (they have retries of their own).
    """
    rollouts: list[T] = []
    failures: list[FailedRollout] = []
    for number in range(retries + 1):
        try:
            outcomes = await attempt(size - len(rollouts), number)
        except RolloutFailed as failure:
            failures.append(as_data(failure))
            if isinstance(failure, SamplerFailed | ScorerFailed):
                break
            continue
        failures += (outcome for outcome in outcomes if isinstance(outcome, FailedRollout))
        rollouts += (outcome for outcome in outcomes if not isinstance(outcome, FailedRollout))
        if len(rollouts) >= size:
            return rollouts, failures
    raise GroupFailed(failures, size)
