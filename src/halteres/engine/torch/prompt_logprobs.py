"""Log-probabilities of a prompt for sampling requests: of its tokens, the likeliest, given and
drawn ones.

One walk over the prompt's logits, a chunk at a time, serves all requests that share the prompt. All
are of temperature
1.

P tokens of the prompt, T of them with padding, C of one chunk, K values per position. Row i scores
position i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from halteres.engine.checks import array
from halteres.engine.protocol import Array, ExtraLogprobs, SampleResult, SamplingParams, TopK
from halteres.engine.stream_buffer import end_to_end
from halteres.engine.torch.projections import (
    LEAST_ROWS,
    Adaptations,
    Projection,
    head_logits,
    round_up,
)
from halteres.engine.torch.token_sampling import (
    COLDEST,
    as_seed,
    inverted,
    most_likely,
    tempered,
    uniforms,
)

# the log-probability of a list's entries where nothing was computed; their token is 0
FILLER = -99999.0


class PromptScorer:
    """What one request asks for of its prompt; it sees every row once, in order."""

    def __init__(self, extra: ExtraLogprobs, params: SamplingParams, tokens_P: Tensor) -> None:
        self.extra, self._params, self._tokens_P = extra, params, tokens_P
        self._own = [np.full(1, np.nan, np.float32)]  # the first position has no prediction
        k = extra.topk_prompt
        ids, logprobs = np.zeros(k, np.int32), np.full(k, FILLER, np.float32)
        self._tops = [TopK(k=k, length=1, ids=ids.tobytes(), logprobs=logprobs.tobytes())]
        self._targets = None if extra.targets is None else array(extra.targets)
        self._target_logprobs = (
            None if self._targets is None else np.zeros(self._targets.shape, np.float32)
        )
        self._drawn_ids, self._drawn_logprobs = list[np.ndarray](), list[np.ndarray]()

    def take(self, start: int, logits_CV: Tensor, raw_CV: Tensor) -> None:
        """Rows `start` to `start + C`, none of them padding; `raw` is their log-softmax at
        temperature 1.
        """
        rows = raw_CV.shape[0]
        if self.extra.prompt_logprobs:
            next_C = self._tokens_P[start + 1 : start + 1 + rows]
            self._own.append(_numbers(raw_CV.gather(1, next_C[:, None]).squeeze(1)))
        if self.extra.topk_prompt:
            self._tops += most_likely(raw_CV, self.extra.topk_prompt)
        if self._targets is not None and self._target_logprobs is not None:
            targets_CK = self._targets[start : start + rows]  # below 0 a cell is skipped
            known = torch.from_numpy(np.maximum(targets_CK, 0)).to(raw_CV.device)
            found_CK = np.where(targets_CK < 0, np.float32(0), _numbers(raw_CV.gather(1, known)))
            self._target_logprobs[start : start + rows] = found_CK
        if self.extra.alternatives:
            tokens_CK = self._draw(start, logits_CV, raw_CV)
            self._drawn_ids.append(tokens_CK.to(torch.int32).cpu().numpy())
            self._drawn_logprobs.append(_numbers(raw_CV.gather(1, tokens_CK)))

    def result(self) -> SampleResult:
        """All of it, without sequences."""
        extra, alternatives, targets = self.extra, None, self._target_logprobs
        if k := extra.alternatives:
            parts = (self._drawn_ids, self._drawn_logprobs)
            ids, logprobs = (b"".join(rows.tobytes() for rows in part) for part in parts)
            alternatives = TopK(k=k, length=len(ids) // (4 * k), ids=ids, logprobs=logprobs)
        return SampleResult(
            sequences=(),
            version=0,
            prompt_logprobs=np.concatenate(self._own).tobytes() if extra.prompt_logprobs else None,
            topk_prompt=end_to_end(self._tops) if extra.topk_prompt else None,
            target_logprobs=None
            if targets is None
            else Array(dtype="float32", shape=targets.shape, data=targets.tobytes()),
            alternatives=alternatives,
        )

    def _draw(self, start: int, logits_CV: Tensor, raw_CV: Tensor) -> Tensor:
        """K tokens of each row with replacement at the request's temperature.

        Their random numbers have the seed of the request and coordinates (k, position): the
        request's own samples use positions behind the prompt only.
        """
        rows, k, temperature = (
            raw_CV.shape[0],
            self.extra.alternatives,
            np.float32(self._params.temperature),
        )
        if temperature < COLDEST:
            return logits_CV.argmax(dim=-1, keepdim=True).expand(rows, k)
        positions, numbers = np.meshgrid(
            np.arange(start + 1, start + 1 + rows, dtype=np.uint64),
            np.arange(k, dtype=np.uint64),
            indexing="ij",
        )
        seeds = np.full(positions.shape, as_seed(self._params.seed), np.uint64)
        uniforms_CK = torch.from_numpy(uniforms(seeds, numbers, positions)).to(raw_CV.device)
        return inverted(tempered(logits_CV, raw_CV, np.full(rows, temperature)).exp(), uniforms_CK)


def score_prompt(
    head: Projection,
    weights: Adaptations,
    hidden_TD: Tensor,
    length: int,
    scorers: Sequence[PromptScorer],
    elements: int,
) -> None:
    """Show every scorer the logits of a prompt of `length` tokens, at most `elements` at once."""
    scorers = [scorer for scorer in scorers if scorer.extra.of_prompt]
    if not scorers:
        return
    size = max(LEAST_ROWS, elements // head.weight_ED.shape[0] // LEAST_ROWS * LEAST_ROWS)
    for start in range(0, round_up(length - 1, LEAST_ROWS), size):
        logits_CV = head_logits(head, weights, hidden_TD[start : start + size])
        logits_CV = logits_CV[: length - 1 - start]
        raw_CV = torch.log_softmax(logits_CV, dim=1)
        for scorer in scorers:
            scorer.take(start, logits_CV, raw_CV)


def _numbers(values: Tensor) -> np.ndarray:
    return values.float().cpu().numpy()
