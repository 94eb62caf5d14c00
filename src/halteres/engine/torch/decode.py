"""Sequences of one snapshot, decoded together.

Owns: rows and their slots (row i is slot i, always without gaps), prefill of new prompts, one decode step.
Never: decides who may enter; mixes snapshots (several adapters in one pass: a later version).
Promise: a row's tokens and log-probabilities do not depend on its neighbours.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from halteres.engine.protocol import TopK
from halteres.engine.torch.adapter import Snapshot
from halteres.engine.torch.attention import Cached, Prefill
from halteres.engine.torch.cache import POSITION_STEP, Extent, SlotCache, round_up
from halteres.engine.torch.choose import Chosen, Shaping, choose
from halteres.engine.torch.draws import as_seed, uniforms
from halteres.engine.torch.forward import hidden_states
from halteres.engine.torch.functions import project
from halteres.engine.torch.heads import Grid
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.requests import Newest, Row, SampleRequest
from halteres.engine.torch.scores import Share, score_prompt
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
        ("tempered", np.bool_),
        ("told", np.int64),  # most likely tokens that are told with every token
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

    def abandon(self) -> dict[SampleRequest, list[int]]:
        """Let go of every row, and of a cache that nobody may trust; the samples that are lost, by request."""
        lost: defaultdict[SampleRequest, list[int]] = defaultdict(list)
        for row in self.rows:
            lost[row.request].append(row.sample)
        self.sound, self.rows = False, []
        return lost

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
        attention, grid = Cached(self.cache, positions_S, bound), Grid.single(positions_S)
        hidden_SD = hidden_states(self.base, self.snapshot.weights, tokens_S, grid, attention)
        self._advance(0, hidden_SD[:count])

    def forget(self, requests: set[SampleRequest]) -> None:
        """Drop the rows of these requests."""
        self._remove([index for index, row in enumerate(self.rows) if row.request in requests])

    def _open_rows(self, sharing: Sequence[tuple[SampleRequest, int]]) -> range:
        """Rows at the end for requests with one prompt."""
        start = len(self.rows)
        for request, count in sharing:
            samples, params = list(islice(request.unstarted, count)), request.params
            self._grow(len(self.rows) + count)
            rows = slice(len(self.rows), len(self.rows) + count)
            values = {
                "token": 0,
                "position": len(request.tokens) - 1,
                "seed": as_seed(params.seed),
                "sample": np.array(samples, dtype=np.uint64),
                "temperature": params.temperature,
                "top_k": params.top_k if 0 < params.top_k < self.base.vocabulary else -1,
                "top_p": params.top_p,
                "tempered": params.logprobs == "tempered",
                "told": request.wanted.topk_sampled,
            }
            for name, value in values.items():
                self._columns[name][rows] = value
            self.rows += [Row(request, request.unstarted.popleft()) for _ in samples]
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
        tokens = np.zeros((len(prompts), length), dtype=np.int64)
        for row, sharing in zip(tokens, prompts, strict=True):
            row[: len(sharing[0][0].tokens)] = sharing[0][0].tokens
        tokens_BT = torch.from_numpy(tokens).to(self.base.device)
        grid, weights = Grid.padded(self.base, len(prompts), length), self.snapshot.weights
        attention = Prefill(grid, self.cache, slots, [len(sharing[0][0].tokens) for sharing in prompts])
        hidden_ND = hidden_states(self.base, weights, tokens_BT.view(-1), grid, attention)
        hidden_BTD = hidden_ND.view(len(prompts), length, -1)
        for row, sharing in enumerate(prompts):
            length = len(sharing[0][0].tokens)
            shares = [Share(request.wanted, request.params, tokens_BT[row, :length]) for request, _ in sharing]
            score_prompt(self.base, weights, hidden_BTD[row], length, shares, self.limits.head_elements)
            for (request, _), share in zip(sharing, shares, strict=True):
                request.scores = share.scores()
        return hidden_BTD

    def _advance(self, first: int, hidden_ND: Tensor) -> None:
        """Sample a token for each row from `first` on, given the hidden state of its newest token.

        Every row takes its token before any leaves: a request that has diverged costs its neighbours nothing.
        """
        last = first + hidden_ND.shape[0]
        self._columns["position"][first:last] += 1
        newest = self._sample(hidden_ND, self._shaping(first, last))
        self._columns["token"][first:last] = [new.token for new in newest]
        rows = self.rows[first:last]
        broken = {row.request for row, new in zip(rows, newest, strict=True) if not math.isfinite(new.logprob)}
        taken = enumerate(zip(rows, newest, strict=True), start=first)
        ended = [i for i, (row, new) in taken if row.request not in broken and row.take(new)]
        self._remove(ended)
        if broken:
            self._break(broken)

    def _sample(self, hidden_ND: Tensor, shaping: Shaping) -> list[Newest]:
        """A token for every row; the logits of a few rows at a time."""
        size = max(ROW_STEP, self.limits.head_elements // self.base.vocabulary // ROW_STEP * ROW_STEP)
        lora, found, tops = self.snapshot.weights.get(self.base.head), list[Chosen](), dict[int, TopK]()
        for start in range(0, hidden_ND.shape[0], size):
            rows_CD = hidden_ND[start : start + size]
            logits_CV = project(_padded(rows_CD), self.base.head, lora)[: rows_CD.shape[0]]
            found.append(choose(logits_CV, shaping[start : start + size]))
            tops.update({start + row: top for row, top in found[-1].tops.items()})
        tokens = torch.cat([chosen.tokens_N for chosen in found]).tolist()
        logprobs = torch.cat([chosen.logprobs_N for chosen in found]).tolist()
        return list(map(Newest, tokens, logprobs, map(tops.get, range(len(tokens)))))

    def _shaping(self, first: int, last: int) -> Shaping:
        columns = {name: values[first:last] for name, values in self._columns.items()}
        draws_N = uniforms(columns["seed"], columns["sample"], columns["position"].astype(np.uint64))
        return Shaping(
            uniforms_N=draws_N,
            temperature_N=columns["temperature"],
            top_k_N=columns["top_k"],
            top_p_N=columns["top_p"],
            tempered_N=columns["tempered"],
            told_N=columns["told"],
        )

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
