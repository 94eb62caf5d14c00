"""A language model without weights: what the scripted engine computes instead of a transformer.

Owns: next-token distributions that are a pure function of (token before, policy version), and random numbers that are
a pure function of (seed, prompt, sequence, position).
Never: learns; a higher version is only different.

Shapes: R rows (one per token before), V vocabulary, S sequences.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from halteres.engine.protocol import SamplingParams

END_SHARE = 1 / 16
"""Probability of the end token after any token, so that tests see answers that stop and answers that are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bigram:
    """Distributions over V tokens at one policy version."""

    vocab_size: int
    end_token: int
    version: int

    def logprobs(self, before_R: np.ndarray) -> np.ndarray:
        """Log-softmax rows, shape (R, V), float32."""
        keys_RV = before_R.astype(np.uint64)[:, None] * np.uint64(self.vocab_size) + np.arange(
            self.vocab_size, dtype=np.uint64
        )
        weights_RV = np.exp(3.0 * _uniform(keys_RV ^ _mixed(np.uint64(self.version) + np.uint64(1))))
        shares_RV = weights_RV / weights_RV.sum(axis=1, keepdims=True) * (1 - END_SHARE)
        shares_RV[:, self.end_token] += END_SHARE
        return np.log(shares_RV).astype(np.float32)

    def logprobs_of(self, before: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """The log-probability of each target after each token before, float32."""
        rows, index = np.unique(before, return_inverse=True)
        return self.logprobs(rows)[index, targets]


def draws(seed: int, prompt: bytes, num_sequences: int, position: int) -> np.ndarray:
    """One uniform number in [0, 1) per sequence, shape (S,)."""
    key = _mixed(np.uint64(seed % 2**64) ^ np.uint64(zlib.crc32(prompt)) << np.uint64(32))
    stream_S = _mixed(key + np.arange(num_sequences, dtype=np.uint64))
    return _uniform(stream_S + np.uint64(position))


def choose(logprobs_SV: np.ndarray, params: SamplingParams, draws_S: np.ndarray) -> np.ndarray:
    """The token of each row under temperature, top-k and top-p, by inverse distribution; greedy at temperature 0."""
    if params.temperature == 0:
        return logprobs_SV.argmax(axis=1)
    scaled_SV = logprobs_SV.astype(np.float64) / params.temperature
    shares_SV = np.exp(scaled_SV - scaled_SV.max(axis=1, keepdims=True))
    shares_SV /= shares_SV.sum(axis=1, keepdims=True)
    kept_SV = np.where(_kept(shares_SV, params), shares_SV, 0.0)
    sums_SV = kept_SV.cumsum(axis=1)
    chosen_S = (sums_SV <= draws_S[:, None] * sums_SV[:, -1:]).sum(axis=1)
    last_S = kept_SV.shape[1] - 1 - (kept_SV[:, ::-1] > 0).argmax(axis=1)
    return np.minimum(chosen_S, last_S)


def _kept(shares_SV: np.ndarray, params: SamplingParams) -> np.ndarray:
    order_SV = np.argsort(-shares_SV, axis=1, kind="stable")
    ranked_SV = np.take_along_axis(shares_SV, order_SV, axis=1)
    keep_SV = (ranked_SV.cumsum(axis=1) - ranked_SV) < params.top_p
    if params.top_k > 0:
        keep_SV[:, params.top_k :] = False
    kept_SV = np.empty_like(keep_SV)
    np.put_along_axis(kept_SV, order_SV, keep_SV, axis=1)
    return kept_SV


def _mixed(value: np.ndarray | np.uint64) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): equal inputs, equal outputs, on every machine."""
    mixed = np.atleast_1d(np.asarray(value, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _uniform(keys: np.ndarray) -> np.ndarray:
    return (_mixed(keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53
