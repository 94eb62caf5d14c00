"""Sampling without weights: a fixed bigram model, and the walk of one request's sequences through
it.

Distributions and random numbers are pure functions of what was sampled before.

S sequences, V vocabulary, P tokens of the prompt, K values per position, R rows, L positions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from halteres.engine.checks import array, tokens_of
from halteres.engine.protocol import (
    Array,
    ExtraLogprobs,
    Piece,
    SampleResult,
    SamplingParams,
    Sequence,
    TopK,
)
from halteres.engine.stream_buffer import joined

END_SHARE = 1 / 16
"""Probability of the end token after any token, so that tests see answers that stop and answers
that are cut.
"""

FILLER = -99999.0

ALTERNATIVES_AT = 1 << 32
"""Random numbers for a prompt's alternatives begin at this position, far behind any sequence's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bigram:
    """Distributions over V tokens at one policy version."""

    vocab_size: int
    end_token: int
    version: int

    def logprobs(self, before_R: np.ndarray) -> np.ndarray:
        """Log-softmax rows, shape (R, V), float32."""
        tokens_V = np.arange(self.vocab_size, dtype=np.uint64)
        keys_RV = before_R.astype(np.uint64)[:, None] * np.uint64(self.vocab_size) + tokens_V
        weights_RV = np.exp(
            3.0 * _uniform(keys_RV ^ _mixed(np.uint64(self.version) + np.uint64(1)))
        )
        shares_RV = weights_RV / weights_RV.sum(axis=1, keepdims=True) * (1 - END_SHARE)
        shares_RV[:, self.end_token] += END_SHARE
        return np.log(shares_RV).astype(np.float32)

    def logprobs_of(self, before: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """The log-probability of each target after each token before, float32."""
        rows, index = np.unique(before, return_inverse=True)
        return self.logprobs(rows)[index, targets]


def _mixed(value: np.ndarray | np.uint64) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): equal inputs, equal outputs, on every
    machine.
    """
    mixed = np.atleast_1d(np.asarray(value, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _uniform(keys: np.ndarray) -> np.ndarray:
    return (_mixed(keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _uniform_numbers(seed: int, prompt: bytes, num_sequences: int, position: int) -> np.ndarray:
    """One number in [0, 1) per sequence, shape (S,)."""
    key = _mixed(np.uint64(seed % 2**64) ^ np.uint64(zlib.crc32(prompt)) << np.uint64(32))
    return _uniform(_mixed(key + np.arange(num_sequences, dtype=np.uint64)) + np.uint64(position))


def _choose(logprobs_SV: np.ndarray, params: SamplingParams, uniform_S: np.ndarray) -> np.ndarray:
    """The token of each row under temperature, min-p, top-k and top-p, by inverse distribution;
    greedy at temperature 0.
    """
    if params.temperature == 0:
        return logprobs_SV.argmax(axis=1)
    scaled_SV = logprobs_SV.astype(np.float64) / params.temperature
    shares_SV = np.exp(scaled_SV - scaled_SV.max(axis=1, keepdims=True))
    shares_SV[shares_SV < params.min_p * shares_SV.max(axis=1, keepdims=True)] = 0
    shares_SV /= shares_SV.sum(axis=1, keepdims=True)
    order_SV = np.argsort(-shares_SV, axis=1, kind="stable")
    ranked_SV = np.take_along_axis(shares_SV, order_SV, axis=1)
    keep_SV = (ranked_SV.cumsum(axis=1) - ranked_SV) < params.top_p
    if params.top_k > 0:
        keep_SV[:, params.top_k :] = False
    chosen_SV = np.zeros_like(shares_SV)
    np.put_along_axis(chosen_SV, order_SV, np.where(keep_SV, ranked_SV, 0.0), axis=1)
    sums_SV = chosen_SV.cumsum(axis=1)
    chosen_S = (sums_SV <= uniform_S[:, None] * sums_SV[:, -1:]).sum(axis=1)
    last_S = chosen_SV.shape[1] - 1 - (chosen_SV[:, ::-1] > 0).argmax(axis=1)
    return np.minimum(chosen_S, last_S)


def _penalised(
    logits_SV: np.ndarray, params: SamplingParams, prompt: np.ndarray, written: list[list[int]]
) -> np.ndarray:
    """The logits of each sequence after repetition, frequency and presence penalty; this model's
    are its log-probabilities.
    """
    if not params.penalises:
        return logits_SV
    penalised_SV = logits_SV.copy()
    for row_V, tokens in zip(penalised_SV, written, strict=True):
        counts_V = np.bincount(tokens, minlength=len(row_V))
        seen_V = counts_V > 0
        seen_V[prompt] = True
        row_V[seen_V] *= params.repetition_penalty
        row_V -= params.frequency_penalty * counts_V
        row_V -= params.presence_penalty * (counts_V > 0)
    return penalised_SV


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """One checked request."""

    bigram: Bigram
    prompt: bytes
    num_samples: int
    params: SamplingParams
    extra: ExtraLogprobs
    limit: int
    stops: Callable[[list[int]], bool]  # whether a sequence has ended with its newest token

    def pieces(self) -> Iterator[Piece]:
        """Every sequence's tokens, one at a time, in turn."""
        params, num_top, ended = self.params, self.extra.topk_sampled, set[int]()
        written: list[list[int]] = [[] for _ in range(self.num_samples)]
        before_S = np.full(self.num_samples, tokens_of(self.prompt)[-1])
        for position in range(self.limit):
            shown_SV = raw_SV = self.bigram.logprobs(before_S)
            before_S = _choose(
                _penalised(raw_SV, params, tokens_of(self.prompt), written),
                params,
                _uniform_numbers(params.seed, self.prompt, self.num_samples, position),
            )
            if params.logprobs == "tempered" and params.temperature != 0:
                scaled_SV = raw_SV.astype(np.float64) / params.temperature
                scaled_SV -= scaled_SV.max(axis=1, keepdims=True)
                shown_SV = (
                    scaled_SV - np.log(np.exp(scaled_SV).sum(axis=1, keepdims=True))
                ).astype(np.float32)
            for sample in sorted(set(range(self.num_samples)) - ended):
                token, tokens = int(before_S[sample]), written[sample]
                tokens.append(token)
                reason = (
                    "stop"
                    if self.stops(tokens)
                    else "length"
                    if len(tokens) == self.limit
                    else None
                )
                yield Piece(
                    sample=sample,
                    tokens=np.int32(token).tobytes(),
                    logprobs=np.float32(shown_SV[sample, token]).tobytes(),
                    version=self.bigram.version,
                    top=_most_likely(shown_SV[sample][None], num_top) if num_top else None,
                    stop_reason=reason,
                )
                if reason is not None:
                    ended.add(sample)
            if len(ended) == self.num_samples:
                return

    def result(self) -> SampleResult:
        """All of it."""
        pieces, sequences = list(self.pieces()), list[Sequence]()
        for sample in range(self.num_samples):
            whole = joined([piece for piece in pieces if piece.sample == sample])
            reason = whole.stop_reason or "length"
            sequences.append(
                Sequence(
                    tokens=whole.tokens, logprobs=whole.logprobs, stop_reason=reason, top=whole.top
                )
            )
        extra, prompt, own, top, targets, drawn = (
            self.extra,
            tokens_of(self.prompt),
            None,
            None,
            None,
            None,
        )
        after_PV = (
            self.bigram.logprobs(prompt[:-1]) if extra.of_prompt else np.empty((0, 0), np.float32)
        )
        if extra.prompt_logprobs:
            own_P1 = np.take_along_axis(after_PV, prompt[1:, None].astype(np.int64), axis=1)
            own = np.append(np.float32(np.nan), own_P1).tobytes()
        if k := extra.topk_prompt:  # behind filler: the first position has no distribution
            top, filler = _most_likely(after_PV, k), np.full(k, FILLER, np.float32).tobytes()
            ids = np.zeros(k, np.int32).tobytes() + top.ids
            top = TopK(k=k, length=top.length + 1, ids=ids, logprobs=filler + top.logprobs)
        if extra.targets is not None:
            ids_PK = array(extra.targets)
            found_PK = np.take_along_axis(after_PV, np.maximum(ids_PK, 0), axis=1)
            data = np.where(ids_PK < 0, np.float32(0), found_PK).astype(np.float32).tobytes()
            targets = Array(dtype="float32", shape=ids_PK.shape, data=data)
        if k := extra.alternatives:  # at the temperature alone
            params = msgspec.structs.replace(self.params, top_k=-1, top_p=1.0, min_p=0.0)
            ids_PK = np.zeros((len(after_PV), k), np.int64)
            for at, row_V in enumerate(after_PV):
                uniform_K = _uniform_numbers(params.seed, self.prompt, k, ALTERNATIVES_AT + at)
                ids_PK[at] = _choose(np.repeat(row_V[None], k, axis=0), params, uniform_K)
            drawn = _listed(ids_PK, np.take_along_axis(after_PV, ids_PK, axis=1))
        return SampleResult(
            sequences=tuple(sequences),
            version=self.bigram.version,
            prompt_logprobs=own,
            topk_prompt=top,
            target_logprobs=targets,
            alternatives=drawn,
        )


def _most_likely(logprobs_LV: np.ndarray, k: int) -> TopK:
    ids_LK = np.argsort(-logprobs_LV, axis=1, kind="stable")[:, :k]
    return _listed(ids_LK, np.take_along_axis(logprobs_LV, ids_LK, axis=1))


def _listed(ids_LK: np.ndarray, logprobs_LK: np.ndarray) -> TopK:
    length, k = ids_LK.shape
    ids, logprobs = ids_LK.astype(np.int32), logprobs_LK.astype(np.float32)
    return TopK(k=k, length=length, ids=ids.tobytes(), logprobs=logprobs.tobytes())
