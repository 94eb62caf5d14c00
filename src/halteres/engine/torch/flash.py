"""Attention over sequences of any lengths end to end, by torch's FlashAttention kernels: for
bfloat16 models on a GPU.

Not verified on a GPU yet. What goes in and out is tested on a CPU with `attend` replaced by plain
matmuls; an engine that starts on a GPU compares it with the CPU (`device`).

I queries and L keys of all sequences, H query and K key heads, W wide.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from inspect import signature
from itertools import accumulate
from typing import Any

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
    """Attended values, I x H x W.

    Raises:
        NotImplementedError: this torch's kernels cannot be told to be causal.
    """
    from torch.nn.attention import varlen

    options = causal_options(signature(varlen.varlen_attn).parameters)
    if "enable_gqa" not in options:
        group = q_IHW.shape[1] // k_LKW.shape[1]
        k_LKW, v_LKW = (x_LKW.repeat_interleave(group, dim=1) for x_LKW in (k_LKW, v_LKW))
    found = varlen.varlen_attn(
        q_IHW,
        k_LKW,
        v_LKW,
        lengths.queries,
        lengths.keys,
        lengths.most_queries,
        lengths.most_keys,
        **options,
    )
    assert isinstance(found, Tensor)  # noqa: S101 - for the type checker
    return found


def causal_options(parameters: Collection[str]) -> dict[str, Any]:
    """How `varlen_attn` is told to be causal, and that several query heads share a key head, by the
    names of its parameters: torch 2.10 has `is_causal` alone, 2.11 `window_size`, 2.12 also
    `enable_gqa`. Where the last one is missing, keys and values are expanded to the query heads.

    Raises:
        NotImplementedError: neither `window_size` nor `is_causal` is there.

    >>> causal_options(["query", "is_causal"])
    {'is_causal': True}
    """
    options: dict[str, Any]
    if "window_size" in parameters:
        # The default sees the future.
        options = {"window_size": (-1, 0)}
    elif "is_causal" in parameters:
        options = {"is_causal": True}
    else:
        raise NotImplementedError(
            f"torch {torch.__version__} has a varlen_attn without window_size and is_causal; "
            f"it has {', '.join(parameters)}."
        )
    if "enable_gqa" in parameters:
        options["enable_gqa"] = True
    return options
