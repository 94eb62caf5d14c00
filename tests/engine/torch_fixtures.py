"""The torch engine's tests: an engine, a float64 reference, and data."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from halteres.engine.protocol import (
    Adam,
    Array,
    BaseType,
    Datum,
    LoraConfig,
    SampleResult,
    SamplingParams,
    TopK,
)
from halteres.engine.protocol import Sequence as Sampled
from halteres.engine.torch import TorchEngine
from halteres.engine.torch.limits import Limits
from halteres.models import TINY

from .requests import CROSS_ENTROPY, array, packed

DTYPE: BaseType = "bfloat16" if os.environ.get("HALTERES_TEST_DTYPE") == "bfloat16" else "float32"
"""Of the base weights in these tests; `make test-bf16` sets it."""


def within(float32: float, bfloat16: float) -> float:
    """The tolerance of these tests' base weights: what is asked of both is said where it is
    asked.
    """
    return float32 if DTYPE == "float32" else bfloat16


same_numbers = pytest.mark.skipif(
    DTYPE != "float32", reason="rounded to bfloat16 another token may be likeliest"
)


RATE = Adam(learning_rate=5e-3)
LORA = LoraConfig(rank=8, seed=3)


@asynccontextmanager
async def running(folder: Path, limits: Limits | None = None) -> AsyncIterator[TorchEngine]:
    engine = await asyncio.to_thread(TorchEngine, folder, TINY, 1, limits, dtype=DTYPE)
    try:
        yield engine
    finally:
        await engine.close()


def prompts(
    count: int, low: int = 5, high: int = 40, seed: int = 0, vocabulary: int = 600
) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [
        random.integers(3, vocabulary, random.integers(low, high)).tolist() for _ in range(count)
    ]


def pair(tokens: Sequence[int], **inputs: Sequence[float] | np.ndarray) -> Datum:
    """A datum whose targets are its own next tokens; inputs are one shorter than `tokens`."""
    arrays = {name: array(values) for name, values in inputs.items()}
    return Datum(
        tokens=packed(tokens[:-1]), inputs={"target_tokens": array(tokens[1:], "int64"), **arrays}
    )


def lessons(count: int = 8, seed: int = 0) -> tuple[Datum, ...]:
    """Cross-entropy data of unequal lengths, weights of any sign."""
    random = np.random.default_rng(seed + 100)
    return tuple(
        pair(p, weights=random.standard_normal(len(p) - 1)) for p in prompts(count, seed=seed)
    )


def tokens_of(sampled: Sampled) -> list[int]:
    return np.frombuffer(sampled.tokens, np.int32).tolist()


def logprobs_of(data: bytes | Array) -> np.ndarray:
    """Shaped as the targets, where a pass computed them."""
    if isinstance(data, Array):
        return np.frombuffer(data.data, np.float32).reshape(data.shape)
    return np.frombuffer(data, np.float32)


def of_answer(prompt: Sequence[int], sampled: Sampled, advantage: float) -> Datum:
    """An importance-sampling datum as a trainer makes it: zeros on the prompt."""
    full, start = [*prompt, *tokens_of(sampled)], len(prompt) - 1
    logprobs, advantages = np.zeros(len(full) - 1), np.zeros(len(full) - 1)
    logprobs[start:], advantages[start:] = logprobs_of(sampled.logprobs), advantage
    return pair(full, logprobs=logprobs.tolist(), advantages=advantages.tolist())


def lists(top: TopK | None) -> tuple[np.ndarray, np.ndarray]:
    assert top is not None
    ids, logprobs = np.frombuffer(top.ids, np.int32), np.frombuffer(top.logprobs, np.float32)
    return ids.reshape(top.length, top.k), logprobs.reshape(top.length, top.k)


async def sample(
    engine: TorchEngine, snapshot: str | None, prompt: Sequence[int], n: int = 1, **params: Any
) -> SampleResult:
    chosen = SamplingParams(**{"max_tokens": 12, "stop_tokens": (), **params})
    return await engine.sample(snapshot, packed(prompt), n, chosen)


async def trained(
    engine: TorchEngine, name: str = "a", steps: int = 3, config: LoraConfig = LORA
) -> None:
    """An adapter whose weights have moved."""
    await engine.create_adapter(name, config)
    for step in range(steps):
        await engine.forward_backward(name, lessons(seed=step), CROSS_ENTROPY)
        await engine.optim_step(name, RATE)


class Reference:
    """transformers in float64, an adapter merged by formula: W + alpha/rank * B @ A."""

    def __init__(
        self, folder: Path, adapter: Mapping[str, Tensor] | None = None, scale: float = 1.0
    ) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self.adapter = {name: t.double().requires_grad_() for name, t in (adapter or {}).items()}
        self.scale = scale

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Position x vocabulary."""
        merged = dict(self.model.named_parameters())
        merged["lm_head.weight"] = self.model.lm_head.weight
        for name, a in self.adapter.items():
            if ".lora_A." in name:
                module = name.removeprefix("base_model.model.").replace(".lora_A", "")
                b = self.adapter[name.replace("lora_A", "lora_B")]
                merged[module] = merged[module] + self.scale * b @ a
        return functional_call(
            self.model, merged, (torch.tensor([tokens]),), tie_weights=False
        ).logits[0]

    def logprobs(self, datum: Datum) -> Tensor:
        """Of the datum's targets."""
        tokens = np.frombuffer(datum.tokens, np.int32).tolist()
        wanted = datum.inputs["target_tokens"]
        targets = torch.tensor(np.frombuffer(wanted.data, np.int64).copy()).view(len(tokens), -1)
        return self.logits(tokens).log_softmax(-1).gather(1, targets).view(wanted.shape)


def input_of(datum: Datum, name: str) -> Tensor:
    values = np.frombuffer(datum.inputs[name].data, np.float32).reshape(datum.inputs[name].shape)
    return torch.tensor(values.copy(), dtype=torch.float64)


def gradient(engine: TorchEngine, name: str = "a") -> torch.Tensor:
    return engine._adapters[name]._gradient.clone()


def weights(engine: TorchEngine, name: str = "a") -> torch.Tensor:
    return engine._adapters[name].flat.clone()
