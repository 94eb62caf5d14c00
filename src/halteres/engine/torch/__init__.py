"""The engine on torch: one base model, many LoRA adapters, training and sampling with one forward
implementation.

Shape suffixes in this package: B rows of a padded batch, T positions of it, N tokens end to end (N
= B*T), D width, E outputs of a projection, R stacked adapter ranks, H query heads, K key/value
heads, W head width, V vocabulary, S slots of the KV cache, L cached positions that are read, C rows
of one chunk.
"""

# ruff: noqa: E402 - modules of the engine compute when they are imported

from halteres.engine.torch import cpu_kernels

cpu_kernels.choose()

from halteres.engine.torch.engine import TorchEngine

__all__ = ["TorchEngine"]
