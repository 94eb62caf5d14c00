"""A deterministic environment: which weights sample which batch, whatever takes how long."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from halteres.clients.trajectories import Posted, Registered
from halteres.environments.base import Backlog
from halteres.environments.scored import ScoredDataGroup

from .fakes import Digits, Inference, Trainer, at_work, config, server

STEPS = 5


class Asynchronous(Trainer):
    """Takes batches whenever they are whole, and asks for the next one with a newer version after
    `pause`.
    """

    def __init__(self, pause: Any, num_steps: int = STEPS) -> None:
        super().__init__(batch_size=16, group_size=4, num_steps=num_steps)
        self._pause, self.asked = pause, {0: 0}

    async def post(self, group: Mapping[str, Any], *, key: str) -> Posted:
        before = self.step
        posted = await super().post(group, key=key)
        self.parked = False
        if self.step > before:
            self._asking = asyncio.create_task(self._ask(self.step))
        return posted

    async def _ask(self, step: int) -> None:
        await self._pause(self, step)
        self.asked[step] = 10 * step  # versions are no steps: a batch may make several, or none


async def at_once(trainer: Trainer, step: int) -> None:
    """Training takes no time."""


async def after_some_polls(trainer: Trainer, step: int) -> None:
    """Training takes longer than the next batches, where these need not wait for it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            await trainer.until(lambda: len(trainer.groups) == 4 * (step + 2))


async def batches(
    inference: Inference, trainer: Trainer, lag: int, **changes: Any
) -> list[list[Any]]:
    env = Digits(config(weights_lag=lag, **changes), [server(inference)])
    async with asyncio.timeout(10), at_work(env, trainer) as task:
        await task
    return [
        [(group["tokens"], group["policy_version"][0][0]) for group in batch]
        for batch in trainer.batches
    ]


async def test_every_batch_is_sampled_by_the_weights_of_its_place_whatever_takes_how_long(
    inference: Inference,
) -> None:
    expected = {0: [0, 10, 20, 30, 40], 1: [0, 0, 10, 20, 30], 2: [0, 0, 0, 10, 20]}
    for lag, versions in expected.items():
        quick = await batches(
            inference, Asynchronous(at_once), lag, ensure_scores_are_not_same=True
        )
        slow = await batches(
            inference,
            Asynchronous(after_some_polls),
            lag,
            ensure_scores_are_not_same=True,
            max_num_workers=3,
        )
        assert quick == slow
        assert [{version for _, version in batch} for batch in quick] == [
            {version} for version in versions
        ]


async def test_rollouts_go_on_while_the_trainer_takes_a_step(inference: Inference) -> None:
    """With a lag of one: the next batch is whole before the trainer has asked for it, and no more
    is begun.
    """
    may_ask = asyncio.Event()

    async def never_before(trainer: Trainer, step: int) -> None:
        await may_ask.wait()

    trainer = Asynchronous(never_before, num_steps=4)
    async with (
        asyncio.timeout(5),
        at_work(Digits(config(weights_lag=1), [server(inference)]), trainer) as task,
    ):
        await trainer.until(lambda: len(trainer.batches) == 2)
        polls = trainer.polls
        await trainer.until(lambda: trainer.polls >= polls + 3)
        assert len(inference.requests) == 8
        may_ask.set()
        await task
    assert len(trainer.batches) == 4


async def test_an_environment_that_is_killed_fills_the_batches_that_it_would_have_filled(
    inference: Inference, tmp_path: Path
) -> None:
    straight = await batches(inference, Asynchronous(at_once), 1)
    trainer = Asynchronous(at_once)
    env = Digits(
        config(weights_lag=1, run_dir=str(tmp_path), max_num_workers=1), [server(inference)]
    )
    async with asyncio.timeout(5), at_work(env, trainer):
        await trainer.until(lambda: len(trainer.groups) == 6)
    assert await batches(inference, trainer, 1, run_dir=str(tmp_path)) == straight
    assert len(trainer.groups) == 4 * STEPS


async def test_what_an_environment_saves_for_a_batch_is_there_before_that_batch_can_begin(
    inference: Inference, tmp_path: Path
) -> None:
    """Killed while its last group is acknowledged, it begins the next batch with what it had drawn
    until then.
    """

    class Counting(Digits):
        drawn = 0

        async def get_next_item(self) -> Any:
            self.drawn += 1
            return await super().get_next_item()

        def save_checkpoint(self, step: int, data: Any = None) -> None:
            super().save_checkpoint(step, {"drawn": self.drawn})

    class Remembering(Asynchronous):
        saved: ClassVar[list[dict[str, Any]]] = []

        async def register_env(self, **values: Any) -> Registered:
            return replace(await super().register_env(**values), checkpoint_dir=str(tmp_path))

        async def post(self, group: Mapping[str, Any], *, key: str) -> Posted:
            if len(self.groups) % 4 == 3:
                file = tmp_path / "env_checkpoints" / "digits" / f"step-{self.step + 1}.json"
                self.saved.append(json.loads(file.read_text()))
            return await super().post(group, key=key)

    trainer = Remembering(at_once)
    async with (
        asyncio.timeout(5),
        at_work(Counting(config(weights_lag=0), [server(inference)]), trainer) as task,
    ):
        await task
    assert trainer.saved == [{"drawn": 4 * (step + 1)} for step in range(STEPS)]


async def test_of_an_item_that_gives_several_groups_those_beyond_the_batch_are_dropped(
    inference: Inference, tmp_path: Path
) -> None:
    class Doubling(Digits):
        async def collect_trajectories(self, item: Any) -> tuple[list[ScoredDataGroup], Backlog]:
            group, backlog = await super().collect_trajectories(item)
            assert isinstance(group, dict)
            return [group, group, group], backlog

    trainer = Asynchronous(at_once, num_steps=2)
    env = Doubling(
        config(weights_lag=0, run_dir=str(tmp_path), max_num_workers=1), [server(inference)]
    )
    async with asyncio.timeout(5), at_work(env, trainer) as task:
        await task
    assert [len(batch) for batch in trainer.batches] == [4, 4]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["groups/dropped/surplus"] for row in rows] == [2, 2]
