"""Model folders of random weights, for benchmarks whose subject is time or memory."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def save_qwen3(folder: Path, *, width: int, layers: int) -> Path:
    """Qwen3's shape with a vocabulary of 4,096: `bench-4m` has 4 layers of width 256, `bench-27m` 8 of 512."""
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
