"""What bounds the engine's memory and latency.

Owns: the figures, and how large micro-batches may be once one has found no memory.
Never: adapts them to the load: but for want of memory the micro-batch plan is a pure function of the request and this
configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halteres.engine.torch.fused import FusedModel
from halteres.engine.torch.model import BaseModel

PLACE = 1024
"""Positions of a sequence of usual length, in which it is told how many can be decoded at once."""


GPU_PASS_TOKENS, GPU_HEAD_ELEMENTS = 16_384, 1 << 28
"""Of a GPU, which is idle in small micro-batches. Not measured yet."""

RECOMPUTED_BYTES = 20_000_000_000
"""Activations of a micro-batch on a GPU that are too many to keep. Not measured yet."""


def kept_bytes(base: FusedModel) -> int:
    """What a micro-batch on a GPU would keep for its backward: inputs and outputs of every projection, in fp32."""
    projections = [one for layer in base.layers for one in (*layer.attention, *layer.mlp)]
    return 4 * GPU_PASS_TOKENS * sum(one.inputs + one.weight_ED.shape[0] for one in projections)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one engine process."""

    pass_tokens: int = 2048  # computed tokens, padding among them, of one micro-batch of a training pass or a prefill
    head_elements: int = 1 << 24  # logits that exist at once (64 MiB in fp32; twice as many were 7 % slower)
    decode_rows: int = 512  # sequences decoded together, all snapshots
    cache_bytes: int = 1 << 30  # blocks of keys and values, all snapshots
    mixture_bytes: int = 1 << 28  # copies of the adapters that decode together; those without room go one by one
    prefixes: int = 256  # sequences whose keys and values stay when they have ended, while there is room; 0: none
    turn_steps: int = 8  # decode steps between two turns of other work

    recomputes: bool = False  # layers of a pass are computed once more in the backward, and keep little until then

    @classmethod
    def of(cls, base: BaseModel, cache_bytes: int) -> Limits:
        """The usual ones for a model on its device; large passes are a GPU's in bfloat16, of layers computed here."""
        if base.attention_dtype == torch.float32 or not isinstance(base, FusedModel):
            return cls(cache_bytes=cache_bytes)
        return cls(
            cache_bytes=cache_bytes,
            pass_tokens=GPU_PASS_TOKENS,
            head_elements=GPU_HEAD_ELEMENTS,
            recomputes=kept_bytes(base) > RECOMPUTED_BYTES,
        )


@dataclass(slots=True)
class PassBudget:
    """What a micro-batch of an adapter's passes may take, as far as they have found out."""

    tokens: int  # that one computes
    head_elements: int  # logits that exist at once
    recomputes: bool = False  # layers are computed once more in the backward, and keep little until then

    @classmethod
    def of(cls, limits: Limits) -> PassBudget:
        """The usual one."""
        return cls(limits.pass_tokens, limits.head_elements, limits.recomputes)

    def shrink(self, tokens: int, rows: int) -> bool:
        """A micro-batch of so many tokens and rows found no memory: smaller ones from now on.

        Rows by themselves are computed in less memory and a third more time. False: nothing is left to save.
        """
        if rows > 1:
            self.tokens = tokens // 2
        elif self.recomputes:
            return False
        else:
            self.recomputes = True
        return True
