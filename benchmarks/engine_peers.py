"""Sampling beside transformers' `generate`, and LoRA training beside transformers with PEFT, in one
process.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/engine_peers.py [--rounds 5] [--bf16]

One thread, CPU seconds, parties in turns, medians and their ratios; models of random weights (but
the built-in one).

`sampling`: 8 prompts x 16 samples x 64 tokens on bench-4m, prompts of 32 random tokens, temperature
1, no end token; `single`: one prompt, one sample of 64 tokens. Of `generate` the faster type
counts, where --bf16 asks for both.

`training`: one forward, backward and optimiser step, LoRA r16 on attention and MLP, on 64 sequences
of 16 to 256 random tokens. The peer sorts them by length and takes micro-batches of 4, 8, 16 or 32;
its fastest counts. Beside that, the share of the matmul floor: what the pass's matmuls with base
weights would take at the speed of one of 1,024 rows.
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
from rl_step import TARGETS, layer_weights, matmul_gflops
from synthetic import datum, save_qwen3
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from halteres.engine.protocol import Adam, BaseType, LoraConfig, LossSpec, SamplingParams
from halteres.engine.torch import TorchEngine
from halteres.engine.torch.limits import Limits
from halteres.models import TINY, builtin_path
from halteres.models.shape import read_shape

RESULT = Path(__file__).parent / "results" / "engine_peers.json"
PROMPTS, SAMPLES, PROMPT, NEW = 8, 16, 32, 64
SEQUENCES, SHORTEST, LONGEST = 64, 16, 256
MICRO_BATCHES = (4, 8, 16, 32)
Work = Callable[[], Awaitable[object]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bf16", action="store_true", help="both in bfloat16, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = machine()
    dtypes: tuple[BaseType, ...] = ("float32", "bfloat16") if options.bf16 else ("float32",)
    found: dict[str, Any] = {
        "machine": before,
        "rounds": options.rounds,
        "sampling": {},
        "training": {},
    }
    with tempfile.TemporaryDirectory(prefix="halteres-peers-") as scratch:
        small = save_qwen3(Path(scratch) / "bench-4m", width=256, layers=4)
        large = save_qwen3(Path(scratch) / "bench-27m", width=512, layers=8)
        builtin = builtin_path(TINY)
        assert builtin is not None
        for case, shape in {"8 x 16 x 64": (PROMPTS, SAMPLES), "single": (1, 1)}.items():
            found["sampling"][case] = asyncio.run(sampling(small, *shape, dtypes, options.rounds))
            print(case, json.dumps(found["sampling"][case]), flush=True)
        for name, folder in {"built-in": builtin, "bench-4m": small, "bench-27m": large}.items():
            found["training"][name] = asyncio.run(training(folder, options.rounds))
            print(name, json.dumps(found["training"][name]), flush=True)
    RESULT.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


async def in_turns(works: dict[str, Work], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each, after one round that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            started = time.process_time()
            await work()
            seconds[name].append(time.process_time() - started)
    return {name: round(median(values[1:]), 4) for name, values in seconds.items()}


async def sampling(
    folder: Path, prompts: int, samples: int, dtypes: tuple[BaseType, ...], rounds: int
) -> dict[str, Any]:
    """Ours and `generate`, each in each type."""
    drawn = np.random.default_rng(0).integers(3, 4000, (prompts, PROMPT), dtype=np.int32)
    engines = {
        dtype: TorchEngine(folder, "model", 1, Limits(prefixes=0), dtype=dtype) for dtype in dtypes
    }
    peers = {
        dtype: AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        for dtype in dtypes
    }
    tokens = torch.from_numpy(drawn).long().repeat_interleave(samples, 0)

    async def ours(engine: TorchEngine) -> None:
        params = SamplingParams(max_tokens=NEW, stop_tokens=(), seed=1)
        await asyncio.gather(
            *(engine.sample(None, prompt.tobytes(), samples, params) for prompt in drawn)
        )

    async def theirs(model: Any) -> None:
        answers = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=True,
            top_k=0,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            pad_token_id=0,
        )
        assert answers.shape == (prompts * samples, PROMPT + NEW)

    works: dict[str, Work] = {
        f"ours {dtype}": lambda e=engine: ours(e) for dtype, engine in engines.items()
    }
    works |= {f"generate {dtype}": lambda m=model: theirs(m) for dtype, model in peers.items()}
    cpu = await in_turns(works, rounds)
    for engine in engines.values():
        await engine.close()
    fastest = min(value for name, value in cpu.items() if name.startswith("generate"))
    return {"cpu_s": cpu} | {
        f"generate / ours, {dtype}": round(fastest / cpu[f"ours {dtype}"], 2) for dtype in dtypes
    }


async def training(folder: Path, rounds: int) -> dict[str, Any]:
    """Ours and PEFT's, and the floor of the matmuls."""
    sequences = ragged(read_shape(folder).vocabulary)
    data = tuple(datum(tokens) for tokens in sequences)
    engine = TorchEngine(folder, "model", 1, Limits())
    await engine.create_adapter("a", LoraConfig(rank=16, seed=1, train_unembed=False))

    async def ours() -> None:
        await engine.forward_backward("a", data, LossSpec(name="cross_entropy"))
        await engine.optim_step("a", Adam(learning_rate=1e-4))

    works: dict[str, Work] = {"ours": ours}
    works |= {f"peft {size}": PeftStep(folder, sequences, size) for size in MICRO_BATCHES}
    cpu = await in_turns(works, rounds)
    await engine.close()
    floor = pass_gflop(folder, sum(len(tokens) - 1 for tokens in sequences)) / matmul_gflops(
        "float32", folder
    )
    fastest = min(value for name, value in cpu.items() if name.startswith("peft"))
    return {
        "cpu_s": cpu,
        "peft / ours": round(fastest / cpu["ours"], 2),
        "floor_cpu_s": round(floor, 4),
        "share_of_floor": round(floor / cpu["ours"], 2),
    }


class PeftStep:
    """One step of a PEFT adapter, in micro-batches of one size; the loss is the mean of all
    predicted tokens.
    """

    def __init__(self, folder: Path, sequences: list[np.ndarray], size: int) -> None:
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model

        config = PeftConfig(r=16, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")
        self._model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config
        )
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-4)
        ordered = sorted(sequences, key=len)
        self._batches = [ordered[i : i + size] for i in range(0, len(ordered), size)]
        self._targets = sum(len(tokens) - 1 for tokens in sequences)

    async def __call__(self) -> None:
        self._optimizer.zero_grad()
        for batch in self._batches:
            longest = max(map(len, batch))
            tokens = torch.zeros(len(batch), longest, dtype=torch.long)
            labels = torch.full_like(tokens, -100)
            mask = torch.zeros_like(tokens)
            for row, sequence in enumerate(batch):
                tokens[row, : len(sequence)] = labels[row, : len(sequence)] = torch.from_numpy(
                    sequence
                ).long()
                mask[row, : len(sequence)] = 1
            logits = self._model(input_ids=tokens, attention_mask=mask).logits[:, :-1]
            loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            (loss / self._targets).backward()
        self._optimizer.step()


def ragged(vocabulary: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    lengths = random.integers(SHORTEST, LONGEST + 1, SEQUENCES)
    return [
        random.integers(3, min(vocabulary, 4000), length).astype(np.int32) for length in lengths
    ]


def pass_gflop(folder: Path, tokens: int) -> float:
    """Operations of the matmuls with base weights, forward and to their inputs backward; without
    padding.
    """
    shape = read_shape(folder)
    return 2 * 2 * tokens * (layer_weights(shape) + shape.width * shape.vocabulary) / 1e9


if __name__ == "__main__":
    main()
