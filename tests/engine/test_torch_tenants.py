"""Two tenants of one torch engine: whatever one does, no bit of the other moves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from contract.requirements import proves

from halteres.engine.checks import EngineOutOfMemory
from halteres.engine.protocol import Adam, Datum, ExtraLogprobs, LoraConfig, SamplingParams
from halteres.engine.torch import TorchEngine
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.micro_batches import plan
from halteres.engine.torch.model import FusedModel
from halteres.errors import HalteresError, InvalidData

from .requests import CROSS_ENTROPY, IMPORTANCE_SAMPLING, array, from_folder, packed
from .torch_fixtures import lessons, of_answer, pair, prompts, running, sample

pytestmark = pytest.mark.runs

STEPS = 4
PROMPT = prompts(1, seed=61)[0]
GOOD = Adam(learning_rate=4e-3, weight_decay=0.01, grad_clip_norm=1.0)


@dataclass(frozen=True)
class Seen:
    """Everything a tenant could look at."""

    answers: list[object]
    files: dict[str, bytes]
    weights: bytes


async def tenant(engine: TorchEngine, folder: Path) -> Seen:
    """A: creates, trains on its own samples, snapshots, samples old snapshots again, saves."""
    answers: list[object] = []
    await engine.create_adapter("a", LoraConfig(rank=8, seed=5))
    for step in range(STEPS):
        await engine.snapshot("a", f"s{step}")
        sampled = await sample(engine, f"s{step}", PROMPT, n=4, seed=step, max_tokens=12)
        data = tuple(
            of_answer(PROMPT, s, a)
            for s, a in zip(sampled.sequences, (1.0, -0.5, 0.2, -0.7), strict=True)
        )
        answers += [
            sampled,
            await engine.forward_backward("a", lessons(3, seed=step), CROSS_ENTROPY),
        ]
        answers += [
            await engine.forward_backward("a", data, IMPORTANCE_SAMPLING),
            await engine.optim_step("a", GOOD),
        ]
        extra = ExtraLogprobs(topk_sampled=2, alternatives=2)
        params = SamplingParams(max_tokens=8, seed=1, stop_tokens=())
        answers.append(await engine.sample("s0", packed(PROMPT), 2, params, extra))
    await engine.save("a", str(folder / "w"), optimizer=True)
    await engine.save_snapshot("s1", str(folder / "s"))
    files = {
        str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()
    }
    return Seen(answers, files, engine._adapters["a"].flat.numpy().tobytes())


async def refused(call: object, kind: type[HalteresError]) -> None:
    with pytest.raises(kind):
        await call  # type: ignore[misc]


async def trouble(engine: TorchEngine, done: asyncio.Event) -> None:
    """B: another rank, decay, a learning rate that ends in NaN, bad tokens, memory that runs out;
    again and again.
    """
    bad = pair([5, 6, 7], weights=[1.0, 1.0])
    bad.inputs["target_tokens"] = array([6, 10**6], "int64")
    rounds = 0
    while not done.is_set() or rounds < 2:
        name, rounds = f"b{rounds}", rounds + 1
        await engine.create_adapter(name, LoraConfig(rank=32, seed=1))
        await engine.forward_backward(name, lessons(5, seed=rounds), CROSS_ENTROPY)
        await refused(engine.forward_backward(name, (bad,), CROSS_ENTROPY), InvalidData)
        await refused(sample(engine, None, [10**6]), InvalidData)
        await engine.optim_step(name, Adam(learning_rate=1e30, weight_decay=0.9))
        await refused(engine.forward_backward(name, lessons(2), CROSS_ENTROPY), HalteresError)
        await engine.snapshot(name, f"t{name}")
        await refused(sample(engine, f"t{name}", PROMPT, n=5, seed=1, max_tokens=30), HalteresError)
        await refused(
            engine.forward_backward(name, lessons(12, seed=99), CROSS_ENTROPY), EngineOutOfMemory
        )
        await sample(
            engine,
            None,
            prompts(1, low=80, high=90, seed=rounds)[0],
            n=9,
            seed=rounds,
            max_tokens=20,
        )
        for gone in (name, f"t{name}"):
            await engine.drop(gone)


@proves("tenants:no-leak")
async def test_nothing_that_one_tenant_does_moves_a_bit_of_another(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Seen] = []
    original = FusedModel.hidden_states

    def without_memory(
        base: object, weights: object, tokens_N: torch.Tensor, *rest: object, **named: object
    ) -> torch.Tensor:
        """B's pass of twelve lessons finds no memory."""
        if tokens_N[:5].tolist() == scarce:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")
        return original(base, weights, tokens_N, *rest, **named)  # type: ignore[arg-type]

    scarce = first_tokens(lessons(12, seed=99))
    for company in (False, True):
        folder = tmp_path / str(company)
        async with running(model_folder, Limits(pass_tokens=256)) as engine:
            if not company:
                seen.append(await tenant(engine, folder))
                continue
            monkeypatch.setattr(FusedModel, "hidden_states", without_memory)
            done = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(trouble(engine, done))
                seen.append(await tenant(engine, folder))
                done.set()
    alone, among = seen
    assert repr(among.answers) == repr(alone.answers)
    assert among.weights == alone.weights
    assert among.files == alone.files
    assert np.isfinite(np.frombuffer(alone.weights, np.float32)).all()


def first_tokens(data: tuple[Datum, ...]) -> list[int]:
    """Of its first micro-batch; no other request here has a sequence that begins so."""
    sequences = [np.frombuffer(datum.tokens, np.int32) for datum in data]
    return sequences[plan(sequences, 256)[0][0]][:5].tolist()


@proves("sample:snapshot")
async def test_a_snapshot_gives_the_same_bits_after_anything(
    model_folder: Path, tmp_path: Path
) -> None:
    """Trained on, loaded over, dropped beside it, sampled by others: an old snapshot stands."""
    async with running(model_folder) as engine:
        await engine.create_adapter("a", LoraConfig(rank=8, seed=5))
        await engine.forward_backward("a", lessons(3), CROSS_ENTROPY)
        await engine.optim_step("a", GOOD)
        await engine.snapshot("a", "old")
        await engine.save("a", str(tmp_path / "w"), optimizer=True)
        before = await sample(engine, "old", PROMPT, n=4, seed=1, max_tokens=30)
        await engine.forward_backward("a", lessons(3, seed=2), CROSS_ENTROPY)
        await engine.optim_step("a", Adam(learning_rate=1.0))
        await engine.snapshot("a", "new")
        await engine.load("a", str(tmp_path / "w"), optimizer=True)
        await engine.hold("loaded", from_folder(tmp_path / "w"))
        others = [
            sample(engine, name, PROMPT, n=6, seed=1, max_tokens=30)
            for name in ("new", "loaded", None)
        ]
        *_, loaded, _, after = await asyncio.gather(
            *others, sample(engine, "old", PROMPT, n=4, seed=1, max_tokens=30)
        )
        assert after == before
        assert loaded.sequences[:4] == before.sequences
        await engine.drop("a")
        assert await sample(engine, "old", PROMPT, n=4, seed=1, max_tokens=30) == before
