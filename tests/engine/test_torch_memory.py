"""Memory that runs out fails one request, and moves no bit of anybody else's."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.requirements import proves

from halteres.engine.checks import EngineOutOfMemory
from halteres.engine.protocol import ExtraLogprobs, LoraConfig, SamplingParams
from halteres.engine.torch import TorchEngine, adapter, limits, worker
from halteres.engine.torch.decode import DecodeBatch
from halteres.engine.torch.limits import FreedMemory, Limits, PassBudget, attempt, resident_bytes
from halteres.engine.torch.losses import LOSSES, PerToken
from halteres.engine.torch.micro_batches import MicroBatch, planned, read_examples
from halteres.engine.torch.model import FusedModel
from halteres.engine.torch.passes import PendingBatch
from halteres.errors import HalteresError, InvalidData, ServerError, as_failed_future
from halteres.models import TINY
from halteres.process import Memory

from .requests import CROSS_ENTROPY, packed, streamed
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
    within,
)

pytestmark = pytest.mark.runs

FULL = (
    "[enforce fail at alloc_cpu.cpp:125] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate"
)
RAISED = {
    "a CPU": RuntimeError(FULL),
    "Python": MemoryError(),
    "a GPU": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    "its BLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
}


@pytest.mark.parametrize("where", RAISED)
def test_what_libraries_raise_is_recognised_and_nothing_of_it_is_held(where: str) -> None:
    held: list[Any] = []

    class Tensor:
        pass

    def work() -> None:
        big = Tensor()
        held.append(id(big))
        raise RAISED[where]

    failure = attempt("forward_backward", work)
    assert isinstance(failure, EngineOutOfMemory)
    assert failure.code == "gpu_oom"
    assert "Send shorter sequences" in failure.next
    assert as_failed_future(failure)["category"] == "server"
    assert (failure.__cause__, failure.__context__, failure.__traceback__) == (None, None, None)
    RAISED[where].__traceback__ = None
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Tensor]


@pytest.mark.parametrize("lost", [True, False])
def test_an_engine_whose_gpu_is_lost_exits_and_one_whose_gpu_answers_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lost: bool
) -> None:
    exits: list[int] = []

    def broken(*_: object) -> None:
        raise RuntimeError(
            "CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA"
        )

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", broken if lost else lambda: None)
    monkeypatch.setattr(limits.os, "_exit", exits.append)
    failure = attempt("a decode step", broken)
    assert isinstance(failure, ServerError)
    assert exits == ([limits.LOST] if lost else [])
    assert ("The GPU is lost since a decode step" in caplog.text) == lost


def test_other_failures_are_told_as_such(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        raise RuntimeError("shape mismatch")

    failure = attempt("forward_backward", work)
    assert type(failure) is ServerError
    assert "shape mismatch" in failure.sentence
    assert "forward_backward broke" in caplog.text


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_freed_memory_that_lies_between_what_stays_is_given_back() -> None:
    size, count = 1 << 16, 2000
    taken = [bytearray(size) for _ in range(count)]
    stays = taken[::50]
    del taken
    gc.collect()
    full = resident_bytes()
    FreedMemory(freed_bytes=2 * full).look(idle=True)
    FreedMemory(freed_bytes=0).look(idle=False)  # far less than a quarter of the machine's memory
    assert resident_bytes() > full - size * count // 4
    FreedMemory(freed_bytes=0).look(idle=True)
    assert resident_bytes() < full - size * count // 2
    assert len(stays) == 40


async def test_an_engine_without_work_gives_freed_memory_back(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Event()
    monkeypatch.setattr(worker, "IDLE_S", 0.01)
    monkeypatch.setattr(FreedMemory, "look", lambda _, *, idle: looked.set() if idle else None)
    async with running(model_folder):
        assert await asyncio.to_thread(looked.wait, 5)


def refusing(original: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    """The function, out of memory where `when` says so."""

    def called(*args: Any, **named: Any) -> Any:
        if when(*args, **named):
            raise RuntimeError(FULL)
        return original(*args, **named)

    return called


@proves("tenants:no-leak")
async def test_a_pass_without_memory_fails_alone_and_leaves_no_trace(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(model_folder, Limits(pass_tokens=64)) as engine:
        for name in "ab":
            await trained(engine, name, steps=1)
        await engine.forward_backward("a", lessons(4, seed=9), CROSS_ENTROPY)
        expected = gradient(engine)
        calls = iter(range(100))
        full = refusing(FusedModel.hidden_states, lambda *_, **__: next(calls) >= 2)
        monkeypatch.setattr(FusedModel, "hidden_states", full)
        with pytest.raises(EngineOutOfMemory, match="forward_backward"):
            await engine.forward_backward("b", lessons(8), CROSS_ENTROPY)
        monkeypatch.undo()
        assert torch.equal(gradient(engine), expected)
        assert not gradient(engine, "b").any()
        await engine.optim_step("a", RATE)
        await engine.forward_backward("b", lessons(4, seed=9), CROSS_ENTROPY)
        assert torch.equal(gradient(engine, "b"), expected)


async def test_a_micro_batch_without_memory_is_tried_in_halves_and_the_next_pass_begins_with_them(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the adapter alone: others are computed as before, to the bit."""
    sizes: list[int] = []
    original = FusedModel.hidden_states

    def crowded(
        base: Any, weights: Any, tokens_N: torch.Tensor, *rest: Any, **named: Any
    ) -> torch.Tensor:
        sizes.append(len(tokens_N))
        if len(tokens_N) > 150:
            raise RuntimeError(FULL)
        return original(base, weights, tokens_N, *rest, **named)

    async with running(model_folder, Limits(pass_tokens=600)) as engine:
        for name in "ab":
            await trained(engine, name, steps=1)
        expected = await engine.forward_backward("a", lessons(16), CROSS_ENTROPY)
        monkeypatch.setattr(FusedModel, "hidden_states", crowded)
        halved = await engine.forward_backward("b", lessons(16), CROSS_ENTROPY)
        assert max(sizes) > 300, "the first is as large as ever"
        assert halved.logprobs == expected.logprobs
        apart = gradient(engine, "b") - gradient(engine, "a")
        # bfloat16: sums of halves are rounded to other numbers, where a CPU has instructions for
        # it.
        assert apart.norm() <= within(1e-6, 5e-3) * gradient(engine, "a").norm()
        sizes.clear()
        await engine.forward_backward("b", lessons(16), CROSS_ENTROPY)
        assert max(sizes) <= 150
        monkeypatch.undo()
        await trained(engine, "c", steps=1)
        assert await engine.forward_backward("c", lessons(16), CROSS_ENTROPY) == expected
        assert torch.equal(gradient(engine, "c"), gradient(engine, "a"))


async def test_a_single_datum_without_memory_is_computed_layer_by_layer_to_the_same_bits(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = FusedModel.hidden_states
    full = refusing(original, lambda *_, recompute: not recompute)
    async with running(model_folder) as engine:
        for name in "ab":
            await trained(engine, name, steps=1)
        expected = await engine.forward_backward("a", lessons(1), CROSS_ENTROPY)
        monkeypatch.setattr(FusedModel, "hidden_states", full)
        assert await engine.forward_backward("b", lessons(1), CROSS_ENTROPY) == expected
        assert torch.equal(gradient(engine, "b"), gradient(engine, "a"))


async def test_a_layer_that_is_computed_again_keeps_its_input_alone(model_folder: Path) -> None:
    kept: list[int] = []
    for recompute in (False, True):
        async with running(model_folder) as engine:
            await engine.create_adapter("a", LORA)
            engine._budgets["a"] = PassBudget(2048, 1 << 25, recompute)
            bytes_kept: dict[int, int] = {}

            def pack(tensor: torch.Tensor, found: dict[int, int] = bytes_kept) -> torch.Tensor:
                found[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
                return tensor

            examples = read_examples(lessons(16), CROSS_ENTROPY, engine._info)
            loss = PerToken(LOSSES["cross_entropy"], {})
            part = planned(examples, 2048, True)[0]
            batch = MicroBatch.of(part, torch.device("cpu"), True)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                PendingBatch(
                    engine._base, engine._budgets["a"], engine._adapters["a"], batch, loss, False
                ).logprobs()
            kept.append(sum(bytes_kept.values()))
    assert kept[1] < kept[0] / 2, kept


async def test_a_step_without_memory_changes_nothing_and_can_be_asked_for_again(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clipped = RATE.__class__(learning_rate=5e-3, grad_clip_norm=0.1)
    async with running(model_folder) as engine:
        for name in "ab":
            await trained(engine, name, steps=1)
            await engine.forward_backward(name, lessons(4), CROSS_ENTROPY)
        before, pending = weights(engine), gradient(engine)
        monkeypatch.setattr(
            adapter.torch, "empty_like", refusing(torch.empty_like, lambda *_: True)
        )
        with pytest.raises(EngineOutOfMemory, match="optim_step"):
            await engine.optim_step("a", clipped)
        monkeypatch.undo()
        assert torch.equal(weights(engine), before)
        assert torch.equal(gradient(engine), pending)
        assert await engine.optim_step("a", clipped) == await engine.optim_step("b", clipped)
        assert torch.equal(weights(engine), weights(engine, "b"))


async def test_decoding_without_memory_fails_the_largest_request_and_the_others_come_back_bit_for_bit(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One snapshot's rows share every step; the request that needs most goes, the others begin
    again.
    """
    asked = prompts(3, seed=51)
    wanted = ExtraLogprobs(prompt_logprobs=True, topk_sampled=2)
    small = SamplingParams(max_tokens=30, stop_tokens=(), seed=2)
    async with running(model_folder) as engine:
        alone = [await engine.sample(None, packed(p), 3, small, wanted) for p in asked]
        told = await streamed(engine.stream(None, packed(asked[0]), 2, small))
        crowded = refusing(DecodeBatch.step, lambda self: len(self.rows) > 12)
        monkeypatch.setattr(DecodeBatch, "step", crowded)
        small_ones = [
            asyncio.create_task(engine.sample(None, packed(p), 3, small, wanted)) for p in asked
        ]
        streaming = asyncio.create_task(streamed(engine.stream(None, packed(asked[0]), 2, small)))
        large = asyncio.create_task(sample(engine, None, [4, 5, 6], n=40, max_tokens=300))
        with pytest.raises(EngineOutOfMemory, match="decode step"):
            await large
        assert repr(await asyncio.gather(*small_ones)) == repr(alone)
        assert await streaming == told
        monkeypatch.undo()
        assert len((await sample(engine, None, [4, 5, 6], n=40, max_tokens=20)).sequences) == 40
        assert repr(await engine.sample(None, packed(asked[0]), 3, small, wanted)) == repr(alone[0])


async def test_a_request_whose_prompt_finds_no_memory_costs_those_that_decode_nothing(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompts(1, seed=52)[0]
    async with running(model_folder) as engine:
        alone = await sample(engine, None, prompt, n=4, seed=3, max_tokens=200)
        entering = refusing(DecodeBatch._prefill_chunk, lambda self, texts, length: length > 1000)
        monkeypatch.setattr(DecodeBatch, "_prefill_chunk", entering)
        running_on = asyncio.create_task(sample(engine, None, prompt, n=4, seed=3, max_tokens=200))
        await engine.drop("nothing")
        for _ in range(2):
            with pytest.raises(EngineOutOfMemory):
                await sample(engine, None, [7] * 1500, n=2)
        assert (await running_on).sequences == alone.sequences


async def test_memory_that_is_gone_for_good_fails_everybody_with_a_sentence(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(model_folder) as engine:
        monkeypatch.setattr(DecodeBatch, "prefill", refusing(DecodeBatch.prefill, lambda *_: True))
        calls = [sample(engine, None, p, n=2) for p in prompts(4)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineOutOfMemory] * 4
        monkeypatch.undo()
        assert len((await sample(engine, None, [1, 2], n=2)).sequences) == 2


@pytest.mark.parametrize("rank", [0, -1, 513, 10**9, 2**70])
@proves("lora:absurd")
async def test_an_absurd_rank_is_refused_before_anything_is_allocated(
    model_folder: Path, rank: int
) -> None:
    async with running(model_folder) as engine:
        with pytest.raises(InvalidData, match="rank"):
            await engine.create_adapter("a", LoraConfig(rank=rank))
        await engine.create_adapter("a", LORA)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(rank=4, alpha=0.0),
        LoraConfig(rank=4, alpha=float("nan")),
        LoraConfig(rank=4, train_attn=False, train_mlp=False, train_unembed=False),
    ],
)
async def test_an_adapter_that_cannot_be_is_refused(model_folder: Path, config: LoraConfig) -> None:
    async with running(model_folder) as engine:
        with pytest.raises(HalteresError) as raised:
            await engine.create_adapter("a", config)
        assert isinstance(raised.value, InvalidData)


@pytest.mark.parametrize("seed", [-1, 2**64 + 5, -(2**80)])
@proves("lora:options")
async def test_any_integer_is_a_seed_of_an_adapter(model_folder: Path, seed: int) -> None:
    async with running(model_folder) as engine:
        for name in "ab":
            await engine.create_adapter(name, LoraConfig(rank=2, seed=seed))
        assert torch.equal(weights(engine), weights(engine, "b"))


@pytest.mark.parametrize(("cache_gb", "places"), [(1.0, 476), (0.1, 47), (4.0, 512)])
async def test_a_model_tells_how_many_sequences_of_usual_length_its_cache_holds(
    model_folder: Path, cache_gb: float, places: int
) -> None:
    """1,024 positions of 2 KiB each; never more than rows of a step."""
    engine = await asyncio.to_thread(TorchEngine, model_folder, TINY, 1, cache_gb=cache_gb)
    assert (await engine.info()).places == places
    await engine.close()


def test_keys_and_values_take_a_quarter_of_what_is_free_but_no_less_than_a_gib(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    for free, taken in ((80 << 30, 20 << 30), (2 << 30, 1 << 30), (None, 1 << 30)):
        monkeypatch.setattr(limits, "main_memory", lambda free=free: Memory(total=None, free=free))
        assert limits.free_for_cache(cpu) == taken
