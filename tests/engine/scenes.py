"""Requests the engine tests share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halteres.engine.protocol import Array, Datum

PROMPT = (1, 20, 300, 41, 7)


def packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()


def unpacked(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()


def floats(data: bytes) -> list[float]:
    return np.frombuffer(data, np.float32).tolist()


def array(values: Sequence[float] | np.ndarray, dtype: str = "float32") -> Array:
    numbers = np.asarray(values, dtype)
    return Array(dtype=dtype, shape=numbers.shape, data=numbers.tobytes())  # type: ignore[arg-type]


def weighted(tokens: Sequence[int], targets: Sequence[int], weights: Sequence[float] | None = None) -> Datum:
    """A cross-entropy datum."""
    return Datum(
        tokens=packed(tokens),
        inputs={"target_tokens": array(targets, "int64"), "weights": array(weights or [1.0] * len(targets))},
    )


def rewarded(tokens: Sequence[int], targets: Sequence[int], logprobs: Sequence[float], advantage: float) -> Datum:
    """An importance-sampling datum."""
    return Datum(
        tokens=packed(tokens),
        inputs={
            "target_tokens": array(targets, "int64"),
            "logprobs": array(logprobs),
            "advantages": array([advantage] * len(targets)),
        },
    )
