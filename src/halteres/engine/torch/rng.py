"""Random numbers for sampling: a pure function of (seed, sample, position).

Owns: the counter-based generator. Never: keeps state, so a sequence's draws do not depend on its neighbours, on
restarts, or on the order of requests.

Source: the finaliser of splitmix64 (Steele, Lea, Flood 2014), applied once per coordinate.
"""

from __future__ import annotations

import numpy as np

_BITS = 23
"""So that u * total < total in fp32 for every u: the inverse of a cumulative sum never runs past its end."""


def as_seed(seed: int) -> int:
    """Any integer as 64 unsigned bits."""
    return seed & 0xFFFF_FFFF_FFFF_FFFF


def uniforms(seeds_N: np.ndarray, samples_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
    """float32 in [0, 1), one per row; all arguments uint64 arrays."""
    x_N = _mixed(seeds_N + np.uint64(0x9E3779B97F4A7C15))
    x_N = _mixed(x_N ^ (samples_N * np.uint64(0xD1B54A32D192ED03)))
    x_N = _mixed(x_N ^ (positions_N * np.uint64(0x8CB92BA72F3D8DD7)))
    return (x_N >> np.uint64(64 - _BITS)).astype(np.float32) * np.float32(2.0**-_BITS)


def _mixed(x_N: np.ndarray) -> np.ndarray:
    x_N = (x_N ^ (x_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_N = (x_N ^ (x_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_N ^ (x_N >> np.uint64(31))
