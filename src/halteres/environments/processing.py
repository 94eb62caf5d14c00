"""`process`: groups into a file, with no trajectory server and no trainer.

Owns: the JSONL file (never an existing one), the order of its lines, the page beside it; where a run directory is
named, its rollouts: what was dropped or failed is there too.
Never: sends anything; ends because one rollout failed. Too many groups in a row that came to nothing end it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

from halteres.environments.base import BaseEnv
from halteres.environments.pages import render_page
from halteres.environments.scored import OWN, ScoredDataGroup, scores_of
from halteres.environments.work import Drawn, Items, Settled, settle_item
from halteres.errors import EnvironmentFailed, InvalidConfig
from halteres.observe.metrics import append_row
from halteres.rollouts.groups import as_data
from halteres.types import FailedRollout

log = logging.getLogger(__name__)

POLL_S = 0.05
ITEMS_PER_GROUP = 10  # so many items may fail or be dropped for each group wanted


async def process(env: BaseEnv) -> Path:
    """Write `total_steps` groups, one line each; the file's path.

    Raises:
        InvalidConfig: `total_steps` is not given.
        EnvironmentFailed: too many items came to nothing; what was made before is in the file.
    """
    wanted = env.config.total_steps
    if wanted < 1:
        raise InvalidConfig(
            f"'process' needs to know how many groups to make; total_steps is {wanted}.",
            next="Give it with --env.total_steps 8.",
        )
    await env.setup()
    file = _free(Path(env.config.data_path_to_save_groups or f"data/{env.wandb_name}.jsonl"))
    written: list[ScoredDataGroup] = []
    async for group in _groups(env, wanted):
        append_row(file, {name: value for name, value in group.items() if name not in OWN})
        written.append(group)
        scores = ", ".join(f"{score:g}" for score in scores_of(group))
        log.info("group %d of %d: scores %s", len(written), wanted, scores)
    file.with_suffix(".html").write_text(render_page(env.title, written, env.tokenizer))
    await env.cleanup()
    return file


async def _groups(env: BaseEnv, wanted: int) -> AsyncIterator[ScoredDataGroup]:
    """Groups in the order of their items, several under way at once."""
    items, patience = Items(env), _Patience(env)
    under_way: deque[asyncio.Task[Settled]] = deque()
    made = tried = 0
    try:
        while made < wanted:
            room = min(env.config.max_workers, wanted - made)
            while len(under_way) < room and tried < ITEMS_PER_GROUP * wanted and not patience.exhausted:
                drawn = await patience.draw(items)
                if drawn is None:
                    break
                tried += 1
                under_way.append(asyncio.create_task(settle_item(env, drawn)))
            if not under_way and tried < ITEMS_PER_GROUP * wanted and not patience.exhausted:
                await asyncio.sleep(POLL_S)  # no item now may mean one in a moment, as in `serve`
                continue
            if not under_way:
                raise EnvironmentFailed(f"{env.title} made {made} of {wanted} groups of {tried} items.", patience.last)
            settled = await under_way.popleft()
            items.put_back(settled.backlog)
            patience.see(settled)
            for group in settled.kept[: wanted - made]:
                made += 1
                env.records.group(settled.drawn.batch_step, settled.drawn.draw.ordinal, settled.drawn.item, group)
                yield group
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


class _Patience:
    """How many items in a row came to nothing, why the last one did; the limits are those of `serve`."""

    def __init__(self, env: BaseEnv) -> None:
        self._env = env
        self._failed = self._dropped = self._without_item = 0
        self.last = "get_next_item gave no item."

    @property
    def exhausted(self) -> bool:
        """Whether no further item is begun."""
        config = self._env.config
        failed = max(self._failed, self._without_item)
        return failed >= config.max_failed_groups or 0 < config.max_dropped_groups <= self._dropped

    async def draw(self, items: Items) -> Drawn | None:
        """The next item; None where there is none now, or `get_next_item` raised, which is a failed group."""
        try:
            drawn = await items.next()
        except EnvironmentFailed as failure:
            self._failed += 1
            self._tell(self._env.curr_step + 1, -1, None, (as_data(failure),))
            return None
        self._without_item = 0 if drawn else self._without_item + 1
        if self._without_item:
            self.last = "get_next_item gave no more items."
        return drawn

    def see(self, settled: Settled) -> None:
        """Note what an item came to, and record it where it is nothing."""
        if settled.kept:
            self._failed = self._dropped = 0
            return
        failures = settled.failures or _as_failures(settled)
        self._failed += bool(settled.failures)
        self._dropped += not settled.failures
        self._tell(settled.drawn.batch_step, settled.drawn.draw.ordinal, settled.drawn.item, failures)

    def _tell(self, step: int, ordinal: int, item: object, failures: tuple[FailedRollout, ...]) -> None:
        self.last = f"Last failure: {failures[-1].why}"
        self._env.records.failed(step, ordinal, item, failures)


def _as_failures(settled: Settled) -> tuple[FailedRollout, ...]:
    """Why an item that did not fail gave no group all the same."""
    reasons = [reason for _, reason in settled.dropped] or ["nothing_collected"]
    return tuple(FailedRollout(code=reason, why=f"the group was dropped ({reason}).") for reason in reasons)


def _free(path: Path) -> Path:
    """The path itself, or the first of _1, _2, … that is not taken; it exists, empty, from here on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        candidate = path if number == 0 else path.with_name(f"{path.stem}_{number}{path.suffix}")
        try:
            candidate.touch(exist_ok=False)
            return candidate
        except FileExistsError:
            number += 1
