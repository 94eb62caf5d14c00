"""Does the engine's resident memory stay flat while it trains, and what does it hold?

    OMP_NUM_THREADS=1 python -m benchmarks.engine_memory [--minutes 10] [--out
    benchmarks/results/engine_memory.json]

A model of SmolLM2-135M's shape with random weights (30 layers, width 576, vocabulary 49,152; 0.54
GB in fp32) trains an adapter of rank 16: each step samples 4 groups of 8 answers, trains on them,
steps, publishes, and drops the publish before the last. Resident memory is read after every step.
The engine runs in this process, alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.machine import machine
from halteres.engine.protocol import (
    Adam,
    Array,
    Datum,
    LoraConfig,
    LossSpec,
    SampleResult,
    SamplingParams,
)
from halteres.engine.torch import TorchEngine

MB = 1 << 20
GROUPS, SIZE, PROMPT, LONGEST = 4, 8, 46, 16


def resident_mb() -> float:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * 4096 / MB


def peak_mb() -> float:
    """Of this process since it began."""
    rows = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    )
    return int(rows["VmHWM"].split()[0]) / 1024


def write_model(folder: Path) -> None:
    """Random weights of SmolLM2-135M's shape, and the built-in model's tokenizer, which nobody
    asks.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49_152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def datum(prompt: np.ndarray, sampled: SampleResult, sample: int) -> Datum:
    """An importance-sampling example of one answer; every other one is better than its group."""
    tokens, logprobs = (
        np.frombuffer(data, kind)
        for data, kind in (
            (sampled.sequences[sample].tokens, np.int32),
            (sampled.sequences[sample].logprobs, np.float32),
        )
    )
    whole = np.concatenate([prompt, tokens]).astype(np.int32)
    columns = np.zeros((2, len(whole) - 1), np.float32)
    columns[0, len(prompt) - 1 :], columns[1, len(prompt) - 1 :] = (
        logprobs,
        1.0 if sample % 2 else -1.0,
    )
    shape = (len(whole) - 1,)
    inputs = {
        "target_tokens": Array(
            dtype="int64", shape=shape, data=whole[1:].astype(np.int64).tobytes()
        ),
        "logprobs": Array(dtype="float32", shape=shape, data=columns[0].tobytes()),
        "advantages": Array(dtype="float32", shape=shape, data=columns[1].tobytes()),
    }
    return Datum(tokens=whole[:-1].tobytes(), inputs=inputs)


async def step(engine: TorchEngine, number: int) -> None:
    """Sample, train, publish; lengths differ from step to step, as real ones do."""
    random = np.random.default_rng(number)
    policy = f"s{number}"
    await engine.snapshot("a", policy)
    await engine.drop(f"s{number - 1}")
    prompts = [
        random.integers(3, 40_000, PROMPT + int(random.integers(-16, 17))).astype(np.int32)
        for _ in range(GROUPS)
    ]
    params = SamplingParams(
        max_tokens=int(random.integers(8, LONGEST + 1)), seed=number, stop_tokens=()
    )
    drawn = await asyncio.gather(
        *(engine.sample(policy, prompt.tobytes(), SIZE, params) for prompt in prompts)
    )
    data = tuple(
        datum(p, one, sample)
        for p, one in zip(prompts, drawn, strict=True)
        for sample in range(SIZE)
    )
    await engine.forward_backward("a", data, LossSpec(name="importance_sampling"))
    await engine.optim_step("a", Adam(learning_rate=1e-5))


async def soak(folder: Path, minutes: float) -> dict[str, Any]:
    """Resident MB after loading, after every step, and at the peak."""
    engine = await asyncio.to_thread(TorchEngine, folder, "random", 1)
    loaded, at_load = resident_mb(), peak_mb()
    await engine.create_adapter("a", LoraConfig(rank=16, seed=1))
    after: list[float] = []
    ends = time.monotonic() + 60 * minutes
    while time.monotonic() < ends:
        await step(engine, len(after))
        after.append(round(resident_mb()))
        print(f"step {len(after)}: {after[-1]} MB", flush=True)
    await engine.close()
    warm = after[len(after) // 3 :]
    return {
        "minutes": minutes,
        "steps": len(after),
        "loaded_mb": round(loaded),
        "peak_while_loading_mb": round(at_load),
        "peak_mb": round(peak_mb()),
        "second_third_mb": max(warm[: len(warm) // 2]),
        "last_third_mb": max(warm[len(warm) // 2 :]),
        "after_each_step_mb": after,
    }


def main() -> None:
    """Print the figures; write them where asked."""
    parser = argparse.ArgumentParser(description="Resident memory of an engine that trains.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        writing = get_context("spawn").Process(target=write_model, args=(Path(folder),))
        writing.start()  # elsewhere: this process's memory is the engine's
        writing.join()
        found = asyncio.run(soak(Path(folder), asked.minutes))
    ratio = found["last_third_mb"] / found["second_third_mb"]
    print(
        f"{found['steps']} steps, peak {found['peak_mb']} MB; last third / second third: "
        f"{ratio:.3f}"
    )
    if asked.out is not None:
        asked.out.write_text(
            json.dumps({"machine": machine(), "ratio": ratio, **found}, indent=2) + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
