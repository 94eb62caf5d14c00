"""Requests the engine tests share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np

from halteres.engine.protocol import Array, Datum, ExtraLogprobs, LossSpec, Piece, Weights
from halteres.engine.protocol import Sequence as Sampled
from halteres.engine.stream_buffer import joined

PROMPT = (1, 20, 300, 41, 7)
CROSS_ENTROPY, IMPORTANCE_SAMPLING = (
    LossSpec(name="cross_entropy"),
    LossSpec(name="importance_sampling"),
)

EVERYTHING = ExtraLogprobs(
    prompt_logprobs=True,
    topk_prompt=3,
    topk_sampled=2,
    targets=Array(
        dtype="int64",
        shape=(4, 2),
        data=np.array([[20, -1], [-1, -1], [41, 0], [7, 671]], np.int64).tobytes(),
    ),
    alternatives=5,
)
"""Of `PROMPT`."""


def packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()


def unpacked(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()


def floats(data: bytes | Array) -> list[float]:
    return np.frombuffer(data.data if isinstance(data, Array) else data, np.float32).tolist()


def array(values: Sequence[float] | np.ndarray, dtype: str = "float32") -> Array:
    numbers = np.asarray(values, dtype)
    return Array(dtype=dtype, shape=numbers.shape, data=numbers.tobytes())  # type: ignore[arg-type]


def weighted(
    tokens: Sequence[int], targets: Sequence[int], weights: Sequence[float] | None = None
) -> Datum:
    """A cross-entropy datum."""
    return Datum(
        tokens=packed(tokens),
        inputs={
            "target_tokens": array(targets, "int64"),
            "weights": array(weights or [1.0] * len(targets)),
        },
    )


def rewarded(
    tokens: Sequence[int], targets: Sequence[int], logprobs: Sequence[float], advantage: float
) -> Datum:
    """An importance-sampling datum."""
    return Datum(
        tokens=packed(tokens),
        inputs={
            "target_tokens": array(targets, "int64"),
            "logprobs": array(logprobs),
            "advantages": array([advantage] * len(targets)),
        },
    )


async def streamed(pieces: AsyncIterator[Piece]) -> tuple[Sampled, ...]:
    """The sequences that a stream tells of, whole, in order."""
    found: defaultdict[int, list[Piece]] = defaultdict(list)
    async for piece in pieces:
        assert len(piece.tokens) >= 4
        assert not found[piece.sample] or found[piece.sample][-1].stop_reason is None
        found[piece.sample].append(piece)
    wholes = [joined(found[sample]) for sample in sorted(found)]
    return tuple(
        Sampled(
            tokens=w.tokens, logprobs=w.logprobs, stop_reason=w.stop_reason or "length", top=w.top
        )
        for w in wholes
    )


def from_folder(folder: Path) -> Weights:
    """Weights that lie in a folder whose digest nobody has told."""
    return Weights(name="", version=0, folder=str(folder))
