"""Micro-batches of several adapters end to end on one axis: base weights meet all of their tokens at once.

Owns: where each micro-batch lies; which of them are attended together; adapters, each on its own tokens.
Never: runs a model; adds what flows back into one adapter to another's.
Promise: log-probabilities and gradients of a micro-batch have the bits that they have alone. Base weights treat every
token by itself; adapters sum over their own tokens; attention sums over the same keys and queries, and zeros.

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
from halteres.engine.torch.trie_attention import TrieAttention, joins


@dataclass(frozen=True, slots=True)
class JointAxis:
    """All tokens, and where each micro-batch has its own."""

    tokens_N: Tensor
    positions_N: Tensor
    spans: tuple[slice, ...]  # of each micro-batch
    attentions: tuple[tuple[int, Attention], ...]  # of so many tokens each

    @classmethod
    def of(cls, base: BaseModel, batches: Sequence[MicroBatch]) -> JointAxis:
        """Those that are attended together lie side by side."""
        groups: dict[object, list[int]] = {}
        for i, batch in enumerate(batches):
            if batch.trie is None:
                groups.setdefault(batch.length, []).append(i)
            else:
                groups.setdefault("tries" if joins(batch.trie, base) else batch, []).append(i)
        tokens, positions, attentions = list[Tensor](), list[Tensor](), list[tuple[int, Attention]]()
        spans, start = [slice(0)] * len(batches), 0
        for members in groups.values():
            before = start
            for i in members:
                own_tokens, own_positions = _laid_out(batches[i], base)
                tokens.append(own_tokens)
                positions.append(own_positions)
                spans[i] = slice(start, start + len(own_tokens))
                start = spans[i].stop
            tries = [trie for i in members if (trie := batches[i].trie) is not None]
            attention = (
                TrieAttention(tries, base, base.device) if tries else _PaddedRows(base, [batches[i] for i in members])
            )
            attentions.append((start - before, attention))
        return cls(torch.cat(tokens), torch.cat(positions), tuple(spans), tuple(attentions))

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """See `Attention`; every sequence sees itself."""
        key_heads = heads.k_XTW.shape[0] // len(self.tokens_N)
        sizes = [size * key_heads for size, _ in self.attentions]
        own = zip(heads.q_XGTW.split(sizes), heads.k_XTW.split(sizes), heads.v_XTW.split(sizes), strict=True)
        found = [attend(layer, Heads(*parts)) for (_, attend), parts in zip(self.attentions, own, strict=True)]
        return torch.cat(found) if len(found) > 1 else found[0]

    def own(self, rows_ND: Tensor) -> list[Tensor]:
        """Each micro-batch's rows."""
        order = sorted(range(len(self.spans)), key=lambda i: self.spans[i].start)
        parts = rows_ND.split([self.spans[i].stop - self.spans[i].start for i in order])
        return [part for _, part in sorted(zip(order, parts, strict=True), key=lambda own: own[0])]


def _laid_out(batch: MicroBatch, base: BaseModel) -> tuple[Tensor, Tensor]:
    """Its tokens, and their positions."""
    if batch.trie is None:
        return batch.tokens_N, torch.arange(batch.length, device=base.device).repeat(batch.rows)
    tokens_N, positions_N = torch.from_numpy(batch.trie.tokens_N), torch.from_numpy(batch.trie.positions_N)
    return tokens_N.to(base.device), positions_N.to(base.device)


class _PaddedRows:
    """Attention of padded micro-batches of one length, given heads token by token."""

    def __init__(self, base: BaseModel, batches: Sequence[MicroBatch]) -> None:
        self._rows, self._length = sum(batch.rows for batch in batches), batches[0].length
        self._causal = Causal(Grid.padded(base, self._rows, self._length))

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
