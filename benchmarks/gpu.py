"""What one GPU does: training, saturated decoding, publishing, agreement of sampler and trainer,
many adapters.

    .venv/bin/python benchmarks/gpu.py    # Qwen3's 0.6B, 4B and 8B shapes, in minutes
    .venv/bin/python benchmarks/gpu.py --device cpu --shapes tiny    # the same on a CPU

Models of random weights in bfloat16, made here: no network. Wall clock, one warm-up, medians of
`--rounds`.

`train`: one forward_backward and optim_step, LoRA r32 on attention and MLP, sequences of one
length, tokens/s and the share of the GPU's peak by 6 operations per parameter and token, as such
figures are published (LoRA needs 4, and 2 more where layers are computed once more). `decode`:
tokens/s of as many samples as `places` and `--rows` allow. `publish`: from the call of `snapshot`
until the first token of the new version. `agreement`: half the mean squared difference of sampled
and trained log-probabilities. `adapters`: tokens/s where 1, 16 and 256 adapters of rank 16 decode
together (the smallest shape alone).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from machine import machine
from synthetic import datum
from transformers import Qwen3Config, Qwen3ForCausalLM

from halteres.engine.protocol import Adam, LoraConfig, LossSpec, SamplingParams
from halteres.engine.torch import TorchEngine
from halteres.engine.torch.device import difference

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "heads": (4, 2),
        "vocab_size": 4096,
    },
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "heads": (16, 8),
    },
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "heads": (32, 8),
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "heads": (32, 8),
        "tied": False,
    },
}
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}
"""Dense bfloat16, by the part of the GPU's name; of another GPU no share is told."""
PROMPT, NEW = 256, 128
LOSS, ADAM = LossSpec(name="cross_entropy"), Adam(learning_rate=1e-5)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.6B", "4B", "8B"])
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[2048, 16384], help="of training sequences"
    )
    parser.add_argument("--tokens", type=int, default=32768, help="of one training step")
    parser.add_argument(
        "--rows", type=int, default=256, help="samples that are decoded together, at most"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "gpu.json"
    )
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    found: dict[str, Any] = {
        "machine": machine(),
        "device": name,
        "torch": torch.__version__,
        "shapes": {},
    }
    for dtype in ("float32", "bfloat16"):
        found[f"difference from the CPU, {dtype}"] = asyncio.run(difference(options.device, dtype))
    for shape in options.shapes:
        with tempfile.TemporaryDirectory(prefix="halteres-gpu-") as scratch:
            folder = saved(Path(scratch), options.device, **SHAPES[shape])
            found["shapes"][shape] = asyncio.run(
                measured(folder, options, name, shape == options.shapes[0])
            )
        print(shape, json.dumps(found["shapes"][shape]), flush=True)
        options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print("->", options.output)


def saved(
    folder: Path, device: str, *, heads: tuple[int, int], tied: bool = True, **sizes: Any
) -> Path:
    """A model of this shape with random weights."""
    defaults = {"vocab_size": 151_936, "max_position_embeddings": 40_960, "head_dim": 128}
    config = Qwen3Config(
        **defaults | sizes,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return folder


async def measured(
    folder: Path, options: argparse.Namespace, gpu: str, adapters: bool
) -> dict[str, Any]:
    started = time.perf_counter()
    engine = await asyncio.to_thread(
        TorchEngine, folder, "model", 1, device=options.device, dtype="bfloat16"
    )
    info = await engine.info()
    found: dict[str, Any] = {
        "parameters": info.num_parameters,
        "load_s": round(time.perf_counter() - started, 1),
    }
    found["places"] = info.places
    await engine.create_adapter("a", LoraConfig(rank=32, seed=1, train_unembed=False))
    peak = next((peak for part, peak in PEAK_TFLOPS.items() if part in gpu), None)
    for length in options.lengths:
        rate = options.tokens / await timed(
            lambda n=length: step(engine, n, options.tokens), options.rounds
        )
        found[f"train {length}"] = {"tokens_per_s": round(rate)} | (
            {"share_of_peak": round(6 * info.num_parameters * rate / peak / 1e12, 3)}
            if peak
            else {}
        )
    rows = min(options.rows, info.places)
    found["decode"] = {
        "rows": rows,
        "tokens_per_s": round(
            rows * NEW / await timed(lambda: decode(engine, rows), options.rounds)
        ),
    }
    published = [await publish(engine, number) for number in range(options.rounds + 1)][1:]
    found["publish_ms"] = round(1000 * median(published), 1)
    found["agreement_kl_v2"] = await agreement(engine)
    for count in (1, 16, 256) if adapters else ():
        names = [f"s{i}" for i in range(count)]
        for i, snapshot in enumerate(names):
            await engine.create_adapter(f"t{i}", LoraConfig(rank=16, seed=i, train_unembed=False))
            await engine.snapshot(f"t{i}", snapshot)
            await engine.drop(f"t{i}")  # 256 of them with their moments would not fit
        rate = rows * NEW / await timed(lambda n=names: decode(engine, rows, n), options.rounds)
        found[f"decode, {count} adapters"] = {"tokens_per_s": round(rate)}
        for snapshot in names:
            await engine.drop(snapshot)
    if options.device == "cuda":
        found["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        torch.cuda.reset_peak_memory_stats()
    await engine.close()
    return found


async def timed(work: Callable[[], Awaitable[object]], rounds: int) -> float:
    """The median of some rounds after one that warms up."""
    seconds: list[float] = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        await work()
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])


async def step(engine: TorchEngine, length: int, tokens: int) -> None:
    random = np.random.default_rng(length)
    count = max(1, tokens // length)
    data = tuple(datum(random.integers(3, 4000, length + 1).astype(np.int32)) for _ in range(count))
    await engine.forward_backward("a", data, LOSS)
    await engine.optim_step("a", ADAM)


async def decode(engine: TorchEngine, rows: int, snapshots: list[str] | None = None) -> None:
    """One prompt for each row; rows take the snapshots in turn."""
    random = np.random.default_rng(0)
    names = snapshots or [None]
    params = SamplingParams(max_tokens=NEW, stop_tokens=())
    prompts = [random.integers(3, 4000, PROMPT).astype(np.int32).tobytes() for _ in range(rows)]
    await asyncio.gather(
        *(engine.sample(names[i % len(names)], p, 1, params) for i, p in enumerate(prompts))
    )


async def publish(engine: TorchEngine, number: int) -> float:
    started = time.perf_counter()
    await engine.snapshot("a", "published")
    await engine.sample(
        "published", np.int32([5, 6, 7, number + 8]).tobytes(), 1, SamplingParams(max_tokens=1)
    )
    return time.perf_counter() - started


async def agreement(engine: TorchEngine) -> float:
    """Of 16 samples of one prompt."""
    await engine.snapshot("a", "published")
    prompt = np.random.default_rng(1).integers(3, 4000, PROMPT).astype(np.int32)
    result = await engine.sample(
        "published", prompt.tobytes(), 16, SamplingParams(max_tokens=NEW, stop_tokens=())
    )
    data = tuple(
        datum(np.concatenate([prompt, np.frombuffer(one.tokens, np.int32)]).astype(np.int32))
        for one in result.sequences
    )
    passed = await engine.forward_backward("a", data, LOSS, forward_only=True)
    apart = [
        np.frombuffer(trained.data, np.float32)[-NEW:] - np.frombuffer(one.logprobs, np.float32)
        for trained, one in zip(passed.logprobs, result.sequences, strict=True)
    ]
    return float(0.5 * np.mean(np.square(np.concatenate(apart))))


if __name__ == "__main__":
    main()
