"""Engines apart: one trains, others sample, and weights go between them as folders. A client sees
one service.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import tinker
from deadlines import until

from halteres.engine.folders import digest
from halteres.engine.process import EngineCommand, EngineProcess, RestartPolicy
from halteres.engine.protocol import Saved
from halteres.engine.scripted.engine import ScriptedEngine
from halteres.errors import NotReady
from halteres.loopback import open_listener, url_of
from halteres.models import TINY
from halteres.service.fleet import Fleet
from halteres.service.running_services import newest_live
from halteres.service.sampling import snapshots
from halteres.service.server import serve
from halteres.service.service import Options
from halteres.training.folder import Wiring
from halteres.training.policy import samples_exactly

from . import test_chaos
from .foreign_sampler import CONTEXT, DEADLY, FIRST
from .live_service import BASE, DATA, LiveService, closing, connected, serving, trainer
from .standin_sampler import ForeignCommand, ForeignSampler
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

    async def damaging(engine: ScriptedEngine, snapshot: str, folder: str, dtype: Any) -> Saved:
        saved = await original(engine, snapshot, folder, dtype)
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


@pytest.mark.parametrize(
    ("base", "is_ours", "expected"),
    [
        ("bfloat16", False, "bfloat16"),
        ("bfloat16", True, "float32"),
        ("float32", False, "float32"),
    ],
)
async def test_weights_go_in_the_bases_type_to_engines_of_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, is_ours: bool, expected: str
) -> None:
    """Named ones are a user's checkpoints, and stay fp32."""
    original, written = ScriptedEngine.save_snapshot, list[str]()

    async def noting(
        engine: ScriptedEngine, snapshot: str, folder: str, dtype: Any = "float32"
    ) -> Saved:
        written.append(dtype)
        return await original(engine, snapshot, folder, dtype)

    monkeypatch.setattr(ScriptedEngine, "save_snapshot", noting)
    async with serving(tmp_path, samplers=1) as scene, closing(await scene.client()) as client:
        (sampler,) = scene.samplers
        assert scene.host.info is not None
        scene.host.info = msgspec.structs.replace(scene.host.info, dtype=base)
        sampler.info = msgspec.structs.replace(scene.host.info, trains=is_ours)
        training = await trainer(client)
        await tokens(await training.save_weights_and_get_sampling_client())
        assert written == [expected]
        path = (await training.save_weights_for_sampler("kept")).path
        await tokens(await client.create_sampling_client(path))
        assert written == [expected, "float32"]


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


# A sampler of another kind, in a process


POLICY = RestartPolicy(backoff_s=0, ping_s=0.2, silent_s=0.6)
"""Of the sampler: a process that hangs is noticed soon."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """A service as a user starts it, whose trainer is one of our processes, and whose sampler is a
    process of another kind.
    """

    state: Path
    url: str
    sampler: EngineProcess[ForeignSampler]
    http: aiohttp.ClientSession

    async def get(self, path: str) -> tuple[int, Any]:
        async with asyncio.timeout(WAIT_S), self.http.get(path) as response:
            return response.status, await response.json()

    async def info(self) -> dict[str, Any]:
        status, told = await self.get("/halteres/v1/info")
        assert status == 200, told
        return told

    async def complete(self, *tokens: int, **body: Any) -> tuple[int, str]:
        """An inference request of the base model."""
        body = {"model": TINY, "prompt": list(tokens), "max_tokens": 2, **body}
        async with self.http.post("/v1/completions", json=body) as response:
            return response.status, await response.text()

    @property
    def file(self) -> dict[str, Any]:
        return json.loads((self.state / "service.json").read_bytes())

    @property
    def loads(self) -> int:
        """How often an adapter was given to the sampler."""
        return (self.state / "sampler-1.log").read_text().count("loaded")


@asynccontextmanager
async def mixed(state: Path, gate: Path | None = None) -> AsyncIterator[Mixed]:
    """The service while the block runs, as soon as its trainer is ready; ended by a signal."""
    ours = EngineCommand(backend="scripted", folder=BASE.folder, name=BASE.name, threads=1)
    foreign = ForeignCommand(name=BASE.name, folder=BASE.folder, gate=gate)
    sampler = EngineProcess(foreign, state / "sampler-1.log", policy=POLICY)
    fleet = Fleet.of(EngineProcess(ours, state / "engine.log"), sampler)
    with open_listener(0) as bound:
        url = url_of(bound)
        service = asyncio.create_task(serve(state, BASE, fleet, bound, Options()))
        async with aiohttp.ClientSession(url) as http:
            scene = Mixed(state, url, sampler, http)
            await scene.info()
            yield scene
        signal.raise_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            await service


@pytest.mark.runs
async def test_a_service_trains_on_its_engine_and_samples_from_a_process_of_another_kind(
    tmp_path: Path,
) -> None:
    async with mixed(tmp_path) as scene:
        client = await asyncio.to_thread(connected, scene.url)
        async with asyncio.timeout(WAIT_S), closing(client):
            training, base = await trainer(client), await client.create_sampling_client(None, TINY)
            assert await tokens(base) == [[FIRST] * 4] * 2
            for step in (1, 2):
                assert await version(training) == step
                unnamed = await training.save_weights_and_get_sampling_client()
                assert await tokens(unnamed) == [[FIRST + step] * 4] * 2
            path = (await training.save_weights_for_sampler("last")).path
            assert await tokens(await client.create_sampling_client(path)) == [[FIRST + 2] * 4] * 2
            held = scene.sampler.engine.held
            assert [(name, weights.version) for name, weights in held.items()] == [
                (weights.name, step) for weights, step in zip(held.values(), (1, 2, 2), strict=True)
            ]
            for weights in held.values():
                assert weights.folder is not None
                assert weights.sha256 == digest(Path(weights.folder))
        status, streamed = await scene.complete(5, 6, stream=True)
        assert (status, streamed.endswith("data: [DONE]\n\n")) == (200, True)
        told = await scene.info()
        assert told["samples_exactly"] is False
        assert told["engine"]["pid"] != told["samplers"][0]["pid"] == scene.file["sampler_pids"][0]
        _, able = await scene.get("/api/v1/get_server_capabilities")
        assert able["supported_models"][0]["max_context_length"] == CONTEXT


@pytest.mark.runs
async def test_a_sampler_of_another_kind_that_crashes_is_started_again_and_given_its_weights_again(
    tmp_path: Path,
) -> None:
    async with mixed(tmp_path) as scene:
        client = await asyncio.to_thread(connected, scene.url)
        async with asyncio.timeout(WAIT_S), closing(client):
            training = await trainer(client)
            await version(training)
            sampling = await training.save_weights_and_get_sampling_client()
            assert await tokens(sampling) == [[FIRST + 1] * 4] * 2
            assert scene.loads == 1
            (before,) = (await scene.info())["samplers"]
            os.kill(before["pid"], signal.SIGKILL)
            assert await tokens(sampling) == [[FIRST + 1] * 4] * 2
            (after,) = (await scene.info())["samplers"]
            assert (after["restarts"], scene.loads) == (before["restarts"] + 1, 2)
            assert after["pid"] != before["pid"]
            await until(lambda: scene.file["sampler_pids"] == [after["pid"]], within_s=WAIT_S)
            # a request that ends it each time fails alone
            status, refusal = await scene.complete(5, DEADLY)
            assert (status, "died 3 times" in refusal, "Exit code 3" in refusal) == (
                500,
                True,
                True,
            )
            assert await tokens(sampling) == [[FIRST + 1] * 4] * 2
            assert await version(training) == 2
        assert (await scene.info())["engine"]["restarts"] == 0


@pytest.mark.runs
async def test_neither_training_nor_what_says_how_the_engines_are_waits_for_a_sampler_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "home"))
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    async with mixed(tmp_path / "state", gate) as scene:
        told = await scene.info()
        assert (told["engine"]["state"], told["samplers"][0]["state"]) == ("ready", "starting")
        assert told["samples_exactly"] is None
        await until(lambda: scene.file["engine_pid"] == told["engine"]["pid"], within_s=WAIT_S)
        assert scene.file["sampler_pids"] == [None]
        assert (card := newest_live()) is not None and card.url == scene.url
        assert (await scene.get("/api/v1/healthz"))[0] == 503
        wiring = Wiring(run_id="r1", service_url=scene.url, api_url="", base_model=TINY)
        exact = asyncio.create_task(samples_exactly(wiring))
        client = await asyncio.to_thread(connected, scene.url)
        async with asyncio.timeout(WAIT_S), closing(client):
            training = await trainer(client)
            assert await version(training) == 1
            sampling = await training.save_weights_and_get_sampling_client()
            drawing = asyncio.create_task(tokens(sampling))
            assert await version(training) == 2
            assert not exact.done()
            assert not drawing.done()
            await asyncio.to_thread(gate.write_bytes, b"")
            assert await drawing == [[FIRST + 1] * 4] * 2
            assert await exact is False
        assert (await scene.get("/api/v1/healthz"))[0] == 200
        (sampler,) = (await scene.info())["samplers"]
        await until(lambda: scene.file["sampler_pids"] == [sampler["pid"]], within_s=WAIT_S)


@pytest.mark.runs
async def test_a_sampler_of_another_kind_that_hangs_is_not_asked_how_it_is_and_is_replaced(
    tmp_path: Path,
) -> None:
    async with mixed(tmp_path) as scene:
        async with asyncio.timeout(WAIT_S):
            await scene.sampler.settled()
        (before,) = (await scene.info())["samplers"]
        os.kill(before["pid"], signal.SIGSTOP)
        told = await scene.info()
        assert (told["samplers"], told["samples_exactly"]) == ([before], False)
        assert (await scene.get("/api/v1/get_server_capabilities"))[0] == 200
        assert (await scene.complete(5, 6))[0] == 200
        failure = scene.sampler.failure
        assert failure is not None
        assert "hung" in failure.what
        assert (await scene.info())["samplers"][0]["restarts"] == 1
