"""Several adapters in one step and one pass: every one has the bits that it has by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halteres.engine.checks import LossNotFinite
from halteres.engine.protocol import Adam, Datum, LoraConfig, PassResult, SampleResult
from halteres.engine.torch import TorchEngine, projections, worker
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.multi_lora import MultiLora
from halteres.engine.torch.passes import PendingBatch
from halteres.errors import InvalidData, UserError

from .requests import CROSS_ENTROPY, IMPORTANCE_SAMPLING, array
from .torch_fixtures import (
    gradient,
    lessons,
    logprobs_of,
    pair,
    prompts,
    running,
    sample,
    tokens_of,
    weights,
)

pytestmark = pytest.mark.runs

RANKS = {"a": 1, "b": 8, "c": 16, "d": 24, "e": 64, "f": 96}
"""The last one's B has more inputs than a batched matmul adds up one after the other."""

FAST = Adam(learning_rate=0.02)
PARTS = {"c": {"train_mlp": False}, "d": {"train_attn": False}, "b": {"train_unembed": False}}


async def publish(engine: TorchEngine, names: Sequence[str] = tuple(RANKS)) -> None:
    """Adapters of many ranks, some of part of the model, each with a snapshot of its name."""
    for seed, name in enumerate(names):
        await engine.create_adapter(
            name, LoraConfig(rank=RANKS[name], seed=seed, **PARTS.get(name, {}))
        )
        await engine.forward_backward(name, lessons(4, seed=seed), CROSS_ENTROPY)
        await engine.optim_step(name, FAST)
        await engine.snapshot(name, f"s{name}")


def question(name: str | None, number: int) -> tuple[str | None, list[int], int, dict[str, int]]:
    prompt = prompts(1, seed=number)[0]
    return (
        (f"s{name}" if name else None),
        prompt,
        number % 3 * 4 + 1,
        {"seed": number, "max_tokens": 5 + number % 7},
    )


QUESTIONS = [question(name, number) for number, name in enumerate([*RANKS, None, *RANKS, None])]


@pytest.mark.parametrize("way", ["stacked", "one by one"])
async def test_a_sample_among_other_adapters_and_ranks_is_that_of_its_adapter_alone(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "one by one":
        monkeypatch.setattr(projections, "_batched_agrees", False)
    async with running(model_folder) as engine:
        await publish(engine)
        alone = [
            await sample(engine, name, prompt, n, **params) for name, prompt, n, params in QUESTIONS
        ]
        asked = (sample(engine, name, prompt, n, **params) for name, prompt, n, params in QUESTIONS)
        among = await asyncio.gather(*asked)
        assert [same(one) for one in among] == [same(one) for one in alone]
        assert len({repr(one.sequences) for one in alone}) == len(alone)


def same(result: SampleResult) -> tuple[object, ...]:
    """All but what was found in the cache."""
    return result.sequences, result.version


async def test_logprobs_sampled_among_others_are_those_of_a_pass(model_folder: Path) -> None:
    """Also after further steps of the adapter: no copy of its weights outlives a version."""
    async with running(model_folder) as engine:
        await publish(engine)
        for version in (1, 2, 3):
            prompt = prompts(1, seed=version)[0]
            asked = [
                sample(engine, f"s{name}", prompt, 3, seed=version, max_tokens=9) for name in RANKS
            ]
            for name, result in zip(RANKS, await asyncio.gather(*asked), strict=True):
                assert result.version == version
                for sequence in result.sequences:
                    await assert_recomputed(
                        engine, name, prompt, tokens_of(sequence), logprobs_of(sequence.logprobs)
                    )
            for name in RANKS:
                await engine.forward_backward(name, lessons(3, seed=version), CROSS_ENTROPY)
                await engine.optim_step(name, FAST)
                await engine.snapshot(name, f"s{name}")


async def assert_recomputed(
    engine: TorchEngine,
    name: str,
    prompt: Sequence[int],
    tokens: Sequence[int],
    logprobs: np.ndarray,
) -> None:
    full = [*prompt, *tokens]
    datum = pair(full, weights=[1.0] * (len(full) - 1))
    passed = await engine.forward_backward(name, (datum,), CROSS_ENTROPY, forward_only=True)
    assert np.array_equal(logprobs_of(passed.logprobs[0])[len(prompt) - 1 :], logprobs)


async def test_publishing_and_dropping_adapters_during_a_decode_moves_no_bit_of_it(
    model_folder: Path,
) -> None:
    async with running(model_folder) as engine:
        await publish(engine)
        prompt = prompts(1, seed=5)[0]
        names = ("b", "e")
        alone = [
            await sample(engine, f"s{name}", prompt, 2, seed=1, max_tokens=60) for name in names
        ]
        running_on = [
            asyncio.create_task(sample(engine, f"s{name}", prompt, 2, seed=1, max_tokens=60))
            for name in names
        ]
        others = 0
        while not all(task.done() for task in running_on):
            name = "acd"[others % 3]
            await engine.forward_backward(name, lessons(1, seed=others), CROSS_ENTROPY)
            await engine.optim_step(name, FAST)
            await engine.snapshot(name, f"s{name}")
            await sample(engine, f"s{name}", prompt, 1 + others % 3, seed=others, max_tokens=3)
            await engine.drop(f"s{name}")
            await engine.drop("sb")
            others += 1
        assert others >= 2
        assert [same(await task) for task in running_on] == [same(one) for one in alone]


async def test_copies_of_adapters_are_held_only_while_several_decode(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    original = MultiLora.adaptations

    def watched(self: MultiLora, *args: object) -> object:
        held.append(self.nbytes)
        return original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(MultiLora, "adaptations", watched)
    for most in (1 << 28, 3_000_000, 0):
        async with running(model_folder, Limits(mixture_bytes=most)) as engine:
            await publish(engine)
            mixture = engine._worker._sampler._batch.mixture
            del held[:]
            found = await asyncio.gather(
                *(sample(engine, f"s{name}", [1, 2, 3], 4, seed=1) for name in RANKS)
            )
            assert bool(most) == bool(max(held)), most
            assert max(held) <= most
            await sample(engine, "sa", [1, 2, 3])
            assert mixture.nbytes == 0
            alone = [await sample(engine, f"s{name}", [1, 2, 3], 4, seed=1) for name in RANKS]
            assert [same(one) for one in found] == [same(one) for one in alone]


async def test_an_adapter_that_has_diverged_fails_nobody_else(model_folder: Path) -> None:
    async with running(model_folder) as engine:
        await publish(engine, "bce")
        engine._snapshots["sc"].flat.fill_(float("nan"))  # type: ignore[union-attr]
        for lora in engine._snapshots["sc"].weights.values():
            lora.fuse()
        alone = await sample(engine, "sb", [4, 5, 6], 5, seed=2)
        tasks = [
            asyncio.create_task(sample(engine, f"s{name}", [4, 5, 6], 5, seed=2)) for name in "cbe"
        ]
        broken, among, _ = await asyncio.gather(*tasks, return_exceptions=True)
        assert "diverged" in str(broken)
        assert isinstance(among, SampleResult)
        assert same(among) == same(alone)


def test_a_batched_matmul_has_the_bits_of_single_ones_wherever_it_is_used() -> None:
    """Inputs on both sides of 192, ranks padded to 16, rows to 4; `torch.bmm` is let in where this
    holds at import.
    """
    assert projections._batched_agrees == projections._agrees_batched()
    if not projections._batched_agrees:
        pytest.skip("this machine's libraries disagree; adapters go one by one")
    drawn = torch.Generator().manual_seed(0)
    for inputs in (16, 48, 128, 192, 200, 384, 768):
        for outputs in (16, 48, 128, 256, 672):
            x_SMD = torch.randn((6, 12, inputs), generator=drawn)
            a_SRD = torch.randn((6, outputs, inputs), generator=drawn)
            batched = torch.bmm(x_SMD, a_SRD.transpose(1, 2))
            for i in range(6):
                rows = x_SMD[i].repeat(3, 1)[:16]
                assert torch.equal(batched[i], projections.reduced(rows, a_SRD[i])[:12])


SMALL = Limits(pass_tokens=512)


async def passed(
    engine: TorchEngine, names: Sequence[str], seed: int, *, together: bool
) -> list[PassResult]:
    """A pass of each; the second adapter's lessons begin alike, so that what they share is computed
    once.
    """
    calls = [engine.forward_backward(name, data_of(name, seed), CROSS_ENTROPY) for name in names]
    return await asyncio.gather(*calls) if together else [await call for call in calls]


def data_of(name: str, seed: int) -> tuple[Datum, ...]:
    if name in "be":
        random, start = np.random.default_rng(seed), prompts(1, seed=seed, low=30)[0]
        texts = [[*start, *random.integers(3, 600, 5 + i).tolist()] for i in range(4)]
        return tuple(pair(text, weights=random.standard_normal(len(text) - 1)) for text in texts)
    return lessons(2 + len(name), seed=seed)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many micro-batches were computed together, each time."""
    found: list[int] = []
    original = worker.compute_together

    def watched(pending: Sequence[PendingBatch]) -> None:
        found.append(len(pending))
        assert sum(one.size for one in pending) <= pending[0].limits.pass_tokens
        original(pending)

    monkeypatch.setattr(worker, "compute_together", watched)
    return found


async def test_an_adapter_trained_beside_others_has_the_bits_of_one_trained_alone(
    model_folder: Path, sizes: list[int]
) -> None:
    """Log-probabilities, losses, gradients and weights, over several steps; nothing is left to
    tolerance.
    """
    seen: list[object] = []
    for together in (False, True):
        async with running(model_folder, SMALL) as engine:
            for seed, name in enumerate(RANKS):
                await engine.create_adapter(
                    name, LoraConfig(rank=RANKS[name], seed=seed, **PARTS.get(name, {}))
                )
            told: list[object] = []
            for step in range(3):
                told += await passed(engine, list(RANKS), step, together=together)
                told += [gradient(engine, name).numpy().tobytes() for name in RANKS]
                told += await asyncio.gather(*(engine.optim_step(name, FAST) for name in RANKS))
            seen.append(repr([told, [weights(engine, name).numpy().tobytes() for name in RANKS]]))
            assert bool(sizes) == together
    assert seen[0] == seen[1]
    assert max(sizes) >= 4


async def test_a_datum_that_fails_poisons_no_adapter_of_its_micro_batch(
    model_folder: Path, sizes: list[int]
) -> None:
    async with running(model_folder, SMALL) as engine:
        for name in "abcd":
            await engine.create_adapter(name, LoraConfig(rank=RANKS[name], seed=1))
        alone = {
            name: await engine.forward_backward(name, data_of(name, 1), CROSS_ENTROPY)
            for name in "ab"
        }
        expected = {name: gradient(engine, name) for name in "ab"}
        for name in "ab":
            await engine.drop(name)
            await engine.create_adapter(name, LoraConfig(rank=RANKS[name], seed=1))
        text = prompts(1, seed=9)[0]
        huge = pair(text, logprobs=[-3e38] * (len(text) - 1), advantages=[1.0] * (len(text) - 1))
        unknown = pair([5, 6, 7], weights=[1.0, 1.0])
        unknown.inputs["target_tokens"] = array([6, 10**6], "int64")
        calls = [
            engine.forward_backward("a", data_of("a", 1), CROSS_ENTROPY),
            engine.forward_backward("c", (huge,), IMPORTANCE_SAMPLING),
            engine.forward_backward("d", (unknown,), CROSS_ENTROPY),
            engine.forward_backward("b", data_of("b", 1), CROSS_ENTROPY),
        ]
        a, c, d, b = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(c, LossNotFinite)
        assert isinstance(d, InvalidData)
        assert sizes
        assert max(sizes) == 3
        assert repr({"a": a, "b": b}) == repr(alone)
        assert all(torch.equal(gradient(engine, name), expected[name]) for name in "ab")
        assert not gradient(engine, "c").any()
        with pytest.raises(UserError, match="no gradient"):
            await engine.optim_step("c", FAST)


async def test_a_shared_micro_batch_without_memory_is_computed_by_each_alone(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    async with running(model_folder, SMALL) as engine:
        names = ("a", "b", "c")
        for name in names:
            await engine.create_adapter(name, LoraConfig(rank=RANKS[name], seed=1))
        expected = await passed(engine, names, 1, together=False)
        gradients = [gradient(engine, name) for name in names]
        for name in names:
            await engine.drop(name)
            await engine.create_adapter(name, LoraConfig(rank=RANKS[name], seed=1))

        monkeypatch.setattr(torch.autograd, "grad", refusing_many(torch.autograd.grad))
        assert repr(await passed(engine, names, 1, together=True)) == repr(expected)
        assert all(
            torch.equal(gradient(engine, n), g) for n, g in zip(names, gradients, strict=True)
        )
        assert sizes


def refusing_many(original: Callable[..., Any]) -> Callable[..., Any]:
    """No memory for gradients of several losses."""

    def grad(outputs: Any, *rest: Any, **named: Any) -> Any:
        if isinstance(outputs, list) and len(outputs) > 1:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")
        return original(outputs, *rest, **named)

    return grad


async def test_a_short_pass_among_many_long_ones_waits_for_few_micro_batches(
    model_folder: Path, sizes: list[int]
) -> None:
    """Six long passes wait already; the short one is computed with the next that has room."""
    async with running(model_folder, Limits(pass_tokens=96)) as engine:
        for name in RANKS:
            await engine.create_adapter(name, LoraConfig(rank=4, seed=1))
        long = [
            asyncio.create_task(engine.forward_backward(n, lessons(12, seed=5), CROSS_ENTROPY))
            for n in "abcde"
        ]
        await engine.forward_backward("f", (pair([3, 4, 5], weights=[1.0, 1.0]),), CROSS_ENTROPY)
        assert not any(task.done() for task in long)
        assert len(sizes) <= 3
        await asyncio.gather(*long)
