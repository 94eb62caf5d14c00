"""`process`: groups into a file, with no trajectory server and no trainer.

Owns: the JSONL file (never an existing one), the order of its lines, the page beside it, in which every text is
escaped; where a run directory is named, its rollouts: what was dropped or failed is there too.
Never: sends anything; ends because one rollout failed. Too many groups in a row that came to nothing end it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from halteres.environments.base import BaseEnv
from halteres.environments.scored import OWN, ScoredDataGroup, action_tokens, prompt_tokens, rollouts_of, scores_of
from halteres.environments.work import Drawn, Items, Settled, settle_item
from halteres.errors import EnvironmentFailed, InvalidConfig
from halteres.observe.metrics import append_row
from halteres.rollouts.groups import as_data
from halteres.text import Tokenizer
from halteres.types import FailedRollout

POLL_S = 0.05
ITEMS_PER_GROUP = 10  # so many items may fail or be dropped for each group wanted


log = logging.getLogger(__name__)


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


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem}"
    "pre{white-space:pre-wrap;background:#f5f5f3;padding:.6rem;border-radius:.3rem;margin:.3rem 0}"
    "details{border-bottom:1px solid #ddd;padding:.4rem 0}summary{cursor:pointer}"
    ".role{color:#777;font-size:.85em}.score{font-weight:600}"
)


def render_page(title: str, groups: Sequence[ScoredDataGroup], tokenizer: Tokenizer) -> str:
    """The whole page."""
    scores = [score for group in groups for score in scores_of(group)]
    mean = f"{sum(scores) / len(scores):.3f}" if scores else "–"
    heading = f"<h1>{escape(title)}</h1><p>{len(groups)} groups, mean score {mean}</p>"
    details = "".join(_group(number, group, tokenizer) for number, group in enumerate(groups, 1))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{heading}{details}</body></html>\n"
    )


def _group(number: int, group: ScoredDataGroup, tokenizer: Tokenizer) -> str:
    scores = " ".join(f"{score:g}" for score in scores_of(group))
    rollouts = "".join(_rollout(group, rollout, tokenizer) for rollout in rollouts_of(group))
    return f"<details><summary>Group {number}: {escape(scores)}</summary>{rollouts}</details>"


def _rollout(group: ScoredDataGroup, rollout: Sequence[int], tokenizer: Tokenizer) -> str:
    messages = group.get("messages")
    texts = (_chat(messages[place]) if messages else _plain(group, place, tokenizer) for place in rollout)
    return f'<p class="score">score {group["scores"][rollout[0]]:g}</p>{"".join(texts)}'


def _chat(messages: Sequence[dict[str, Any]]) -> str:
    return "".join(_text(str(message.get("role", "")), str(message.get("content", ""))) for message in messages)


def _plain(group: ScoredDataGroup, place: int, tokenizer: Tokenizer) -> str:
    prompt = tokenizer.decode(prompt_tokens(group, place), skip_special_tokens=False)
    return _text("prompt", prompt) + _text("answer", tokenizer.decode(action_tokens(group, place)))


def _text(role: str, text: str) -> str:
    return f'<div class="role">{escape(role)}</div><pre>{escape(text)}</pre>'
