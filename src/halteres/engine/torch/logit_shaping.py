"""What a request changes of its rows' logits before a token is drawn: penalties for tokens that are
there already, and the tokens that its grammar leaves.

A row without either is not looked at. Source: vLLM 0.32 `model_executor/layers/utils.py`
(`apply_penalties`: repetition, then frequency, then presence) and `v1/structured_output`.

M rows that change their logits, V vocabulary, K tokens that one of them has seen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halteres.engine.protocol import SamplingParams
from halteres.errors import InvalidData, UserError

SLOWEST_MASK_S = 1.0
"""CPU seconds that the tokens which a grammar leaves may take to find: all rows wait for them."""

ROOM = 64  # for tokens of an answer; doubled when they are more


class LogitShaper:
    """Of one row."""

    def __init__(
        self, params: SamplingParams, prompt: np.ndarray, follower: Follower | None
    ) -> None:
        """
        Args:
            prompt: its tokens.
            follower: of the grammar, at the answer's beginning.
        """
        self.params, self.follower = params, follower
        # of the prompt nothing but the repetition penalty reads
        before = np.empty(0, np.int64)
        if params.repetition_penalty != 1:
            before = np.unique(prompt)
        # tokens by the place that they got when they came, and how often they are in the answer;
        # there is room for more behind them
        self._places = {token: place for place, token in enumerate(before.tolist())}
        self._tokens = np.concatenate([before, np.zeros(ROOM, np.int64)])
        self._counts = np.zeros(len(self._tokens), np.float32)

    @property
    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """The K tokens that are there, int64, and how often in the answer, float32."""
        size = len(self._places)
        return self._tokens[:size], self._counts[:size]

    @property
    def failure(self) -> UserError | None:
        """Why the row cannot go on."""
        if self.follower is None:
            return None
        return self.follower.failure

    def take(self, token: int) -> None:
        """The row has one more token."""
        if self.params.penalises:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._tokens):
                self._tokens = np.append(self._tokens, np.zeros_like(self._tokens))
                self._counts = np.append(self._counts, np.zeros_like(self._counts))
            self._tokens[place] = token
            self._counts[place] += 1
        if self.follower is not None:
            self.follower.take(token)


class Follower:
    """Of one answer: where in its grammar it is."""

    def __init__(self, matcher: Any, vocabulary: Any, field: str) -> None:
        """
        Args:
            matcher: of a `grammar.Vocabulary`, its own.
            field: what the request calls the grammar.
        """
        self._matcher, self.vocabulary, self._field = matcher, vocabulary, field
        self.failure: UserError | None = None

    def mask(self) -> bytes:
        """The tokens that may come now, as the library packs them; `failure` says where they were
        not found, or took too long.
        """
        began = time.thread_time()
        mask = self._matcher.compute_bitmask()
        took_s = time.thread_time() - began
        # the mask of an error allows the end token
        if self._matcher.is_error():
            self.fail("It became too complex while the answer was written.")
        elif took_s > SLOWEST_MASK_S:
            self.fail(f"To find what may follow took {took_s:.1f} s.")
        return mask

    def take(self, token: int) -> None:
        """The answer has one more token."""
        if not self._matcher.consume_token(token):
            self.fail("It became too complex while the answer was written.")

    def fail(self, why: str) -> None:
        """The answer cannot go on."""
        what = f"The answer could not be held to `{self._field}`."
        self.failure = InvalidData(what, why, "Send a simpler one.", param=self._field)


def shaped(logits_MV: Tensor, shapers: Sequence[LogitShaper]) -> Tensor:
    """The logits after penalties and grammars; of a row that fails, whatever they are."""
    shaped_MV = logits_MV.clone()
    _penalise(shaped_MV, shapers)
    held = [row for row, one in enumerate(shapers) if one.follower is not None]
    if held:
        left = _left(shapers).to(logits_MV.device)
        if len(held) == len(shapers):
            return shaped_MV.masked_fill_(~left, -torch.inf)
        rows = torch.tensor(held, device=logits_MV.device)
        shaped_MV[rows] = shaped_MV[rows].masked_fill(~left, -torch.inf)
    return shaped_MV


def _left(shapers: Sequence[LogitShaper]) -> Tensor:
    """The tokens that grammars leave, bool, a row for each that has one."""
    followers = [one.follower for one in shapers if one.follower is not None]
    allowed = followers[0].vocabulary.allowed([one.mask() for one in followers])
    for follower, some in zip(followers, allowed.any(axis=1).tolist(), strict=True):
        if not some:
            follower.fail("Nothing fits it that can follow what was written.")
    return torch.from_numpy(allowed)


def _penalise(logits_MV: Tensor, shapers: Sequence[LogitShaper]) -> None:
    """In place; all tokens of all rows at once."""
    penalised = [(row, one) for row, one in enumerate(shapers) if one.params.penalises]
    sizes = [len(one.seen[0]) for _, one in penalised]
    if not sum(sizes):
        return

    def of_each_token(values: Sequence[float] | Sequence[int]) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values), sizes)).to(logits_MV.device)

    params = [one.params for _, one in penalised]
    tokens = np.concatenate([one.seen[0] for _, one in penalised])
    counts = np.concatenate([one.seen[1] for _, one in penalised])
    places = (
        of_each_token([row for row, _ in penalised]),
        torch.from_numpy(tokens).to(logits_MV.device),
    )
    counts_K = torch.from_numpy(counts).to(logits_MV.device)
    repetition_K = of_each_token([one.repetition_penalty for one in params]).float()
    frequency_K = of_each_token([one.frequency_penalty for one in params]).float()
    presence_K = of_each_token([one.presence_penalty for one in params]).float()
    values_K = logits_MV[places]
    values_K = torch.where(values_K > 0, values_K / repetition_K, values_K * repetition_K)
    values_K = values_K - frequency_K * counts_K
    values_K = values_K - presence_K * (counts_K > 0)
    logits_MV[places] = values_K
