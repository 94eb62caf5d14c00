"""Turns of one torch engine's thread: nobody waits for another's pass, nor anybody for a disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from halteres.engine.protocol import EngineGone, LoraConfig
from halteres.engine.torch import engine as engine_module
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.passes import run_pass
from halteres.errors import NotFound

from .requests import CROSS_ENTROPY, from_folder
from .torch_fixtures import (
    LORA,
    RATE,
    gradient,
    lessons,
    prompts,
    running,
    sample,
    trained,
    weights,
)

PROMPT = prompts(1, seed=71)[0]
SMALL = Limits(pass_tokens=64)
"""One or two lessons a micro-batch."""


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of all passes, in the order in which they ran: each micro-batch as the datums
    of its pass."""
    ran: list[int] = []

    def counted(
        base: Any, info: Any, adapter: Any, data: tuple[Any, ...], *rest: Any, **named: Any
    ) -> Iterator[Any]:
        running_pass = run_pass(base, info, adapter, data, *rest, **named)
        while True:
            try:
                found = next(running_pass)
            except StopIteration as end:
                return end.value
            if found is None:
                ran.append(len(data))
            yield found
            if found is not None:
                ran.append(len(data))

    monkeypatch.setattr(engine_module, "run_pass", counted)
    return ran


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(engine_module.read_checkpoint)
    monkeypatch.setattr(engine_module, "read_checkpoint", disk.read)
    yield disk
    disk.answers.set()


class SlowDisk:
    """Reading begins, and ends when the test says so."""

    def __init__(self, read: Callable[..., Any]) -> None:
        self._read, self._asked, self.answers = read, threading.Event(), threading.Event()

    def read(self, *args: Any, **named: Any) -> Any:
        self._asked.set()
        assert self.answers.wait(20)
        return self._read(*args, **named)

    async def asked(self) -> None:
        assert await asyncio.to_thread(self._asked.wait, 20)


async def two_adapters(engine: engine_module.TorchEngine) -> None:
    for name in "ab":
        await engine.create_adapter(name, LORA)


async def test_a_short_pass_waits_for_at_most_three_micro_batches_of_another_adapter(
    model_folder: Path, slices: list[int]
) -> None:
    async with running(model_folder, SMALL) as engine:
        await two_adapters(engine)
        long = asyncio.create_task(engine.forward_backward("a", lessons(20), CROSS_ENTROPY))
        await asyncio.create_task(engine.forward_backward("b", lessons(1), CROSS_ENTROPY))
        ended = len(slices) - slices[::-1].index(1)
        assert not long.done()
        assert slices[0] == 20
        assert slices[:ended].count(20) <= 3
        await long
        assert slices.count(20) > 8


async def test_passes_in_turns_have_the_bits_of_passes_alone(
    model_folder: Path, slices: list[int]
) -> None:
    calls = {"a": lessons(9, seed=1), "b": lessons(7, seed=2), "c": lessons(5, seed=3)}
    alone: dict[str, tuple[str, torch.Tensor]] = {}
    async with running(model_folder, SMALL) as engine:
        for rank, (name, data) in enumerate(calls.items(), start=4):
            await engine.create_adapter(name, LoraConfig(rank=rank, seed=rank))
            passed = await engine.forward_backward(name, data, CROSS_ENTROPY)
            alone[name] = repr(passed), gradient(engine, name)
            await engine.drop(name)
        del slices[:]
        for rank, name in enumerate(calls, start=4):
            await engine.create_adapter(name, LoraConfig(rank=rank, seed=rank))
        found = await asyncio.gather(
            *(engine.forward_backward(n, data, CROSS_ENTROPY) for n, data in calls.items())
        )
        assert slices[:6] == [9, 7, 5, 9, 7, 5]
        for name, passed in zip(calls, found, strict=True):
            assert repr(passed) == alone[name][0]
            assert torch.equal(gradient(engine, name), alone[name][1])


async def test_calls_of_one_adapter_keep_their_order_among_those_of_others(
    model_folder: Path,
) -> None:
    async def lesson(engine: engine_module.TorchEngine, name: str) -> None:
        """Sent at once; the answers are waited for together."""
        await asyncio.gather(
            *(
                call
                for seed in range(3)
                for call in (
                    engine.forward_backward(name, lessons(5, seed=seed), CROSS_ENTROPY),
                    engine.optim_step(name, RATE),
                    engine.snapshot(name, f"{name}{seed}"),
                    engine.drop(f"{name}{seed}"),
                )
            )
        )

    async with running(model_folder, SMALL) as engine:
        await two_adapters(engine)
        await asyncio.gather(lesson(engine, "a"), lesson(engine, "b"))
        assert torch.equal(weights(engine, "a"), weights(engine, "b"))
        await engine.create_adapter("c", LORA)
        for seed in range(3):
            await engine.forward_backward("c", lessons(5, seed=seed), CROSS_ENTROPY)
            await engine.optim_step("c", RATE)
        assert torch.equal(weights(engine, "c"), weights(engine, "a"))
        with pytest.raises(NotFound):
            await sample(engine, "a2", PROMPT)


@pytest.mark.parametrize("what", ["adapter", "snapshot"])
async def test_a_load_from_a_slow_disk_stalls_neither_decoding_nor_another_adapter(
    model_folder: Path, tmp_path: Path, slow_disk: SlowDisk, what: str
) -> None:
    folder = str(tmp_path / "w")
    async with running(model_folder) as engine:
        await trained(engine, "a", steps=1)
        await engine.create_adapter("b", LORA)
        await engine.save("a", folder, optimizer=True)
        load = (
            engine.load("a", folder, True)
            if what == "adapter"
            else engine.hold("s", from_folder(Path(folder)))
        )
        loading = asyncio.create_task(load)
        await slow_disk.asked()
        await sample(engine, None, PROMPT, n=2)
        await engine.forward_backward("b", lessons(2), CROSS_ENTROPY)
        await engine.optim_step("b", RATE)
        assert not loading.done()
        slow_disk.answers.set()
        await loading


async def test_what_follows_a_slow_load_of_the_same_adapter_waits_for_it(
    model_folder: Path, tmp_path: Path, slow_disk: SlowDisk
) -> None:
    folder = str(tmp_path / "w")
    async with running(model_folder) as engine:
        await trained(engine, "a", steps=2)
        saving = asyncio.create_task(engine.save("a", folder, optimizer=True))
        moving = [
            asyncio.create_task(engine.forward_backward("a", lessons(3), CROSS_ENTROPY)),
            asyncio.create_task(engine.optim_step("a", RATE)),
        ]
        # sent before it is written
        loads = [asyncio.create_task(engine.load(name, folder, True)) for name in "ab"]
        publishing = asyncio.create_task(engine.snapshot("a", "s"))
        await slow_disk.asked()
        await asyncio.gather(saving, *moving)
        assert not publishing.done()
        slow_disk.answers.set()
        assert [stepped.version for stepped in await asyncio.gather(*loads)] == [2, 2]
        assert (await publishing).version == 2
        assert torch.equal(weights(engine, "a"), weights(engine, "b"))


async def test_a_load_that_fails_leaves_the_adapter_and_its_queue(
    model_folder: Path, tmp_path: Path
) -> None:
    async with running(model_folder) as engine:
        await trained(engine, "a", steps=1)
        load = asyncio.create_task(engine.load("a", str(tmp_path / "none"), True))
        assert (await engine.snapshot("a", "s")).version == 1
        with pytest.raises(NotFound):
            await load


async def test_an_engine_that_closes_does_not_wait_for_a_disk(
    model_folder: Path, tmp_path: Path, slow_disk: SlowDisk
) -> None:
    async with running(model_folder) as engine:
        loading = asyncio.create_task(engine.load("a", str(tmp_path), True))
        await slow_disk.asked()
    with pytest.raises(EngineGone):
        await loading


async def test_a_long_pass_goes_on_beside_clients_that_ask_again_and_again(
    model_folder: Path, slices: list[int]
) -> None:
    async with running(model_folder, SMALL) as engine:
        await two_adapters(engine)
        await engine.create_adapter("c", LORA)
        long = asyncio.create_task(engine.forward_backward("a", lessons(20), CROSS_ENTROPY))

        async def ask_again(name: str) -> None:
            while not long.done():
                await engine.forward_backward(name, lessons(1), CROSS_ENTROPY)

        async with asyncio.timeout(60):
            await asyncio.gather(long, ask_again("b"), ask_again("c"))
        assert slices.count(1) <= 4 * slices.count(20), "a slice each, in turns"
