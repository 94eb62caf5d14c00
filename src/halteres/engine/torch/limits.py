"""What bounds the engine's memory and latency.

Owns: the figures. Never: adapts them to the load, since the micro-batch plan must be a pure function of the request
and this configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

PLACE = 1024
"""Positions of a sequence of usual length, in which it is told how many can be decoded at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one engine process."""

    pass_tokens: int = 2048  # computed tokens, padding among them, of one micro-batch of a training pass or a prefill
    head_elements: int = 1 << 25  # logits that exist at once (128 MiB in fp32)
    decode_rows: int = 512  # sequences decoded together, all snapshots
    cache_bytes: int = 1 << 30  # blocks of keys and values, all snapshots
    mixture_bytes: int = 1 << 28  # copies of the adapters that decode together; those without room go one by one
    prefixes: int = 256  # sequences whose keys and values stay when they have ended, while there is room; 0: none
    turn_steps: int = 8  # decode steps between two turns of other work
