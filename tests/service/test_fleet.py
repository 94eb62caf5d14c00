"""Engines apart: one trains, others sample, and weights go between them as folders. A client sees
one service.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tinker
from deadlines import until

from halteres.engine.protocol import Saved
from halteres.engine.scripted.engine import ScriptedEngine
from halteres.errors import NotReady
from halteres.service.sampling import snapshots

from . import test_chaos
from .live_service import DATA, LiveService, closing, serving, trainer
from .test_durability import tokens, version
from .test_process import gone, running
from .test_sampling import bound_snapshots

WAIT_S = 20


async def story(client: tinker.ServiceClient) -> list[object]:
    """A training run that samples what it becomes, from unnamed and named weights."""
    training, told = await trainer(client), list[object]()
    for step in range(3):
        unnamed = await training.save_weights_and_get_sampling_client()
        path = (await training.save_weights_for_sampler(f"step-{step}")).path
        named = await client.create_sampling_client(path)
        told += [await tokens(unnamed), await tokens(named), await version(training)]
    return told


@pytest.mark.parametrize("samplers", [1, 2])
async def test_samplers_apart_answer_what_one_engine_answers(tmp_path: Path, samplers: int) -> None:
    async with serving(tmp_path / "one") as scene, closing(await scene.client()) as client:
        expected = await story(client)
        assert not (scene.service.state / "spill").exists()  # within one engine no file is written
        assert scene.engine.calls["hold"] == 0
    async with (
        serving(tmp_path / "apart", samplers=samplers) as scene,
        closing(await scene.client()) as client,
    ):
        assert await story(client) == expected
        assert scene.engine.calls["sample"] == 0
        sampled = [host.scripted.calls for host in scene.samplers]
        assert sum(calls["sample"] for calls in sampled) == 6
        assert not any(calls["forward_backward"] + calls["snapshot"] for calls in sampled)


async def test_a_killed_sampler_costs_only_time(tmp_path: Path) -> None:
    """Requests under way are asked again, and it is given again what it held; the trainer hears of
    neither.
    """
    async with serving(tmp_path, samplers=1) as scene, closing(await scene.client()) as client:
        training = await trainer(client)
        sampling = await training.save_weights_and_get_sampling_client()
        await version(training)
        before = await tokens(sampling)
        asked_of_trainer = scene.engine.calls.copy()
        under_way = scene.samplers[0].scripted.block("sample")
        async with asyncio.timeout(WAIT_S):
            waiting = asyncio.create_task(tokens(sampling))
            await under_way.inside()
            await scene.samplers[0].die()
            assert await waiting == before
        assert scene.samplers[0].scripted.calls["hold"] == 1
        assert scene.engine.calls == asked_of_trainer


async def test_while_a_sampler_is_away_another_answers(tmp_path: Path) -> None:
    async with serving(tmp_path, samplers=2) as scene, closing(await scene.client()) as client:
        training = await trainer(client)
        sampling = await training.save_weights_and_get_sampling_client()
        before = await tokens(sampling)
        for host in scene.samplers:
            await host.become("starting")
            async with asyncio.timeout(WAIT_S):
                assert await tokens(sampling) == before
            await host.become("ready")
        assert all(host.scripted.calls["sample"] for host in scene.samplers)


async def test_a_killed_trainer_comes_back_by_replay_while_samplers_go_on(tmp_path: Path) -> None:
    async with serving(tmp_path, samplers=1) as scene, closing(await scene.client()) as client:
        training = await trainer(client)
        sampling = await training.save_weights_and_get_sampling_client()
        before = await tokens(sampling)
        await version(training)
        unsampled = await training.save_weights_and_get_sampling_client()
        await training.forward_backward(DATA, "cross_entropy")
        await scene.host.die()
        assert await tokens(sampling) == before
        assert scene.engine.calls["create_adapter"] == 0  # nobody needed the trainer yet
        # no folder held them: the adapter takes them again
        assert await tokens(unsampled) != before
        assert await version(training) == 2


@pytest.mark.parametrize(
    "trainer_dies", [False, True], ids=["the trainer has them", "the trainer died"]
)
async def test_weights_damaged_on_their_way_are_refused_and_written_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trainer_dies: bool,
) -> None:
    original, written = ScriptedEngine.save_snapshot, list[Path]()

    async def damaging(engine: ScriptedEngine, snapshot: str, folder: str) -> Saved:
        saved = await original(engine, snapshot, folder)
        if not written:
            damage(Path(folder))
        written.append(Path(folder))
        if trainer_dies and len(written) == 1:
            await scene.host.die()
        return saved

    async with serving(tmp_path, samplers=1) as scene, closing(await scene.client()) as client:
        training = await trainer(client)
        await version(training)
        sampling = await training.save_weights_and_get_sampling_client()
        monkeypatch.setattr(ScriptedEngine, "save_snapshot", damaging)
        with caplog.at_level(logging.WARNING):
            drawn = await tokens(sampling)
        assert "(policy version 1) did not arrive whole" in caplog.text
        assert len(written) == 2
    async with serving(tmp_path / "one") as scene, closing(await scene.client()) as client:
        training = await trainer(client)
        await version(training)
        assert await tokens(await training.save_weights_and_get_sampling_client()) == drawn


async def test_damaged_weights_that_nobody_has_any_more_are_told(tmp_path: Path) -> None:
    async with serving(tmp_path, samplers=1) as scene, closing(await scene.client()) as client:
        training = await trainer(client)
        path = (await training.save_weights_for_sampler("final")).path
        folder = scene.service.checkpoints.find(path, scene.service.models.all()[0].tenant).folder
        damage(folder)
        await scene.host.die()  # nothing of the run has to come back for this name
        sampling = await client.create_sampling_client(path)
        with pytest.raises(tinker.RequestFailedError, match="did not arrive whole"):
            await tokens(sampling)


def damage(folder: Path) -> None:
    """One bit of its weights flips."""
    file = folder / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


async def test_a_sampler_holds_no_more_than_its_budget(tmp_path: Path) -> None:
    async with serving(tmp_path, samplers=1) as scene, closing(await scene.client()) as client:
        training = await trainer(client)
        bound_snapshots(scene, 2)
        published = [await training.save_weights_and_get_sampling_client() for _ in range(5)]
        drawn = [await tokens(sampling) for sampling in published]
        for engine in (scene.engine, scene.samplers[0].scripted):
            await until(lambda engine=engine: len(engine._snapshots) <= 2, within_s=WAIT_S)
        assert [await tokens(sampling) for sampling in published] == drawn


async def test_folders_of_weights_that_many_newer_ones_replaced_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "MAX_SPILLED", 2)
    async with serving(tmp_path, samplers=1) as scene, closing(await scene.client()) as client:
        training = await trainer(client)
        for _ in range(4):
            await tokens(await training.save_weights_and_get_sampling_client())
        assert len(list((scene.service.state / "spill").iterdir())) == 2


async def test_health_and_info_tell_trainer_and_samplers_apart(tmp_path: Path) -> None:
    async with serving(tmp_path, samplers=2) as scene:
        assert (await scene.get("/api/v1/healthz"))[0] == 200
        told = (await scene.get("/halteres/v1/info"))[1]
        assert told["engine"]["state"] == "ready"
        assert [one["state"] for one in told["samplers"]] == ["ready", "ready"]
        _, able = await scene.get("/api/v1/get_server_capabilities")
        assert {(one["trainable"], one["sampleable"]) for one in able["supported_models"]} == {
            (True, True)
        }
        await scene.samplers[0].become("starting")
        assert (await scene.get("/api/v1/healthz"))[0] == 200  # the other one samples
        scene.samplers[1].failure = NotReady("It died.")
        await scene.samplers[1].become("starting")
        assert (await scene.get("/api/v1/healthz")) == (
            503,
            {"detail": "The sampler is not ready. It is starting."},
        )
        await scene.host.become("starting")
        assert (await scene.get("/api/v1/healthz")) == (
            503,
            {"detail": "The trainer is not ready. It is starting."},
        )
        assert [one["state"] for one in (await info_without_trainer(scene))] == [
            "starting",
            "starting",
        ]
        await scene.host.become("ready")


async def info_without_trainer(scene: LiveService) -> list[dict[str, Any]]:
    await scene.host.become("ready")
    return (await scene.get("/halteres/v1/info"))[1]["samplers"]


@pytest.mark.runs
async def test_two_engine_processes_draw_the_curve_of_one_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the one that samples is killed on the way."""
    monkeypatch.setattr(test_chaos, "STEPS", 5)
    with running(tmp_path / "one", "--engine", "torch") as process:
        expected = await asyncio.to_thread(test_chaos.loop, process.url)
    with running(tmp_path / "two", "--engine", "torch", "--samplers", "1") as process:
        drawing = asyncio.create_task(asyncio.to_thread(test_chaos.loop, process.url))
        await until(lambda: any((tmp_path / "two" / "spill").glob("*")), within_s=60)
        told = await process.info()
        (sampler,) = told["samplers"]
        assert sampler["pid"] != told["engine"]["pid"]
        os.kill(sampler["pid"], signal.SIGKILL)
        assert gone(sampler["pid"])
        assert await drawing == expected
        told = await process.info()
        assert (told["engine"]["restarts"], told["samplers"][0]["restarts"]) == (0, 1)
