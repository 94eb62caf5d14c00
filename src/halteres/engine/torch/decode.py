"""Sequences of one snapshot, decoded together.

Owns: rows and their slots (row i is slot i, always without gaps), prefill of new prompts, one decode step.
Never: decides who may enter; mixes snapshots (several adapters in one pass: a later version).
Promise: a row's tokens and log-probabilities do not depend on its neighbours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from halteres.engine.torch.adapter import Snapshot
from halteres.engine.torch.attention import Cached, Prefill
from halteres.engine.torch.cache import POSITION_STEP, Extent, SlotCache, round_up
from halteres.engine.torch.choose import Shaping, choose
from halteres.engine.torch.draws import as_seed, uniforms
from halteres.engine.torch.forward import hidden_states, target_logprobs
from halteres.engine.torch.functions import project
from halteres.engine.torch.heads import Grid
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.requests import Row, SampleRequest
from halteres.errors import UserError

ROW_STEP = 8
"""Rows of a step are padded to a multiple of this: with fewer than 4 rows matmul kernels change, and with them bits."""

_COLUMNS = np.dtype(
    [
        ("token", np.int64),  # the newest one, to be fed next
        ("position", np.int64),  # ... at this position
        ("seed", np.uint64),
        ("sample", np.uint64),
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
    ]
)


class DecodeBatch:
    """All rows of one snapshot."""

    def __init__(self, base: BaseModel, snapshot: Snapshot, limits: Limits, cache: SlotCache) -> None:
        self.base, self.snapshot, self.limits, self.cache = base, snapshot, limits, cache
        self.rows: list[Row] = []
        self.sound = True  # False: a step broke off, nobody knows what the cache holds
        self._columns = {name: np.zeros(0, dtype=_COLUMNS[name]) for name in _COLUMNS.names or ()}

    @property
    def requests(self) -> set[SampleRequest]:
        """Those that have rows here."""
        return {row.request for row in self.rows}

    @property
    def extent(self) -> Extent:
        """What the cache grows to, should every row reach its full length."""
        longest = max((row.request.full_length for row in self.rows), default=0)
        return self.cache.extent.grown(len(self.rows), longest)

    def admit(self, entries: Sequence[tuple[SampleRequest, int]]) -> None:
        """Give each request as many new rows as said; every distinct prompt is prefilled once."""
        by_prompt: defaultdict[bytes, list[tuple[SampleRequest, int]]] = defaultdict(list)
        for request, count in entries:
            by_prompt[request.prompt].append((request, count))
        prompts = list(by_prompt.values())
        first = len(self.rows)
        slots = [self._open_rows(sharing) for sharing in prompts]
        hidden_UD = self._prefill(prompts, slots)
        sizes = torch.tensor([len(own) for own in slots], device=self.base.device)
        self._advance(first, hidden_UD.repeat_interleave(sizes, dim=0))

    def step(self) -> None:
        """One more token for every row; rows that end leave."""
        count = len(self.rows)
        padded = round_up(count, ROW_STEP)
        bound = round_up(int(self._columns["position"][:count].max()) + 1, POSITION_STEP)
        self.cache.reserve(padded, bound)
        tokens_S, positions_S = (self._tensor(name, padded) for name in ("token", "position"))
        attention, grid = Cached(self.cache, positions_S, bound), Grid.single(self.base, positions_S)
        hidden_SD = hidden_states(self.base, self.snapshot.weights, tokens_S, grid, attention)
        self._advance(0, hidden_SD[:count])

    def forget(self, requests: set[SampleRequest]) -> None:
        """Drop the rows of these requests."""
        self._remove([index for index, row in enumerate(self.rows) if row.request in requests])

    def _open_rows(self, sharing: Sequence[tuple[SampleRequest, int]]) -> range:
        """Rows at the end for requests with one prompt."""
        start = len(self.rows)
        for request, count in sharing:
            samples = range(request.started, request.started + count)
            request.started += count
            self._grow(len(self.rows) + count)
            rows = slice(len(self.rows), len(self.rows) + count)
            values = {
                "token": 0,
                "position": len(request.tokens) - 1,
                "seed": as_seed(request.params.seed),
                "sample": np.arange(samples.start, samples.stop, dtype=np.uint64),
                "temperature": request.params.temperature,
                "top_k": request.params.top_k,
                "top_p": request.params.top_p,
            }
            for name, value in values.items():
                self._columns[name][rows] = value
            self.rows += [Row(request, sample) for sample in samples]
        return range(start, len(self.rows))

    def _prefill(self, prompts: Sequence[Sequence[tuple[SampleRequest, int]]], slots: list[range]) -> Tensor:
        """The hidden state of every prompt's last token, U x D, in order.

        Prompts run with others of the same padded length only, so that their bits do not depend on company.
        """
        lengths = [len(sharing[0][0].tokens) for sharing in prompts]
        self.cache.reserve(round_up(len(self.rows), ROW_STEP), round_up(max(lengths), POSITION_STEP))
        by_length: defaultdict[int, list[int]] = defaultdict(list)
        for i, length in enumerate(lengths):
            by_length[round_up(length, POSITION_STEP)].append(i)
        hidden_UD = self.base.embedding_VD.new_empty((len(prompts), self.base.embedding_VD.shape[1]))
        for padded, members in sorted(by_length.items()):
            size = max(1, self.limits.pass_tokens // padded)
            for chunk in (members[i : i + size] for i in range(0, len(members), size)):
                hidden_BTD = self._prefill_chunk([prompts[i] for i in chunk], [slots[i] for i in chunk], padded)
                for row, i in enumerate(chunk):
                    hidden_UD[i] = hidden_BTD[row, lengths[i] - 1]
        return hidden_UD

    def _prefill_chunk(
        self, prompts: Sequence[Sequence[tuple[SampleRequest, int]]], slots: list[range], length: int
    ) -> Tensor:
        tokens = np.zeros((len(prompts), length + 1), dtype=np.int64)
        for row, sharing in zip(tokens, prompts, strict=True):
            row[: len(sharing[0][0].tokens)] = sharing[0][0].tokens
        tokens_BT = torch.from_numpy(tokens).to(self.base.device)
        grid, weights = Grid.padded(self.base, len(prompts), length), self.snapshot.weights
        attention = Prefill(grid, self.cache, slots, [len(sharing[0][0].tokens) for sharing in prompts])
        hidden_ND = hidden_states(self.base, weights, tokens_BT[:, :-1].reshape(-1), grid, attention)
        hidden_BTD = hidden_ND.view(len(prompts), length, -1)
        for row, sharing in enumerate(prompts):
            wanting = [request for request, _ in sharing if request.wants_prompt_logprobs]
            if wanting:
                logprobs_T = target_logprobs(
                    self.base, weights, hidden_BTD[row], tokens_BT[row, 1:], self.limits.head_elements
                )
                _give_prompt_logprobs(wanting, logprobs_T.cpu().numpy())
        return hidden_BTD

    def _advance(self, first: int, hidden_ND: Tensor) -> None:
        """Sample a token for each row from `first` on, given the hidden state of its newest token.

        Every row takes its token before any leaves: a request that has diverged costs its neighbours nothing.
        """
        last = first + hidden_ND.shape[0]
        self._columns["position"][first:last] += 1
        tokens, logprobs = self._sample(hidden_ND, self._shaping(first, last))
        self._columns["token"][first:last] = tokens
        broken = {self.rows[first + int(i)].request for i in np.flatnonzero(~np.isfinite(logprobs))}
        newest = enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True), start=first)
        ended = [i for i, pair in newest if self.rows[i].request not in broken and self.rows[i].take(*pair)]
        self._remove(ended)
        if broken:
            self._break(broken)

    def _sample(self, hidden_ND: Tensor, shaping: Shaping) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probabilities; the logits of a few rows at a time."""
        size = max(ROW_STEP, self.limits.head_elements // self.base.vocabulary // ROW_STEP * ROW_STEP)
        lora, tokens, logprobs = self.snapshot.weights.get(self.base.head), [], []
        for start in range(0, hidden_ND.shape[0], size):
            rows_CD = hidden_ND[start : start + size]
            logits_CV = project(_padded(rows_CD), self.base.head, lora)[: rows_CD.shape[0]]
            tokens_C, logprobs_C = choose(logits_CV, shaping[start : start + size])
            tokens.append(tokens_C)
            logprobs.append(logprobs_C)
        return torch.cat(tokens).cpu().numpy(), torch.cat(logprobs).cpu().numpy()

    def _shaping(self, first: int, last: int) -> Shaping:
        columns = {name: values[first:last] for name, values in self._columns.items()}
        draws_N = uniforms(columns["seed"], columns["sample"], columns["position"].astype(np.uint64))
        return Shaping(draws_N, columns["temperature"], columns["top_k"], columns["top_p"])

    def _break(self, requests: set[SampleRequest]) -> None:
        error = UserError(
            "Sampling gave a log-probability that is not finite.",
            f"The weights of this snapshot (policy version {self.snapshot.version}) have diverged.",
            "Resume from an earlier checkpoint with a lower learning rate.",
        )
        for request in requests:
            request.fail(error)
        self.forget(requests)

    def _remove(self, indices: Sequence[int]) -> None:
        """Rows leave; the last ones close the gaps, and nothing stays behind in the slots that are free then."""
        if not indices:
            return
        count, written = len(self.rows), self._columns["position"]  # the newest token is not in the cache yet
        longest = int(written[:count].max())
        for index in sorted(indices, reverse=True):
            last = len(self.rows) - 1
            if index != last:
                self.cache.move(last, index, int(max(written[index], written[last])))
                self.rows[index] = self.rows[last]
                for values in self._columns.values():
                    values[index] = values[last]
            self.rows.pop()
            for values in self._columns.values():
                values[last] = 0
        self.cache.clear(range(len(self.rows), count), longest)

    def _grow(self, rows: int) -> None:
        size = len(self._columns["token"])
        if rows > size:
            more = round_up(max(rows, 2 * size), ROW_STEP) - size
            self._columns = {
                name: np.concatenate([values, np.zeros(more, values.dtype)]) for name, values in self._columns.items()
            }

    def _tensor(self, name: str, rows: int) -> Tensor:
        return torch.from_numpy(self._columns[name][:rows]).to(self.base.device)


def _padded(rows_CD: Tensor) -> Tensor:
    missing = -rows_CD.shape[0] % ROW_STEP
    return torch.cat([rows_CD, rows_CD.new_zeros((missing, rows_CD.shape[1]))]) if missing else rows_CD


def _give_prompt_logprobs(requests: Sequence[SampleRequest], logprobs_T: np.ndarray) -> None:
    """Position 0 has no prediction and is NaN."""
    for request in requests:
        known = logprobs_T[: len(request.tokens) - 1]
        request.prompt_logprobs = np.concatenate([[np.float32(np.nan)], known]).astype("<f4").tobytes()
