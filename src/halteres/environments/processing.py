"""`process`: groups into a JSONL file (never an existing one), with no trajectory server and no
trainer.

Next to the file lies a page to read. Where a run directory is named, it has the rollouts, those
that were dropped or failed too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

from halteres.config.discovery import in_file_name
from halteres.environments.base import BaseEnv, set_up
from halteres.environments.heartbeat import beating
from halteres.environments.item_rollout import Items, SettledItem, settle_item
from halteres.environments.scored import OWN, ScoredDataGroup, scores_of
from halteres.errors import EnvironmentFailed, InvalidConfig
from halteres.groups.page import page_of
from halteres.observe.metrics import append_row
from halteres.rollouts.groups import as_data
from halteres.types import FailedRollout

POLL_S = 0.05
ITEMS_PER_GROUP = 10  # so many items may fail or be dropped for each group of the file

log = logging.getLogger(__name__)


async def process(env: BaseEnv, ends_after_s: float = 0.0) -> Path:
    """Write `total_steps` groups, one line each; the file's path.

    Args:
        ends_after_s: seconds for which the event loop may hang before the process ends itself
            (`heartbeat.beating`); 0: no limit.

    Raises:
        InvalidConfig: `total_steps` is not given.
        EnvironmentFailed: too many items came to nothing; what was made before is in the file.
    """
    size = env.config.total_steps
    if size < 1:
        raise InvalidConfig(
            f"'process' needs to know how many groups to make; total_steps is {size}.",
            next="Give it with --env.total_steps 8.",
        )
    await set_up(env)
    path = Path(env.config.data_path_to_save_groups or f"data/{in_file_name(env.wandb_name)}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    file, number = path, 0
    while True:
        try:
            file.touch(exist_ok=False)
            break
        except FileExistsError:  # of an earlier run, or of one beside this
            number += 1
            file = path.with_name(f"{path.stem}_{number}{path.suffix}")
    made = 0
    async with beating(ends_after_s):
        async for group in _groups(env, size):
            append_row(file, {name: value for name, value in group.items() if name not in OWN})
            made += 1
            scores = ", ".join(f"{score:g}" for score in scores_of(group))
            log.info("group %d of %d: scores %s", made, size, scores)
    page = page_of(file, env.title, env.tokenizer)
    file.with_suffix(".html").write_text(page, encoding="utf-8")
    await env.cleanup()
    return file


async def _groups(env: BaseEnv, size: int) -> AsyncIterator[ScoredDataGroup]:
    """Groups in the order of their items, several under way at once."""
    items, config, records = Items(env), env.config, env.records
    under_way: deque[asyncio.Task[SettledItem]] = deque()
    made = tried = 0
    failed = dropped = without_item = 0  # items in a row; the limits are those of `serve`
    last = "get_next_item gave no item."

    def may_begin() -> bool:
        exhausted = (
            max(failed, without_item) >= config.max_failed_groups
            or 0 < config.max_dropped_groups <= dropped
        )
        return tried < ITEMS_PER_GROUP * size and not exhausted

    try:
        while made < size:
            while len(under_way) < min(config.max_workers, size - made) and may_begin():
                try:
                    drawn = await items.next()
                except EnvironmentFailed as failure:  # which is a failed group
                    failed += 1
                    last = f"Last failure: {as_data(failure).why}"
                    records.failed(env.curr_step + 1, -1, None, (as_data(failure),))
                    break
                if drawn is None:
                    without_item, last = without_item + 1, "get_next_item gave no more items."
                    break
                without_item, tried = 0, tried + 1
                under_way.append(asyncio.create_task(settle_item(env, drawn)))
            if not under_way and may_begin():
                await asyncio.sleep(POLL_S)  # no item now may mean one in a moment, as in `serve`
                continue
            if not under_way:
                raise EnvironmentFailed(
                    f"{env.title} made {made} of {size} groups of {tried} items.", last
                )
            settled = await under_way.popleft()
            step, item = settled.drawn.batch_step, settled.drawn.item
            ordinal = settled.drawn.draw.ordinal
            items.put_back(settled.backlog)
            if settled.groups:
                failed = dropped = 0
            else:
                reasons = [reason for _, reason in settled.dropped] or ["nothing_collected"]
                failures = settled.failures or tuple(
                    FailedRollout(code=reason, why=f"the group was dropped ({reason}).")
                    for reason in reasons
                )
                failed, dropped = failed + bool(settled.failures), dropped + (not settled.failures)
                last = f"Last failure: {failures[-1].why}"
                records.failed(step, ordinal, item, failures)
            for group in settled.groups[: size - made]:
                made += 1
                records.group(step, ordinal, item, group)
                yield group
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
