"""Streams, cancellation and death over the engine link."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from deadlines import until

from halteres.engine.checks import EngineOutOfMemory, LossNotFinite, out_of_memory
from halteres.engine.connection import LinkedEngine, connect, serve
from halteres.engine.protocol import (
    Adam,
    EngineGone,
    ExtraLogprobs,
    LoraConfig,
    Piece,
    SampleResult,
    SamplingParams,
)
from halteres.engine.scripted.engine import ScriptedEngine
from halteres.engine.torch.limits import Limits
from halteres.errors import InvalidData, NotReady, ServerError

from .requests import CROSS_ENTROPY, PROMPT, packed, streamed, weighted
from .torch_fixtures import running

FREE = SamplingParams(max_tokens=30, seed=5, stop_tokens=())


async def test_a_stream_over_the_link_is_what_sample_answers(linked: LinkedEngine) -> None:
    extra = ExtraLogprobs(topk_sampled=2)
    told = await streamed(linked.stream(None, packed(PROMPT), 4, FREE, extra))
    assert told == (await linked.sample(None, packed(PROMPT), 4, FREE, extra)).sequences


async def test_pieces_cross_while_the_engine_still_writes(
    linked: LinkedEngine, scripted: ScriptedEngine
) -> None:
    held = scripted.block("piece")
    pieces = linked.stream(None, packed(PROMPT), 1, FREE)
    async with asyncio.timeout(5):
        reading = asyncio.create_task(anext(pieces))
        await held.inside()
        assert not reading.done()
        held.release()
        assert len((await reading).tokens) >= 4
        assert (await linked.info()).name == "halteres/tiny"  # the link is free meanwhile
        assert [piece.stop_reason async for piece in pieces][-1] == "length"


async def test_a_reader_that_never_reads_holds_up_nobody(
    linked: LinkedEngine, scripted: ScriptedEngine
) -> None:
    """What it missed comes as one piece per sequence: no more than the answer is ever kept for
    it.
    """
    pieces = linked.stream(None, packed(PROMPT), 3, FREE)
    first = await anext(pieces)
    await until(lambda: scripted.under_way["stream"] == 0)
    assert len((await linked.sample(None, packed(PROMPT), 1, FREE)).sequences) == 1
    rest = [piece async for piece in pieces]
    assert len(first.tokens) + sum(len(piece.tokens) for piece in rest) == 3 * 30 * 4
    assert len(rest) <= 6


async def test_a_stream_that_is_left_ends_inside_the_engine(
    linked: LinkedEngine, scripted: ScriptedEngine
) -> None:
    held = scripted.block("piece")
    async with asyncio.timeout(10):
        leaving = linked.stream(None, packed(PROMPT), 1, FREE)
        first = asyncio.create_task(anext(leaving))
        await held.inside()
        assert scripted.under_way["stream"] == 1
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await until(lambda: scripted.under_way["stream"] == 0)


async def test_a_stream_fails_with_the_engines_own_error(
    linked: LinkedEngine, scripted: ScriptedEngine
) -> None:
    with pytest.raises(InvalidData, match="sampled tokens alone"):
        await streamed(linked.stream(None, packed(PROMPT), 1, FREE, ExtraLogprobs(topk_prompt=2)))
    scripted.fail_next("stream", ServerError("The device is lost."))
    with pytest.raises(ServerError, match="device is lost"):
        await streamed(linked.stream(None, packed(PROMPT), 1, FREE))


async def test_a_stream_whose_engine_dies_ends_with_engine_gone(
    scripted: ScriptedEngine, socket_path: Path
) -> None:
    async with asyncio.timeout(5):
        async with serve(scripted, socket_path):
            engine = await connect(socket_path)
            held = scripted.block("piece")
            reading: asyncio.Task[Piece] = asyncio.create_task(
                anext(engine.stream(None, packed(PROMPT), 1, FREE))
            )  # type: ignore[arg-type]
            await held.inside()
        with pytest.raises(EngineGone):
            await reading
        with pytest.raises(EngineGone):
            await streamed(engine.stream(None, packed(PROMPT), 1, FREE))
        await engine.disconnect()


async def test_a_cancelled_sample_is_cancelled_inside_the_engine(
    linked: LinkedEngine, scripted: ScriptedEngine
) -> None:
    scripted.block("sample")
    calls = [asyncio.create_task(linked.sample(None, packed(PROMPT), 1, FREE)) for _ in range(3)]
    async with asyncio.timeout(10):
        await until(lambda: scripted.under_way["sample"] == 3)
        for call in calls[:2]:
            call.cancel()
        await asyncio.gather(*calls[:2], return_exceptions=True)
        await until(lambda: scripted.under_way["sample"] == 1)
        scripted.release_all()
        assert isinstance(await calls[2], SampleResult)


async def test_a_cancelled_sample_frees_its_rows_in_the_real_engine(
    model_folder: Path, socket_path: Path
) -> None:
    async with running(model_folder, Limits(decode_rows=8)) as engine, serve(engine, socket_path):
        linked = await connect(socket_path)
        long = SamplingParams(max_tokens=2000, stop_tokens=())
        async with asyncio.timeout(30):
            sampling = asyncio.create_task(linked.sample(None, packed(PROMPT), 8, long))
            await linked.drop("nothing")  # what was sent before is under way
            await until(lambda: engine._worker._sampler.busy)
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
            leaving = linked.stream(None, packed(PROMPT), 8, long)
            await anext(leaving)
            await leaving.aclose()  # type: ignore[attr-defined]
            short = SamplingParams(max_tokens=3, stop_tokens=())
            assert len((await linked.sample(None, packed(PROMPT), 8, short)).sequences) == 8
            await until(lambda: not engine._worker._sampler.busy)
        await linked.disconnect()


async def test_a_cancelled_training_call_is_finished_all_the_same(
    linked: LinkedEngine, scripted: ScriptedEngine
) -> None:
    """It may have changed something: whoever replays must find it whole."""
    await linked.create_adapter("a", LoraConfig(rank=2))
    held = scripted.block("forward_backward")
    passing = asyncio.create_task(
        linked.forward_backward("a", (weighted([5, 6], [6, 7]),), CROSS_ENTROPY)
    )
    async with asyncio.timeout(5):
        await held.inside()
        passing.cancel()
        await asyncio.gather(passing, return_exceptions=True)
        held.release()
        assert (await linked.optim_step("a", Adam())).version == 1


async def test_a_connection_that_ends_takes_its_own_samples_with_it(
    scripted: ScriptedEngine, socket_path: Path
) -> None:
    scripted.block("sample")
    async with serve(scripted, socket_path), asyncio.timeout(10):
        engine = await connect(socket_path)
        sampling = asyncio.create_task(engine.sample(None, packed(PROMPT), 1, FREE))
        await until(lambda: scripted.under_way["sample"] == 1)
        await engine.disconnect()
        with pytest.raises(EngineGone):
            await sampling
        await until(lambda: scripted.under_way["sample"] == 0)


async def test_a_connection_that_ends_leaves_training_calls_to_their_end(
    scripted: ScriptedEngine, socket_path: Path
) -> None:
    async with serve(scripted, socket_path), asyncio.timeout(10):
        first, second = await connect(socket_path), await connect(socket_path)
        await first.create_adapter("a", LoraConfig(rank=2))
        held = scripted.block("forward_backward")
        passing = asyncio.create_task(
            first.forward_backward("a", (weighted([5, 6], [6, 7]),), CROSS_ENTROPY)
        )
        await held.inside()
        await first.disconnect()
        with pytest.raises(EngineGone):
            await passing
        held.release()
        assert (await second.optim_step("a", Adam())).version == 1
        await second.disconnect()


async def test_an_engine_that_was_closed_is_gone_and_one_that_is_busy_is_not(
    scripted: ScriptedEngine, socket_path: Path
) -> None:
    """Whoever hears EngineGone asks the next engine; any other NotReady came from one that
    lives.
    """
    async with serve(scripted, socket_path):
        engine = await connect(socket_path)
        scripted.fail_next("info", NotReady("Not yet."))
        with pytest.raises(NotReady) as raised:
            await engine.info()
        assert not isinstance(raised.value, EngineGone)
        await scripted.close()
        with pytest.raises(EngineGone):
            await engine.info()
        await engine.disconnect()


async def test_what_only_engines_raise_keeps_its_code_over_the_link(
    linked: LinkedEngine, scripted: ScriptedEngine
) -> None:
    for error, kind, code in (
        (LossNotFinite("The loss is not finite."), LossNotFinite, "nan_loss"),
        (
            out_of_memory("forward_backward", "CUDA out of memory. Tried"),
            EngineOutOfMemory,
            "gpu_oom",
        ),
    ):
        scripted.fail_next("info", error)
        with pytest.raises(kind) as raised:
            await linked.info()
        assert raised.value.code == code
        assert raised.value.sentence == error.sentence
