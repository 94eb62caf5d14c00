"""What does computing shared prefixes once save in a training pass?

Forward and backward of the engine's own passes (fp32, LoRA r16, one thread, CPU seconds), the same
data planned with and without the prefix trie, alternating in one process; and data that share
nothing, where the trie must cost nothing.

    OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 python benchmarks/engine_training.py [--repeats 5] [--only
    NAME]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine
from transformers import LlamaConfig, LlamaForCausalLM

from halteres.engine.protocol import LoraConfig
from halteres.engine.torch.adapter import Adapter, Layout
from halteres.engine.torch.limits import Limits, PassBudget
from halteres.engine.torch.loading import load_base
from halteres.engine.torch.losses import LOSSES, PerToken
from halteres.engine.torch.micro_batches import Example, MicroBatch, planned
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.passes import PendingBatch
from halteres.models import TINY, builtin_path

RESULT = Path(__file__).parent / "results" / "engine_training.json"
CPU = torch.device("cpu")
BUDGET = PassBudget.of(Limits())
WITHOUT_LOSS = PerToken(LOSSES["cross_entropy"], {})

CASES: dict[str, dict[str, Any]] = {
    "55 + 64 tokens, 8 x 16": {"prompt": 55, "answer": 64, "groups": 8, "size": 16, "gate": 1.5},
    "64 + 24 tokens, 16 x 8": {"prompt": 64, "answer": 24, "groups": 16, "size": 8, "gate": 2.4},
    "128 game turns": {"game": True},
    "nothing shared, 64 x 16 to 120 tokens": {
        "prompt": 0,
        "answer": 120,
        "groups": 64,
        "size": 1,
        "shortest": 16,
    },
    "width 576, 6 layers: 46 + 24 tokens, 8 x 8": {
        "prompt": 46,
        "answer": 24,
        "groups": 8,
        "size": 8,
        "wide": True,
    },
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--only", default="")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        if options.only in name:
            found[name] = measured(case, options.repeats)
            print(name, json.dumps(found[name]), flush=True)
    if not options.only:
        RESULT.write_text(
            json.dumps({"machine": machine(), "repeats": options.repeats, "cases": found}, indent=2)
            + "\n",
            encoding="utf-8",
        )


def measured(case: dict[str, Any], repeats: int) -> dict[str, Any]:
    """CPU seconds apart and shared, their ratio, and how far log-probabilities and gradients are
    from each other.
    """
    base, wide = model(case), case.get("wide", False)
    layout = Layout.of(base, LoraConfig(rank=16, seed=1, train_unembed=not wide))
    flat = layout.initial(CPU)
    adapter = Adapter(
        layout, flat + 0.01 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(0))
    )
    examples = turns() if case.get("game") else groups(case)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    results = {share: one_pass(base, adapter, examples, share) for share in seconds}
    for _ in range(repeats):
        for share, times in seconds.items():
            start = time.process_time()
            one_pass(base, adapter, examples, share)
            times.append(time.process_time() - start)
    (apart, gradient), (shared, shared_gradient) = results[False], results[True]
    medians = {share: statistics.median(times) for share, times in seconds.items()}
    return {
        "apart_cpu_s": round(medians[False], 4),
        "shared_cpu_s": round(medians[True], 4),
        "ratio": round(medians[False] / medians[True], 3),
        **({"gate": case["gate"]} if "gate" in case else {}),
        "logprobs_that_differ": sum(int((apart[i] != shared[i]).sum()) for i in apart),
        "logprobs": sum(map(len, examples)),
        "gradient_apart": float((gradient - shared_gradient).norm() / gradient.norm()),
    }


def one_pass(
    base: BaseModel, adapter: Adapter, examples: list[Example], share: bool
) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Log-probabilities by datum, and the gradient."""
    found: dict[int, torch.Tensor] = {}
    adapter.begin_pass()
    for part in planned(examples, BUDGET.tokens, share):
        batch = MicroBatch.of(part, CPU, share)
        logprobs = PendingBatch(base, BUDGET, adapter, batch, WITHOUT_LOSS, False).logprobs()
        logprobs.backward(batch.inputs()["advantages"])
        found |= {
            e.index: row[: len(e)].detach() for row, e in zip(logprobs, batch.examples, strict=True)
        }
    return found, adapter._pass_gradient.clone()  # pyright: ignore[reportPrivateUsage]


def model(case: dict[str, Any]) -> BaseModel:
    """The built-in one, or random weights of SmolLM2's width."""
    if not case.get("wide"):
        folder = builtin_path(TINY)
        assert folder is not None
        return load_base(folder, torch.float32, CPU)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=6,
        num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        return load_base(Path(folder), torch.float32, CPU)


def groups(case: dict[str, Any]) -> list[Example]:
    """Answers after shared prompts; advantages on the answers."""
    random, found = np.random.default_rng(0), list[Example]()
    for _ in range(case["groups"]):
        prompt = random.integers(3, 600, case["prompt"])
        for _ in range(case["size"]):
            answer = random.integers(
                3, 600, random.integers(case.get("shortest", case["answer"]), case["answer"] + 1)
            )
            found.append(example(np.concatenate([prompt, answer]), len(prompt), random, len(found)))
    return found


def turns() -> list[Example]:
    """32 episodes of four turns: 169 tokens of rules and question, then an action and an answer of
    20 tokens each.
    """
    random, found = np.random.default_rng(0), list[Example]()
    rules = random.integers(3, 600, 160)
    for _ in range(32):
        history = np.concatenate([rules, random.integers(3, 600, 9)])
        for _ in range(4):
            action = random.integers(3, 600, random.integers(11, 23))
            found.append(
                example(np.concatenate([history, action]), len(history), random, len(found))
            )
            history = np.concatenate([history, action, random.integers(3, 600, 20)])
    return found


def example(tokens: np.ndarray, prompt: int, random: np.random.Generator, index: int) -> Example:
    """Next tokens as targets."""
    advantages = random.standard_normal(len(tokens) - 1).astype(np.float32)
    advantages[: max(prompt - 1, 0)] = 0
    return Example(tokens[:-1], tokens[1:], {"advantages": advantages}, index)


if __name__ == "__main__":
    main()
