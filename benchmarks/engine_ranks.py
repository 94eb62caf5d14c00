"""What do ranks cost in CPU seconds for each token of a pass, against one process?

One process, one rank and two ranks of one thread each, forward and backward of the same data
(`bench-27m`, fp32, LoRA r16), in turns: CPU seconds of all their processes, the service's side left
out. With `--shard` two ranks of a sharded base, too.

    OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 python benchmarks/engine_ranks.py [--repeats 5] [--shard]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine
from synthetic import datum, save_qwen3

from halteres.engine.process import EngineCommand, EngineProcess, Ranks
from halteres.engine.protocol import Adam, Datum, LoraConfig, LossSpec

RESULT = Path(__file__).parent / "results" / "engine_ranks.json"
CASES: dict[str, Ranks | None] = {
    "one process": None,
    "one rank": Ranks(number=1),
    "two ranks": Ranks(number=2),
}
SHARDED = {"two ranks, sharded": Ranks(number=2, shard=True)}
DATUMS, SHORTEST, LONGEST = 16, 100, 300
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def data(seed: int) -> tuple[Datum, ...]:
    """Cross-entropy datums of random tokens."""
    random = np.random.default_rng(seed)
    lengths = random.integers(SHORTEST, LONGEST, DATUMS)
    return tuple(datum(random.integers(3, 4000, size, dtype=np.int32)) for size in lengths)


def cpu_s(process: int) -> float:
    """Of a process and those that it has started, so far."""
    total = 0.0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        except OSError:
            continue
        if process in (int(folder.name), int(fields[1])):
            total += (int(fields[11]) + int(fields[12])) * TICK_S
    return total


async def measured(folder: Path, cases: dict[str, Ranks | None], repeats: int) -> dict[str, Any]:
    """CPU milliseconds and seconds on the clock for a thousand tokens, of each case."""
    engines: dict[str, EngineProcess[Any]] = {}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    try:
        for name, ranks in cases.items():
            command = EngineCommand(
                backend="torch",
                folder=folder,
                name="bench-27m",
                threads=1,
                cache_gb=0.1,
                ranks=ranks,
            )
            engines[name] = EngineProcess(command, folder / f"{name}.log")
            await engines[name].start()
            await engines[name].engine.create_adapter("a", LoraConfig(rank=16, seed=1))
        for turn in range(repeats + 1):
            batch = data(turn)
            tokens = sum(len(one.tokens) // 4 for one in batch)
            for name, process in engines.items():
                assert process.pid is not None
                before, began = cpu_s(process.pid), time.monotonic()
                await process.engine.forward_backward("a", batch, LossSpec(name="cross_entropy"))
                await process.engine.optim_step("a", Adam(learning_rate=1e-4))
                took = time.monotonic() - began
                if turn:  # the first warms up
                    spent = cpu_s(process.pid) - before
                    found[name].append((1e6 * spent / tokens, 1e3 * took / tokens))
    finally:
        await asyncio.gather(*(process.stop() for process in engines.values()))
    return {
        name: {
            "cpu_ms_per_1k_tokens": round(statistics.median(cpu for cpu, _ in turns), 1),
            "s_per_1k_tokens": round(statistics.median(clock for _, clock in turns), 3),
        }
        for name, turns in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"to {RESULT.name}")
    options = parser.parse_args()
    cases = dict(CASES)
    if options.shard:
        cases |= SHARDED
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_qwen3(Path(scratch) / "bench-27m", width=512, layers=8)
        found = asyncio.run(measured(folder, cases, options.repeats))
    one = found["one process"]["cpu_ms_per_1k_tokens"]
    for case in found.values():
        case["cpu_of_one_process"] = round(case["cpu_ms_per_1k_tokens"] / one, 3)
    print(json.dumps(found, indent=2))
    if options.write:
        RESULT.write_text(
            json.dumps({"machine": machine(), "cases": found}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
