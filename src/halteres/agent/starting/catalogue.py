"""Well-known base models that need not be on this disk: their sizes, so that one can tell what would fit.

Owns: the facts, as their config.json have them.
Never: downloads one; knows whether it is here (`models`).
"""

from __future__ import annotations

from collections.abc import Mapping

from halteres.models.shape import ModelShape

# name, family, layers, width, feed, vocabulary, heads, kv_heads, head_width, context, tied
_TABLE = (
    ("Qwen/Qwen3-0.6B", "qwen3", 28, 1024, 3072, 151_936, 16, 8, 128, 40_960, True),
    ("Qwen/Qwen3-1.7B", "qwen3", 28, 2048, 6144, 151_936, 16, 8, 128, 40_960, True),
    ("Qwen/Qwen3-4B", "qwen3", 36, 2560, 9728, 151_936, 32, 8, 128, 40_960, True),
    ("Qwen/Qwen3-8B", "qwen3", 36, 4096, 12_288, 151_936, 32, 8, 128, 40_960, False),
    ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2", 24, 896, 4864, 151_936, 14, 2, 64, 32_768, True),
    ("Qwen/Qwen2.5-1.5B-Instruct", "qwen2", 28, 1536, 8960, 151_936, 12, 2, 128, 32_768, True),
    ("Qwen/Qwen2.5-7B-Instruct", "qwen2", 28, 3584, 18_944, 152_064, 28, 4, 128, 32_768, False),
    ("meta-llama/Llama-3.2-1B-Instruct", "llama", 16, 2048, 8192, 128_256, 32, 8, 64, 131_072, True),
    ("meta-llama/Llama-3.2-3B-Instruct", "llama", 28, 3072, 8192, 128_256, 24, 8, 128, 131_072, True),
    ("meta-llama/Llama-3.1-8B-Instruct", "llama", 32, 4096, 14_336, 128_256, 32, 8, 128, 131_072, False),
)

CATALOGUE: Mapping[str, ModelShape] = {
    name: ModelShape(
        family=family,
        layers=layers,
        width=width,
        feed=feed,
        vocabulary=vocabulary,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        context=context,
        tied=tied,
    )
    for name, family, layers, width, feed, vocabulary, heads, kv_heads, head_width, context, tied in _TABLE
}
"""Shapes by the name under which they are published."""
