"""What sampling requests ask of their prompt: log-probabilities of its tokens, the likeliest, given and drawn ones.

Owns: one walk over the prompt's logits, a chunk at a time, for all requests that share the prompt.
Never: has more logits at once than it is allowed; shapes a log-probability: those of a prompt are of temperature 1.

P tokens of the prompt, T of them with padding, C of one chunk, K values per position. Row i scores position i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from halteres.engine.checks import array
from halteres.engine.protocol import Array, SamplingParams, TopK, Wanted
from halteres.engine.stream_buffer import end_to_end
from halteres.engine.torch.cache import round_up
from halteres.engine.torch.forward import head_logits
from halteres.engine.torch.lora import Adaptations
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.token_sampling import COLDEST, as_seed, inverted, most_likely, tempered, uniforms

CHUNK_STEP = 8
"""Rows of a chunk are a multiple of this: with fewer than 4 rows matmul kernels change, and with them bits."""

FILLER = -99999.0
"""The log-probability of a list's entries where nothing was computed; their token is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """As in `SampleResult`; what was not asked for is None."""

    prompt_logprobs: bytes | None = None
    topk: TopK | None = None
    targets: Array | None = None
    alternatives: TopK | None = None


class Asked(Protocol):
    """One request's share: it sees every row once, in order."""

    def take(self, start: int, logits_CV: Tensor, raw_CV: Tensor) -> None:
        """Rows `start` to `start + C`, none of them padding; `raw` is their log-softmax at temperature 1."""
        ...


class _Actual:
    """Log-probabilities of the prompt's own tokens."""

    def __init__(self, tokens_P: Tensor) -> None:
        self._tokens_P, self._parts = tokens_P, [np.full(1, np.nan, np.float32)]

    def take(self, start: int, logits_CV: Tensor, raw_CV: Tensor) -> None:
        next_C = self._tokens_P[start + 1 : start + 1 + raw_CV.shape[0]]
        self._parts.append(_numbers(raw_CV.gather(1, next_C[:, None]).squeeze(1)))

    def told(self) -> bytes:
        """Position 0 has no prediction and is NaN."""
        return np.concatenate(self._parts).tobytes()


class _Likeliest:
    """The K most likely tokens; the first position has none."""

    def __init__(self, k: int) -> None:
        ids, logprobs = np.zeros(k, np.int32), np.full(k, FILLER, np.float32)
        self._k, self._tops = k, [TopK(k=k, length=1, ids=ids.tobytes(), logprobs=logprobs.tobytes())]

    def take(self, start: int, logits_CV: Tensor, raw_CV: Tensor) -> None:
        self._tops += most_likely(raw_CV, self._k)

    def told(self) -> TopK | None:
        return end_to_end(self._tops)


class _Given:
    """Log-probabilities of given tokens; 0 where a cell is skipped."""

    def __init__(self, targets: Array) -> None:
        self._targets, self._logprobs = array(targets), np.zeros(targets.shape, np.float32)

    def take(self, start: int, logits_CV: Tensor, raw_CV: Tensor) -> None:
        rows = slice(start, start + raw_CV.shape[0])
        given_CK = self._targets[rows]
        known = torch.from_numpy(np.maximum(given_CK, 0)).to(raw_CV.device)
        self._logprobs[rows] = np.where(given_CK < 0, np.float32(0), _numbers(raw_CV.gather(1, known)))

    def told(self) -> Array:
        return Array(dtype="float32", shape=self._logprobs.shape, data=self._logprobs.tobytes())


class _Drawn:
    """K tokens drawn with replacement at the request's temperature.

    Their random numbers have the seed of the request and coordinates (k, position): the request's own samples use
    positions behind the prompt only.
    """

    def __init__(self, k: int, params: SamplingParams) -> None:
        self._k, self._params = k, params
        self._ids: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []

    def take(self, start: int, logits_CV: Tensor, raw_CV: Tensor) -> None:
        rows, temperature = raw_CV.shape[0], np.float32(self._params.temperature)
        if temperature < COLDEST:
            tokens_CK = logits_CV.argmax(dim=-1, keepdim=True).expand(rows, self._k)
        else:
            warm_CV = tempered(logits_CV, raw_CV, np.full(rows, temperature))
            tokens_CK = inverted(warm_CV.exp(), self._uniforms(start + 1, rows).to(raw_CV.device))
        self._ids.append(tokens_CK.to(torch.int32).cpu().numpy())
        self._logprobs.append(_numbers(raw_CV.gather(1, tokens_CK)))

    def told(self) -> TopK:
        ids, logprobs = (b"".join(part.tobytes() for part in parts) for parts in (self._ids, self._logprobs))
        return TopK(k=self._k, length=len(ids) // (4 * self._k), ids=ids, logprobs=logprobs)

    def _uniforms(self, position: int, rows: int) -> Tensor:
        positions, draws = np.meshgrid(
            np.arange(position, position + rows, dtype=np.uint64), np.arange(self._k, dtype=np.uint64), indexing="ij"
        )
        seeds = np.full(positions.shape, as_seed(self._params.seed), np.uint64)
        return torch.from_numpy(uniforms(seeds, draws, positions))


class Share:
    """What one request wants of its prompt."""

    def __init__(self, wanted: Wanted, params: SamplingParams, tokens_P: Tensor) -> None:
        self._actual = _Actual(tokens_P) if wanted.prompt_logprobs else None
        self._likeliest = _Likeliest(wanted.topk_prompt) if wanted.topk_prompt else None
        self._given = _Given(wanted.targets) if wanted.targets is not None else None
        self._drawn = _Drawn(wanted.alternatives, params) if wanted.alternatives else None

    @property
    def asked(self) -> list[Asked]:
        """The parts of it; none, if the request wants nothing of its prompt."""
        return [part for part in (self._actual, self._likeliest, self._given, self._drawn) if part is not None]

    def scores(self) -> PromptScores:
        """All of it."""
        return PromptScores(
            prompt_logprobs=self._actual.told() if self._actual else None,
            topk=self._likeliest.told() if self._likeliest else None,
            targets=self._given.told() if self._given else None,
            alternatives=self._drawn.told() if self._drawn else None,
        )


def score_prompt(
    base: BaseModel, weights: Adaptations, hidden_TD: Tensor, length: int, shares: Sequence[Share], elements: int
) -> None:
    """Show every share the logits of a prompt of `length` tokens, at most `elements` at once."""
    asked = [part for share in shares for part in share.asked]
    if not asked:
        return
    size = max(CHUNK_STEP, elements // base.vocabulary // CHUNK_STEP * CHUNK_STEP)
    for start in range(0, round_up(length - 1, CHUNK_STEP), size):
        logits_CV = head_logits(base, weights, hidden_TD[start : start + size])
        logits_CV = logits_CV[: length - 1 - start]
        raw_CV = torch.log_softmax(logits_CV, dim=1)
        for part in asked:
            part.take(start, logits_CV, raw_CV)


def _numbers(values: Tensor) -> np.ndarray:
    return values.float().cpu().numpy()
