"""`process`: groups into a file, with no trajectory server and no trainer.

Owns: the JSONL file (never an existing one), the order of its lines, the page beside it.
Never: sends anything; ends because a rollout failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

from halteres.environments.base import BaseEnv
from halteres.environments.pages import render_page
from halteres.environments.scored import OWN, ScoredDataGroup
from halteres.environments.work import Items, Settled, settle_item
from halteres.errors import EnvironmentFailed, InvalidConfig
from halteres.observe.metrics import append_row

log = logging.getLogger(__name__)

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
        scores = ", ".join(f"{score:g}" for score in group["scores"])
        log.info("group %d of %d: scores %s", len(written), wanted, scores)
    file.with_suffix(".html").write_text(render_page(env.title, written, env.tokenizer))
    await env.cleanup()
    return file


async def _groups(env: BaseEnv, wanted: int) -> AsyncIterator[ScoredDataGroup]:
    """Groups in the order of their items, several under way at once."""
    items = Items(env)
    under_way: deque[asyncio.Task[Settled]] = deque()
    made = tried = 0
    last = "get_next_item gave no more items."
    try:
        while made < wanted:
            while len(under_way) < min(env.config.max_workers, wanted - made) and tried < ITEMS_PER_GROUP * wanted:
                drawn = await items.next()
                if drawn is None:
                    break
                tried += 1
                under_way.append(asyncio.create_task(settle_item(env, drawn)))
            if not under_way:
                raise EnvironmentFailed(f"{env.title} made {made} of {wanted} groups of {tried} items.", last)
            settled = await under_way.popleft()
            items.put_back(settled.backlog)
            last = _why_nothing(settled) or last
            for group in settled.kept[: wanted - made]:
                made += 1
                yield group
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


def _why_nothing(settled: Settled) -> str | None:
    if settled.failures:
        failure = settled.failures[-1]
        log.warning("A group failed (%s): %s", failure.code, failure.why)
        return f"Last failure: {failure.why}"
    if settled.dropped:
        return f"The last group was dropped: {settled.dropped[-1][1]}."
    return None


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
