"""Attention over sequences of any lengths end to end, by torch's FlashAttention kernels: for
bfloat16 models on a GPU.

Not verified on a GPU yet. What goes in and out is tested on a CPU with `attend` replaced by plain
matmuls; an engine that starts on a GPU compares it with the CPU (`device`).

I queries and L keys of all sequences, H query and K key heads, W wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


class Lengths:
    """Where each sequence's queries and keys end. Its last query sees all of its keys, the one
    before it one less.
    """

    def __init__(self, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> None:
        ends = ([0, *accumulate(lengths)] for lengths in (queries, keys))
        self.queries, self.keys = (
            torch.tensor(found, dtype=torch.int32, device=device) for found in ends
        )
        self.most_queries, self.most_keys = max(queries), max(keys)


def attend(q_IHW: Tensor, k_LKW: Tensor, v_LKW: Tensor, lengths: Lengths) -> Tensor:
    """Attended values, I x H x W."""
    from torch.nn.attention.varlen import varlen_attn

    found = varlen_attn(
        q_IHW,
        k_LKW,
        v_LKW,
        lengths.queries,
        lengths.keys,
        lengths.most_queries,
        lengths.most_keys,
        window_size=(-1, 0),  # causal; the default sees the future
        enable_gqa=True,
    )
    assert isinstance(found, Tensor)  # noqa: S101 - for the type checker
    return found
