"""One group: as many rollouts of one item as it needs, completed by bounded repetition.

`settle` is the one place where a failure becomes data.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from halteres.errors import HalteresError, RolloutFailed, SamplerFailed, ScorerFailed
from halteres.types import FailedRollout

log = logging.getLogger(__name__)

MOST_TRACEBACKS = 50  # of one process: foreign code may fail at a new place each time
_logged = set[tuple[str, str, int]]()

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
    """The failure without its exception; where foreign code raised, with its place. The first
    failure at a place goes to the log with its traceback.
    """
    cause = failure.__cause__
    frames = traceback.extract_tb(cause.__traceback__) if cause else []
    if cause is None or len(frames) < 2:
        prompt_tokens = failure.details.get("prompt_tokens", 0)
        return FailedRollout(code=failure.code, why=failure.sentence, prompt_tokens=prompt_tokens)
    last = frames[-1]
    place = (type(cause).__name__, last.filename, last.lineno or 0)
    if place not in _logged and len(_logged) < MOST_TRACEBACKS:
        _logged.add(place)
        log.warning("The first failure at this place:", exc_info=cause)
    where = f" (at {Path(last.filename).name}:{last.lineno})"
    return FailedRollout(code=failure.code, why=failure.sentence + where)


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
