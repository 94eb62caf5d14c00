"""What does the KV cache cost, and whom does it keep waiting? Short rows beside a long one, and
memory that ends.

    OMP_NUM_THREADS=1 python benchmarks/engine_cache.py [--rounds 5]
    OMP_NUM_THREADS=1 python benchmarks/engine_cache.py --real    # Qwen3-0.6B's shape itself:
                                                                  minutes, 8 GB of memory

`mixed`: 128 rows of 55 + 64 tokens and one of 1,836 + 64, together and apart, on the built-in
model. `preemption`: 8 x 16 samples of 200 + 512 tokens on a model of bench-4m's size, with memory
for all, with as much as 8 GB are to Qwen3-0.6B in 16 bits (114,688 bytes a position), and with a
quarter of that. Every answer must have the same bits, and with 8 GB all must be in decode at once
for their first 32 tokens. `real`: 8 x 16 samples of 200 + 512 tokens on the shape of Qwen3-0.6B in
bfloat16 with 8 GB, checked over 32 steps. CPU seconds of one thread; parties alternate; medians.
Written: benchmarks/results/engine_cache.json. Exit code 1 where a gate does not hold: together at
most 1.2 times both apart, the same bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu import SHAPES, saved
from machine import machine
from synthetic import save_qwen3

from halteres.engine.protocol import SampleResult, SamplingParams
from halteres.engine.torch.adapter import BASE
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.loading import load_base
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.rows import SampleRequest
from halteres.engine.torch.worker import Scheduler
from halteres.models import TINY, builtin_path

RESULTS = Path(__file__).parent / "results" / "engine_cache.json"
MOST_RATIO = 1.2
# of Qwen3-0.6B: 28 layers, 8 key heads of 128, keys and values, 2 bytes each
POSITION_BYTES = 114_688
CACHE_BYTES = 8e9
GROUPS, GROUP, PROMPT, ANSWER, STEPS = 8, 16, 200, 512, 32


def main() -> int:
    parser = argparse.ArgumentParser(description="The KV cache.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--real", action="store_true", help="only how many rows of a 0.6B shape are decoded at once"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.real:
        return real()
    record: dict[str, Any] = {
        "what": "CPU seconds of one thread: rows of mixed length, and a cache that is too small",
        "command": " ".join(["python", "benchmarks/engine_cache.py", *sys.argv[1:]]),
        "machine": machine(),
        "mixed": mixed(options.rounds),
        "preemption": preemption(),
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    good = (
        record["mixed"]["ratio"] <= MOST_RATIO
        and record["preemption"]["equal"]
        and record["preemption"]["at_once"]
    )
    print("Passed." if good else "FAILED.")
    return 0 if good else 1


def real() -> int:
    """Added to the results that are there."""
    with tempfile.TemporaryDirectory(prefix="halteres-cache-") as folder:
        base = load_base(
            saved(Path(folder), "cpu", **SHAPES["0.6B"]), torch.bfloat16, torch.device("cpu")
        )
    assert base.cache_bytes_per_token == POSITION_BYTES
    sampler, rows = Scheduler(base, Limits(cache_bytes=int(CACHE_BYTES))), list[int]()
    begun = time.process_time()
    with torch.inference_mode():
        for seed in range(GROUPS):
            sampler.add(asked(PROMPT, GROUP, ANSWER, seed))
        while len(rows) < STEPS:
            sampler.step()
            rows.append(sampler.num_rows)
    found = {
        "machine": machine(),
        "rows_least": min(rows),
        "steps": STEPS,
        "cpu_s": time.process_time() - begun,
    }
    record = json.loads(RESULTS.read_text(encoding="utf-8")) | {"real": found}
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found))
    return 0 if found["rows_least"] == GROUPS * GROUP else 1


def mixed(rounds: int) -> dict[str, Any]:
    folder = builtin_path(TINY)
    assert folder is not None
    base = load_base(folder, torch.float32, torch.device("cpu"))
    parties: dict[str, Callable[[], list[SampleRequest]]] = {
        "short": lambda: [asked(55, 16, 64, seed) for seed in range(8)],
        "long": lambda: [asked(1836, 1, 64, 9)],
        "together": lambda: [
            asked(1836, 1, 64, 9),
            *(asked(55, 16, 64, seed) for seed in range(8)),
        ],
        "single": lambda: [asked(55, 1, 64, 0)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in parties}
    for number in range(rounds + 1):
        for name, party in parties.items():
            taken, _ = sampled(base, Limits(), party())
            if number:  # the first one warms up
                seconds[name].append(taken)
    found: dict[str, Any] = {
        f"{name}_s": round(statistics.median(times), 4) for name, times in seconds.items()
    }
    found["ratio"] = round(found["together_s"] / (found["short_s"] + found["long_s"]), 3)
    found["tokens_per_s"] = {
        "128 rows": round(8192 / found["short_s"]),
        "1 row": round(64 / found["single_s"]),
    }
    print(json.dumps(found))
    return found


def preemption() -> dict[str, Any]:
    base = model_of_4m()
    whole = int(CACHE_BYTES / POSITION_BYTES) * base.cache_bytes_per_token
    found: dict[str, Any] = {"positions": {}, "cpu_s": {}, "rows": {}}
    results: dict[str, list[SampleResult]] = {}
    for name, cache_bytes in {"all": 4 * whole, "8 GB": whole, "2 GB": whole // 4}.items():
        requests = [asked(PROMPT, GROUP, ANSWER, seed) for seed in range(GROUPS)]
        at_once: list[int] = []
        found["cpu_s"][name], results[name] = sampled(
            base, Limits(cache_bytes=cache_bytes), requests, at_once
        )
        found["positions"][name] = cache_bytes // base.cache_bytes_per_token
        if name == "8 GB":
            found["at_once"] = min(at_once[:32]) == GROUPS * GROUP
        print(
            name,
            found["cpu_s"][name],
            f"rows: {at_once[0]} at first, {min(at_once[:ANSWER])} at least",
            flush=True,
        )
        found["rows"][name] = at_once[::64]
    found["equal"] = results["all"] == results["8 GB"] == results["2 GB"]
    return found


def model_of_4m() -> BaseModel:
    with tempfile.TemporaryDirectory(prefix="halteres-cache-") as folder:
        return load_base(
            save_qwen3(Path(folder), width=256, layers=4), torch.float32, torch.device("cpu")
        )


def asked(prompt: int, samples: int, answer: int, seed: int) -> SampleRequest:
    tokens = np.random.default_rng(seed).integers(3, 600, prompt)
    return SampleRequest(
        snapshot=BASE,
        prompt=tokens.astype("<i4").tobytes(),
        tokens=tokens,
        num_samples=samples,
        params=SamplingParams(max_tokens=answer, seed=seed),
        limit=answer,
        stop_tokens=frozenset(),
        decode=str,
        future=Future(),
    )


def sampled(
    base: BaseModel, limits: Limits, requests: list[SampleRequest], at_once: list[int] | None = None
) -> tuple[float, list[SampleResult]]:
    """CPU seconds until all are answered; `at_once` gets the rows of every step."""
    sampler, begun = Scheduler(base, limits), time.process_time()
    with torch.inference_mode():
        for request in requests:
            sampler.add(request)
        while sampler.busy:
            sampler.step()
            if at_once is not None:
                at_once.append(sampler.num_rows)
    return round(time.process_time() - begun, 4), [request.future.result(0) for request in requests]


if __name__ == "__main__":
    sys.exit(main())
