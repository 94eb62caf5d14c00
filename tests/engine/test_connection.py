"""The engine link: an engine at its other end is the same engine, and a broken link is a typed
error.
"""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import msgspec
import numpy as np
import pytest
from contract.requirements import proves

from halteres.engine.connection import ERROR_KINDS, OPERATIONS, LinkedEngine, connect, serve
from halteres.engine.protocol import (
    Adam,
    Engine,
    EngineGone,
    LoraConfig,
    PassResult,
    SamplingParams,
)
from halteres.engine.scripted.engine import ScriptedEngine
from halteres.errors import HalteresError, InvalidData, NotFound, NotReady, ServerError

from .requests import CROSS_ENTROPY, EVERYTHING, PROMPT, from_folder, packed, streamed, weighted

DATUM = weighted([5, 6, 7], [6, 7, 8])


async def _story(engine: Engine, folder: Path) -> list[object]:
    """Every call of the protocol but `close`, and what it answered."""
    return [
        msgspec.structs.replace(await engine.info(), incarnation=""),  # every engine has its own
        await engine.create_adapter("a", LoraConfig(rank=4, seed=1, train_mlp=False)),
        await engine.forward_backward("a", (DATUM, DATUM), CROSS_ENTROPY),
        await engine.forward_backward("a", (DATUM,), CROSS_ENTROPY, forward_only=True),
        await engine.optim_step("a", Adam(learning_rate=1e-3)),
        await engine.save("a", str(folder / "w"), optimizer=True),
        await engine.load("b", str(folder / "w"), optimizer=True),
        await engine.snapshot("b", "s"),
        await engine.save_snapshot("s", str(folder / "s")),
        await engine.hold("t", from_folder(folder / "s")),
        await engine.sample(
            "t", packed(PROMPT), 3, SamplingParams(max_tokens=9, stop_strings=("x",)), EVERYTHING
        ),
        await engine.sample(
            None, packed(PROMPT), 1, SamplingParams(max_tokens=2, stop_tokens=(3, 4))
        ),
        await streamed(engine.stream("t", packed(PROMPT), 2, SamplingParams(max_tokens=7, seed=4))),
        await engine.merge(str(folder / "s"), str(folder / "merged")),
        await engine.drop("b"),
    ]


async def test_every_method_over_the_link_equals_the_engine_itself(
    linked: LinkedEngine, model_folder: Path, tmp_path: Path
) -> None:
    itself = await _story(ScriptedEngine(model_folder, "halteres/tiny"), tmp_path)
    assert repr(await _story(linked, tmp_path)) == repr(itself)  # repr: a NaN equals itself there


def test_every_method_of_the_protocol_travels() -> None:
    methods = {
        name for name, member in inspect.getmembers(Engine, inspect.isfunction) if name[0] != "_"
    }
    assert set(OPERATIONS) == methods
    assert methods <= set(dir(LinkedEngine))


@pytest.mark.parametrize("kind", sorted(ERROR_KINDS))
async def test_errors_cross_with_class_words_and_details(
    linked: LinkedEngine, scripted: ScriptedEngine, kind: str
) -> None:
    error = ERROR_KINDS[kind]("What.", "Why.", "Next.", allowed=["a", "b"], at=3)
    scripted.fail_next("info", error)
    with pytest.raises(HalteresError) as raised:
        await linked.info()
    assert type(raised.value) is type(error)
    assert (raised.value.what, raised.value.why, raised.value.next) == ("What.", "Why.", "Next.")
    assert raised.value.details == {"allowed": ["a", "b"], "at": 3}


@proves("error:server")
async def test_an_engines_own_bug_is_a_server_error_with_an_id_that_is_in_the_log(
    linked: LinkedEngine, scripted: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.latency_s["info"] = "soon"  # type: ignore[assignment]
    with pytest.raises(ServerError, match=r"error id (\w{8})") as raised:
        await linked.info()
    assert raised.value.what.split("error id ")[1][:8] in caplog.text


async def test_calls_run_side_by_side_and_answers_find_their_callers(
    linked: LinkedEngine, scripted: ScriptedEngine
) -> None:
    held = scripted.block("sample")
    params = [SamplingParams(max_tokens=4, seed=seed) for seed in range(64)]
    calls = [asyncio.create_task(linked.sample(None, packed(PROMPT), 1, each)) for each in params]
    async with asyncio.timeout(10):
        await held.inside(64)
        assert (await linked.info()).name == "halteres/tiny"
        held.release()
        answers = await asyncio.gather(*calls)
    assert answers == [await scripted.sample(None, packed(PROMPT), 1, each) for each in params]


async def test_calls_of_one_adapter_keep_their_order_over_the_link(linked: LinkedEngine) -> None:
    await linked.create_adapter("a", LoraConfig(rank=2))
    steps = []
    for _ in range(20):
        steps.append(linked.forward_backward("a", (DATUM,), CROSS_ENTROPY))
        steps.append(linked.optim_step("a", Adam()))
    answers = await asyncio.gather(*steps)
    assert [step.version for step in answers[1::2]] == list(range(1, 21))


async def test_an_error_of_one_rooms_own_class_crosses_as_its_ancestor(
    linked: LinkedEngine, scripted: ScriptedEngine
) -> None:
    class OutOfMemory(ServerError):
        pass

    scripted.fail_next("info", OutOfMemory("The device is full."))
    with pytest.raises(ServerError, match="device is full") as raised:
        await linked.info()
    assert type(raised.value) is ServerError


async def test_an_error_crosses_whatever_its_details_hold(
    linked: LinkedEngine, scripted: ScriptedEngine
) -> None:
    scripted.fail_next("info", NotFound("Gone.", at=Path("/x"), none=None))
    with pytest.raises(NotFound) as raised:
        await linked.info()
    assert raised.value.details == {"at": "/x", "none": None}


@pytest.mark.runs
async def test_large_tensors_cross_whole(linked: LinkedEngine) -> None:
    await linked.create_adapter("a", LoraConfig(rank=2))
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 672, (512, 2048))
    data = tuple(weighted(row, np.roll(row, -1), [0.5] * 2048) for row in rows)  # 16 MiB of tensors
    passed: PassResult = await linked.forward_backward("a", data, CROSS_ENTROPY)
    assert {len(row.data) for row in passed.logprobs} == {2048 * 4}
    assert len(passed.logprobs) == 512


async def test_a_frame_that_is_too_large_is_refused_before_it_is_sent(
    linked: LinkedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halteres.engine.connection.MAX_FRAME_BYTES", 1000)
    with pytest.raises(InvalidData, match="too large"):
        await linked.sample(None, packed([5] * 1000), 1, SamplingParams())
    assert (await linked.info()).vocab_size == 672


async def test_a_broken_link_fails_every_waiting_call_and_every_later_one(
    scripted: ScriptedEngine, socket_path: Path
) -> None:
    held = scripted.block("sample")
    async with asyncio.timeout(5):
        async with serve(scripted, socket_path):
            engine = await connect(socket_path)
            calls = [
                asyncio.create_task(
                    engine.sample(None, packed(PROMPT), 1, SamplingParams(seed=seed))
                )
                for seed in range(5)
            ]
            await held.inside(5)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineGone] * 5
        with pytest.raises(EngineGone, match="gone"):
            await engine.info()
        await engine.disconnect()


async def test_a_cancelled_caller_does_not_disturb_the_others(
    linked: LinkedEngine, scripted: ScriptedEngine
) -> None:
    held = scripted.block("sample")
    sampling = asyncio.create_task(linked.sample(None, packed(PROMPT), 1, SamplingParams()))
    async with asyncio.timeout(5):
        await held.inside()
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        held.release()
        assert (await linked.info()).vocab_size == 672


async def test_closing_ends_the_engine_at_the_other_side(
    scripted: ScriptedEngine, socket_path: Path
) -> None:
    async with serve(scripted, socket_path) as link, asyncio.timeout(5):
        engine = await connect(socket_path)
        await engine.close()
        await link.closed.wait()
    with pytest.raises(NotReady):
        await scripted.info()


async def test_connecting_to_nobody_is_told(socket_path: Path) -> None:
    with pytest.raises(NotReady, match="No engine listens"):
        await connect(socket_path)


async def test_names_not_found_cross_as_such(linked: LinkedEngine) -> None:
    with pytest.raises(NotFound, match="no snapshot 'x'"):
        await linked.sample("x", packed(PROMPT), 1, SamplingParams())
