"""What a group must hold to in strict mode, beyond making sense (spec 5.7).

Owns: lengths below the trainer's limit, token ids that are ids, log-probabilities that are such, the sentinel.
Never: is asked in quarantine mode: it costs an object per number.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from halteres.trajectories.wire.contents import Problem

CONTEXT = -100
"""In masks: not sampled."""

SENTINEL = 1.0
"""In inference_logprobs: not sampled. No probability has this logarithm."""


class _Numbers(msgspec.Struct):
    tokens: list[list[int]]
    masks: list[list[int]]
    inference_logprobs: list[list[float]] | None = None


_decoder = msgspec.json.Decoder(_Numbers)


def broken_convention(element: bytes, longest: int) -> Problem | None:
    """The first convention that a batch element breaks.

    Args:
        element: of a group whose arrays fit each other.
        longest: tokens that a sequence may have; 0 or less: any number.
    """
    return next(_broken(_decoder.decode(element), longest), None)


def _broken(group: _Numbers, longest: int) -> Iterator[Problem]:
    for row, tokens in enumerate(group.tokens):
        if 0 < longest < len(tokens):
            yield Problem("too_long", f"tokens[{row}] is {len(tokens)} long; the trainer takes {longest}.")
        if min(tokens) < 0:
            yield Problem("token", f"tokens[{row}][{_first(np.array(tokens) < 0)}] is negative; ids start at 0.")
    for row, (masks, logprobs) in enumerate(zip(group.masks, group.inference_logprobs or (), strict=False)):
        yield from _broken_logprobs(row, np.array(masks) == CONTEXT, np.array(logprobs, float))


def _broken_logprobs(row: int, context_T: NDArray[np.bool_], logprobs_T: NDArray[np.float64]) -> Iterator[Problem]:
    marked_T = logprobs_T == SENTINEL
    if (marked_T != context_T).any():
        at = _first(marked_T != context_T)
        yield Problem(
            "sentinel",
            f"inference_logprobs[{row}][{at}] is {logprobs_T[at]:g}, masks[{row}][{at}] "
            f"{'is' if context_T[at] else 'is not'} {CONTEXT}: {SENTINEL} marks context, and nothing else.",
        )
    if (logprobs_T[~context_T] > 0).any():
        at = _first((logprobs_T > 0) & ~context_T)
        yield Problem("logprob", f"inference_logprobs[{row}][{at}] is {logprobs_T[at]:g}, above 0.")


def _first(where_T: NDArray[np.bool_]) -> int:
    return int(np.flatnonzero(where_T)[0])
