"""Small reward models and preference rows for the tests of `rewards.torch`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from halteres.models import TINY, builtin_path
from halteres.rewards.preferences import Comparison, Preferences
from halteres.rewards.torch.network import ScoringNetwork


def tiny() -> Path:
    folder = builtin_path(TINY)
    assert folder is not None
    return folder


def sums(count: int, seed: int = 0, *, kinds: bool = True) -> Preferences:
    """Pairs of a right and a wrong sum, and of a polite and a rude answer."""
    drawn = random.Random(seed)
    rows: list[Comparison] = []
    for number in range(count):
        a, b = drawn.randint(2, 9), drawn.randint(2, 9)
        polite = number % 2 == 0
        good, bad = (
            (f"Gladly: {a + b}", f"{a + b}")
            if polite
            else (f"{a + b}", f"{a + b + drawn.randint(1, 5)}")
        )
        rows.append(
            Comparison(
                prompt=[{"role": "user", "content": f"What is {a} + {b}?"}],
                completions=(
                    [{"role": "assistant", "content": good}],
                    [{"role": "assistant", "content": bad}],
                ),
                ranks=(0, 1),
                kind=("polite" if polite else "correct") if kinds else None,
                row=number + 1,
            )
        )
    return Preferences(comparisons=tuple(rows), source="sums", digest=f"{count}:{seed}")


def random_network(family: str, **changes: Any) -> ScoringNetwork:
    """A sequence classifier of two layers with random weights."""
    from transformers import (
        AutoModelForSequenceClassification,
        LlamaConfig,
        MistralConfig,
        Qwen2Config,
        Qwen3Config,
    )

    kinds: dict[str, Any] = {
        "qwen3": Qwen3Config,
        "qwen2": Qwen2Config,
        "llama": LlamaConfig,
        "mistral": MistralConfig,
    }
    if family == "mistral":
        changes = {"sliding_window": None, **changes}
    settings: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_labels": 1,
        "pad_token_id": 0,
        "initializer_range": 0.3,
        **changes,
    }
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model: Any = AutoModelForSequenceClassification.from_config(kinds[family](**settings))
    return ScoringNetwork(model.eval(), padding=0)
