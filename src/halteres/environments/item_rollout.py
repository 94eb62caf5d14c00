"""One item of `serve` or `process`, from drawn to settled: groups to send, groups dropped for a
reason, or failed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from halteres.environments import heartbeat
from halteres.environments.base import Backlog, BaseEnv
from halteres.environments.quarantine import Quarantine
from halteres.environments.records import finish_of
from halteres.environments.scored import ScoredDataGroup, check, rollouts_of, scores_of
from halteres.environments.scoring import score_group
from halteres.errors import (
    EnvironmentFailed,
    EnvironmentGaveUp,
    HalteresError,
    boundary,
    shortened,
)
from halteres.rollouts.groups import GroupFailed, as_data
from halteres.rollouts.rng import Draw, rolling_out
from halteres.rollouts.sampling_clock import sampling_measured
from halteres.types import FailedRollout

MOST_SHOWN = 800  # characters of a failure in an error

MOST_SKIPPED = 1000
"""Quarantined items in a row after which nothing is left to draw."""


class RolloutTimedOut(EnvironmentFailed):
    """A group, or the drawing of its item, took longer than `worker_timeout`."""

    code = "env_timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnItem:
    """An item and the place of its draw."""

    draw: Draw
    item: Any
    # why it is not rolled out: an earlier life of the environment hung at it
    failure: FailedRollout | None = None

    @property
    def batch_step(self) -> int:
        """The optimiser step that its groups are for, from 1."""
        return self.draw.step + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledItem:
    """What became of an item. It failed if `failures` is not empty; failures inside a group lie in
    the group.
    """

    drawn: DrawnItem
    groups: tuple[ScoredDataGroup, ...] = ()
    dropped: tuple[tuple[ScoredDataGroup, str], ...] = ()  # with the reason
    failures: tuple[FailedRollout, ...] = ()
    backlog: tuple[Any, ...] = ()
    took_s: float = 0.0  # from its first request to its last score
    sampling_s: float = 0.0  # of these, while a sampling request was under way

    @property
    def waited_for_sampler(self) -> bool:
        """Whether it failed for its time alone, most of which was the sampler's."""
        if not self.failures or self.failures[-1].code != RolloutTimedOut.code:
            return False
        return self.sampling_s > self.took_s / 2


class Items:
    """Draws items, those of the backlog first; each has its own generator.

    `life`: see `Draw`. What is in `quarantine` is passed over.
    """

    def __init__(self, env: BaseEnv, life: int = 0, quarantine: Quarantine | None = None) -> None:
        self._env, self._life, self._quarantine = env, life, quarantine
        self._step, self._ordinal = -1, 0
        self._backlog: deque[Any] = deque()

    def put_back(self, items: tuple[Any, ...]) -> None:
        """Roll these out next."""
        self._backlog.extend(items)

    async def next(self, version: int | None = None) -> DrawnItem | None:
        """The next item for the environment's current step; None: no more now.

        Args:
            version: of the weights that are to sample it; None: the newest.

        Raises:
            EnvironmentFailed: `get_next_item` raised.
            RolloutTimedOut: it took longer than `worker_timeout`.
            EnvironmentGaveUp: every item that it gives is quarantined.
        """
        quarantine = self._quarantine
        if quarantine is None:
            return await self._draw(version)
        for _ in range(MOST_SKIPPED):
            drawn = await self._draw(version)
            if drawn is None or drawn.failure is not None:
                return drawn
            if not quarantine.holds(drawn.draw, drawn.item):
                return drawn
            self._env.records.tally(drawn.batch_step).count("tasks/skipped")
            await asyncio.sleep(0)
        raise EnvironmentGaveUp(
            f"{self._env.title} has no task left that can be drawn.",
            f"{quarantine} {MOST_SKIPPED} draws in a row were of those. The newest failure: "
            f"{shortened(quarantine.newest_failure, MOST_SHOWN)}",
            "Mend what their failures name, and start again.",
        )

    async def _draw(self, version: int | None) -> DrawnItem | None:
        if self._env.curr_step != self._step:
            self._step, self._ordinal = self._env.curr_step, 0
        seed = self._env.config.seed
        draw = Draw(
            seed=seed, step=self._step, ordinal=self._ordinal, version=version, life=self._life
        )
        self._ordinal += 1  # also where it fails: the same draw would fail again
        failure = None
        if self._quarantine is not None:
            failure = self._quarantine.stuck_before(draw)
            if failure is not None and self._quarantine.hung_in_drawing(draw):
                return DrawnItem(draw=draw, item=None, failure=failure)
        if self._backlog:
            return DrawnItem(draw=draw, item=self._backlog.popleft(), failure=failure)
        self._env.rng = draw.rng()
        where = f"{self._env.title}.get_next_item"
        limit_s = self._env.config.worker_timeout
        try:
            async with asyncio.timeout(limit_s if limit_s > 0 else None):
                with heartbeat.drawing(draw), boundary(EnvironmentFailed, where):
                    item = await self._env.get_next_item()
        except TimeoutError as error:
            raise RolloutTimedOut(
                f"{where} gave no item in time.", f"worker_timeout is {limit_s:g} s."
            ) from error
        if item is None:
            self._ordinal -= 1
            return None
        return DrawnItem(draw=draw, item=item, failure=failure)


async def settle_item(env: BaseEnv, drawn: DrawnItem) -> SettledItem:
    """Roll an item out. Whatever goes wrong in its rollouts is in the result; cancellation passes
    through.
    """
    began = time.monotonic()
    groups, backlog = list[ScoredDataGroup](), list[Any]()
    failures: tuple[FailedRollout, ...] = ()
    with rolling_out(drawn.draw), sampling_measured() as clock:
        try:
            groups, backlog = await heartbeat.noted(_collect(env, drawn.item))
        except GroupFailed as failure:
            failures = failure.failures or (as_data(failure),)
        except HalteresError as failure:
            # an author's call may end in any of them, e.g. a chat the template refuses
            failures = (as_data(failure),)
    if failures:
        took_s = time.monotonic() - began
        return SettledItem(drawn=drawn, failures=failures, took_s=took_s, sampling_s=clock.seconds)
    reasons = [(group, _reason_to_drop(env, group)) for group in groups]
    return SettledItem(
        drawn=drawn,
        groups=tuple(group for group, reason in reasons if reason is None),
        dropped=tuple((group, reason) for group, reason in reasons if reason is not None),
        backlog=tuple(backlog),
        took_s=time.monotonic() - began,
        sampling_s=clock.seconds,
    )


async def _collect(env: BaseEnv, item: Any) -> tuple[list[ScoredDataGroup], Backlog]:
    limit_s, began = env.config.worker_timeout, time.monotonic()
    where = f"{env.title}.collect_trajectories"
    try:
        async with asyncio.timeout(limit_s if limit_s > 0 else None):
            with boundary(EnvironmentFailed, where):
                collected, backlog = await env.collect_trajectories(item)
            for group in _listed(collected):
                if env.rewards is not None and "rewards" not in group:
                    await score_group(env.rewards, item, group, env.curr_step, began)
            for group in _listed(collected):
                if env.config.missing_eos_penalty:
                    check(group, where)
                    _penalise_cut_answers(env, group)
            failures = [
                failure for group in _listed(collected) for failure in group.get("failures", ())
            ]
            with boundary(EnvironmentFailed, f"{env.title}.postprocess_histories"):
                groups = _listed(await env.postprocess_histories(collected))
    except TimeoutError as error:
        raise RolloutTimedOut(
            "A group was not finished in time.", f"worker_timeout is {limit_s:g} s."
        ) from error
    for group in groups:
        check(group, where)
    if groups and failures and not any(group.get("failures") for group in groups):
        groups[0]["failures"] = failures
    return groups, backlog or []


def _penalise_cut_answers(env: BaseEnv, group: ScoredDataGroup) -> None:
    """Take `missing_eos_penalty` off rollouts whose last answer a limit cut off; `train/truncated`
    is their share.
    """
    group["own_scores"], scores = scores_of(group), list(group["scores"])
    for place, rollout in enumerate(rollouts_of(group)):
        if finish_of(group, place, env.tokenizer) == "length":
            for number in rollout:
                scores[number] -= env.config.missing_eos_penalty
    group["scores"] = scores


def _listed(collected: ScoredDataGroup | list[ScoredDataGroup] | None) -> list[ScoredDataGroup]:
    if collected is None:
        return []
    return [group for group in collected if group] if isinstance(collected, list) else [collected]


def _reason_to_drop(env: BaseEnv, group: ScoredDataGroup) -> str | None:
    size = int((group.get("group_overrides") or {}).get("group_size", env.config.group_size))
    limit = env.config.max_token_length
    if len(rollouts_of(group)) != size:
        return "wrong_size"
    if limit > 0 and any(len(tokens) >= limit for tokens in group["tokens"]):
        return "too_long"
    if env.config.ensure_scores_are_not_same and len(set(group["scores"])) == 1 and size > 1:
        return "same_scores"
    return None
