"""Micro-batches of several adapters end to end on one axis: base weights meet all of their tokens at once.

Owns: where each micro-batch lies; attention and adapters, each micro-batch's own.
Never: runs a model; mixes what flows back into adapters.
Promise: log-probabilities and gradients of a micro-batch have the bits that they have alone. What is computed together
treats every token by itself; what sums over tokens is computed for each micro-batch, with its own padding.

N tokens of the axis, B rows of a padded micro-batch, T tokens of each, K key heads, G query heads of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halteres.engine.torch.attention import Attention, Causal
from halteres.engine.torch.data import MicroBatch
from halteres.engine.torch.heads import Grid, Heads
from halteres.engine.torch.lora import Adaptation, Lora, LoraWeights
from halteres.engine.torch.model import BaseModel, Projection
from halteres.engine.torch.trie_attention import TrieAttention


@dataclass(frozen=True, slots=True)
class JointAxis:
    """All tokens, and where each micro-batch has its own."""

    tokens_N: Tensor
    positions_N: Tensor
    spans: tuple[slice, ...]
    attentions: tuple[Attention, ...]

    @classmethod
    def of(cls, base: BaseModel, batches: Sequence[MicroBatch]) -> JointAxis:
        """In order."""
        tokens, positions, spans, attentions = list[Tensor](), list[Tensor](), list[slice](), list[Attention]()
        start = 0
        for batch in batches:
            if batch.trie is not None:
                tokens.append(torch.from_numpy(batch.trie.tokens_N).to(base.device))
                positions.append(torch.from_numpy(batch.trie.positions_N).to(base.device))
                attentions.append(TrieAttention(batch.trie, base, base.device))
            else:
                tokens.append(batch.tokens_N)
                positions.append(torch.arange(batch.length, device=base.device).repeat(batch.rows))
                attentions.append(_PaddedRows(base, batch))
            spans.append(slice(start, start + len(tokens[-1])))
            start = spans[-1].stop
        return cls(torch.cat(tokens), torch.cat(positions), tuple(spans), tuple(attentions))

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """See `Attention`; every micro-batch sees itself."""
        key_heads = heads.k_XTW.shape[0] // len(self.tokens_N)
        sizes = [(span.stop - span.start) * key_heads for span in self.spans]
        own = zip(heads.q_XGTW.split(sizes), heads.k_XTW.split(sizes), heads.v_XTW.split(sizes), strict=True)
        return torch.cat([attend(layer, Heads(*parts)) for attend, parts in zip(self.attentions, own, strict=True)])


class _PaddedRows:
    """A padded micro-batch's attention, given heads token by token."""

    def __init__(self, base: BaseModel, batch: MicroBatch) -> None:
        self._rows, self._length = batch.rows, batch.length
        self._causal = Causal(Grid.padded(base, batch.rows, batch.length))

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """See `Attention`."""
        return self._causal(layer, Heads(self._laid(heads.q_XGTW), self._laid(heads.k_XTW), self._laid(heads.v_XTW)))

    def _laid(self, tokens: Tensor) -> Tensor:
        """From B * T * K (x G) x 1 x W to B * K (x G) x T x W."""
        groups, width = tokens.shape[1:-2], tokens.shape[-1]
        laid = tokens.view(self._rows, self._length, -1, *groups, width).movedim(1, -2)
        return laid.reshape(-1, *groups, self._length, width)


@dataclass(frozen=True, slots=True)
class JointAdaptations:
    """See `lora.Adaptations`: each span of the axis has an adapter of its own."""

    parts: Sequence[tuple[slice, LoraWeights]]

    def get(self, projection: Projection, /) -> Adaptation | None:
        """See `lora.Adaptations`."""
        parts = [(span, lora) for span, weights in self.parts if (lora := weights.get(projection)) is not None]
        return _JointProjection(parts) if parts else None


@dataclass(frozen=True, slots=True)
class _JointProjection:
    """See `lora.Adaptation`."""

    parts: Sequence[tuple[slice, Lora]]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Of all adapters."""
        return tuple(tensor for _, lora in self.parts for tensor in lora.tensors)

    def add_to(self, y_NE: Tensor, x_ND: Tensor) -> Tensor:
        """See `lora.Adaptation`; what all A's make of their rows, end to end."""
        return torch.cat([lora.add_to(y_NE[span], x_ND[span]).view(-1) for span, lora in self.parts])

    def gradients(self, dy_NE: Tensor, x_ND: Tensor, h: Tensor, dx_ND: Tensor | None) -> tuple[Tensor, ...]:
        """See `lora.Adaptation`."""
        sizes = [(span.stop - span.start) * lora.a_RD.shape[0] for span, lora in self.parts]
        found: list[Tensor] = []
        for (span, lora), own in zip(self.parts, h.split(sizes), strict=True):
            h_NR, own_dx_ND = own.view(-1, lora.a_RD.shape[0]), None if dx_ND is None else dx_ND[span]
            found += lora.gradients(dy_NE[span], x_ND[span], h_NR, own_dx_ND)
        return tuple(found)
