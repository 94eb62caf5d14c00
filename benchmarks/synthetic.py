"""Models of random weights and data of random tokens, for benchmarks whose subject is time or
memory.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from halteres.engine.protocol import Array, Datum


def save_qwen3(folder: Path, *, width: int, layers: int) -> Path:
    """Qwen3's shape with a vocabulary of 4,096: `bench-4m` has 4 layers of width 256, `bench-27m` 8
    of 512.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def datum(tokens: np.ndarray) -> Datum:
    """One for cross_entropy: each token predicts the next."""
    targets, weights = tokens[1:].astype(np.int64), np.ones(len(tokens) - 1, np.float32)
    return Datum(
        tokens=tokens[:-1].tobytes(),
        inputs={
            "target_tokens": Array(dtype="int64", shape=targets.shape, data=targets.tobytes()),
            "weights": Array(dtype="float32", shape=weights.shape, data=weights.tobytes()),
        },
    )
