"""What do many adapters cost beside one, in decoding and in training?

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/engine_adapters.py [--rounds 7]

One thread, the built-in model, rank 16 where one adapter serves all, ranks 8, 16 and 32 in turn
where there are sixteen. CPU seconds of the process; all settings take turns in one invocation;
medians of the rounds, and their ratios.

Decoding: 16 prompts of 64 tokens, 8 rows each, 48 new tokens: without an adapter, with one for all,
with one for each prompt. No prefix is kept. Memory: the copies of adapters' weights that decode
together.

Training: 64 datums of 48 to 96 random tokens as one request of one adapter, and as sixteen requests
of 4 datums that wait together; with and without the optimiser steps, of which there are sixteen
then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from machine import machine
from synthetic import datum

from halteres.engine.protocol import Adam, Datum, LoraConfig, LossSpec, SamplingParams
from halteres.engine.torch import TorchEngine
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.multi_lora import MultiLora
from halteres.models import TINY, builtin_path

RESULT = Path(__file__).parent / "results" / "engine_adapters.json"
TENANTS, ROWS, DATUMS, NEW = 16, 8, 4, 48
RANKS = (8, 16, 32)
LOSS, ADAM = LossSpec(name="cross_entropy"), Adam(learning_rate=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    found = asyncio.run(measured(args.rounds)) | {"machine": machine()}
    RESULT.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


async def measured(rounds: int) -> dict[str, Any]:
    folder = builtin_path(TINY)
    assert folder is not None
    engine = TorchEngine(folder, TINY, 1, Limits(prefixes=0))
    await engine.create_adapter("one", LoraConfig(rank=16, seed=1))
    for i in range(TENANTS):
        await engine.create_adapter(f"t{i}", LoraConfig(rank=RANKS[i % len(RANKS)], seed=i))
    tenants = [f"t{i}" for i in range(TENANTS)]
    for name in ("one", *tenants):
        await engine.forward_backward(name, data(2, seed=99), LOSS)
        await engine.optim_step(name, ADAM)
        await engine.snapshot(name, f"s{name}")
    copied: list[int] = []
    original = MultiLora.hold

    def watched(self: MultiLora, *snapshots: Any) -> None:
        original(self, *snapshots)
        copied.append(self.nbytes)

    MultiLora.hold = watched  # type: ignore[method-assign]
    works: dict[str, Callable[[], Awaitable[object]]] = {
        "decode none": lambda: decode(engine, [None] * TENANTS),
        "decode one": lambda: decode(engine, ["sone"] * TENANTS),
        "decode sixteen": lambda: decode(engine, [f"s{name}" for name in tenants]),
        "train one": lambda: engine.forward_backward("one", data(TENANTS * DATUMS), LOSS),
        "step one": lambda: engine.optim_step("one", ADAM),
        "train sixteen": lambda: train(engine, tenants),
        "step sixteen": lambda: gathered(engine.optim_step(name, ADAM) for name in tenants),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            started = time.process_time()
            await work()
            seconds[name].append(time.process_time() - started)
    weights = sum(engine._snapshots[f"s{name}"].flat.nbytes for name in tenants)  # type: ignore[union-attr]
    await engine.close()
    cpu = {name: round(median(values[1:]), 4) for name, values in seconds.items()}
    passes = cpu["train one"] / cpu["train sixteen"]
    whole = (cpu["train one"] + cpu["step one"]) / (cpu["train sixteen"] + cpu["step sixteen"])
    return {
        "cpu_s": cpu,
        "decode: sixteen / none (at most 1.6)": round(
            cpu["decode sixteen"] / cpu["decode none"], 3
        ),
        "decode: sixteen / one (at most 1.25)": round(cpu["decode sixteen"] / cpu["decode one"], 3),
        "train: throughput of sixteen / of one (at least 0.9)": round(passes, 3),
        "train: the same with optimiser steps": round(whole, 3),
        "copies_mb": round(max(copied) / 1e6, 2),
        "adapters_mb": round(weights / 1e6, 2),
        "rounds": rounds,
    }


async def gathered(calls: Any) -> None:
    await asyncio.gather(*calls)


async def decode(engine: TorchEngine, snapshots: list[str | None]) -> None:
    params = SamplingParams(max_tokens=NEW, stop_tokens=(), seed=1)
    prompts = np.random.default_rng(0).integers(3, 600, (TENANTS, 64), dtype=np.int32)
    await gathered(
        engine.sample(name, prompt.tobytes(), ROWS, params)
        for name, prompt in zip(snapshots, prompts, strict=True)
    )


async def train(engine: TorchEngine, tenants: list[str]) -> None:
    lessons = data(TENANTS * DATUMS)
    await gathered(
        engine.forward_backward(name, lessons[i * DATUMS : (i + 1) * DATUMS], LOSS)
        for i, name in enumerate(tenants)
    )


def data(count: int, seed: int = 0) -> tuple[Datum, ...]:
    random = np.random.default_rng(seed)
    return tuple(
        datum(random.integers(3, 600, random.integers(48, 97)).astype(np.int32))
        for _ in range(count)
    )


if __name__ == "__main__":
    main()
