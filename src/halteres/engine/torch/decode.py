"""Sequences, of whatever snapshots, decoded together: prefill of rows that have entered, one decode
step of all rows.

A row's tokens and log-probabilities depend neither on its neighbours nor on the slots that it had.
Who may enter or makes way is the scheduler's to decide (`worker`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice

import numpy as np
import torch
from torch import Tensor

from halteres.engine.protocol import TopK
from halteres.engine.torch.adapter import Snapshot
from halteres.engine.torch.attention import Cached, Prefill
from halteres.engine.torch.cache import POSITION_STEP, CacheMemory
from halteres.engine.torch.limits import Limits, attempt
from halteres.engine.torch.logit_shaping import shaped
from halteres.engine.torch.model import BaseModel, Grid
from halteres.engine.torch.multi_lora import MultiLora
from halteres.engine.torch.projections import LEAST_ROWS, head_logits, round_up
from halteres.engine.torch.prompt_logprobs import PromptScorer, score_prompt
from halteres.engine.torch.rows import COLUMNS, Newest, Place, Row, RowBlock, Rows, SampleRequest
from halteres.engine.torch.token_sampling import (
    Chosen,
    ShapedRows,
    Shaping,
    as_seed,
    choose,
    uniforms,
)
from halteres.errors import UserError


@dataclass(slots=True)
class Text:
    """The tokens that several rows share, prompt and answer so far: prefilled once, in the first of
    their slots.
    """

    tokens: np.ndarray  # int64
    snapshot: Snapshot
    start: int = 0  # tokens whose keys and values were found in the prefix cache
    slots: list[tuple[RowBlock, int]] = field(default_factory=list)
    requests: dict[SampleRequest, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def rest(self) -> range:
        """Positions that have to be computed."""
        return range(self.start, len(self.tokens))


class DecodeBatch:
    """All rows."""

    def __init__(self, base: BaseModel, limits: Limits, memory: CacheMemory) -> None:
        self.base, self.limits = base, limits
        self._memory, self.rows = memory, Rows(memory)
        self.mixture = MultiLora(base, limits.mixture_bytes)
        self._entered: list[Place] = []  # not prefilled yet

    @property
    def has_entered(self) -> bool:
        """Some rows wait for `prefill`."""
        return bool(self._entered)

    def abandon(self) -> dict[SampleRequest, list[Row]]:
        """Let go of every row, and of blocks that nobody may trust; the rows that are lost, by
        request.
        """
        lost: defaultdict[SampleRequest, list[Row]] = defaultdict(list)
        for row in self.rows:
            lost[row.request].append(row)
        self.rows.release()
        self._entered = []
        self.mixture.hold(())
        return lost

    def enter(self, request: SampleRequest, length: int, count: int) -> None:
        """The first rows that wait get slots of this length, for which there is room; `prefill`
        fills them.
        """
        rows = list(islice(request.waiting, count))
        # The newest token of each is the last of what it has so far.
        params, columns_N = request.params, np.zeros(len(rows), COLUMNS)
        columns_N["position"] = [row.length - 1 for row in rows]
        columns_N["seed"] = as_seed(params.seed)
        columns_N["sample"] = [row.sample for row in rows]
        columns_N["temperature"] = params.temperature
        columns_N["top_k"] = params.top_k if 0 < params.top_k < self.base.vocabulary else -1
        columns_N["top_p"] = params.top_p
        columns_N["min_p"] = params.min_p
        columns_N["tempered"] = params.logprobs == "tempered"
        columns_N["num_top"] = request.extra.topk_sampled
        self._entered += self.rows.enter(length, rows, columns_N)
        for row in rows:
            if not row.tokens:
                row.shaper = request.new_shaper()
            request.waiting.popleft()

    def prefill(self) -> None:
        """Fill the slots of all rows that have entered, equal texts once, and sample a token for
        each row.
        """
        places, self._entered = self._entered, []
        self.mixture.hold(_owners(self.rows.places))
        columns_N = _columns(places)
        texts, text_of_row = _texts(places)
        prefixes = self._memory.prefixes
        for text in texts:
            scored = any(
                request.scores is None and request.extra.of_prompt for request in text.requests
            )
            if not scored:
                block, slot = text.slots[0]
                text.start = prefixes.restore(text.snapshot, text.tokens, block.cache, slot)
            for request in text.requests:
                if request.scores is None:
                    request.cache_hit_tokens = text.start
            prefixes.hit_tokens += text.start
            prefixes.computed_tokens += len(text.rest)
        hidden_UD = self._last_hidden(texts)
        self._advance(places, columns_N, hidden_UD.index_select(0, self._tensor(text_of_row)))

    def step(self) -> None:
        """One more token for every row; rows that end leave."""
        places = self.rows.places
        columns_S = _columns(places, multiple_of=LEAST_ROWS)
        tokens_S, positions_S = (self._tensor(columns_S[name]) for name in ("token", "position"))
        reads = [(block.cache, len(slots), int(block.written_R.max())) for block, slots in places]
        attention, grid = Cached(reads, positions_S), Grid.single(positions_S)
        owners = _owners(places)
        self.mixture.hold(owners)
        adaptations = self.mixture.adaptations(owners, 1, len(columns_S))
        hidden_SD = self.base.hidden_states(adaptations, tokens_S, grid, attention)
        count = len(self.rows)
        self._advance(places, columns_S[:count], hidden_SD[:count])

    def forget(self, requests: set[SampleRequest]) -> None:
        """Drop the rows of these requests."""
        self._leave([row for row in self.rows if row.request in requests])

    def _leave(self, rows: Sequence[Row]) -> None:
        self.rows.leave(rows)
        if not self.rows:
            self.mixture.hold(())

    def _last_hidden(self, texts: Sequence[Text]) -> Tensor:
        """The hidden state of every text's last token, U x D, in order.

        Texts run with others of the same padded length only, so that their bits do not depend on
        company.
        """
        by_length: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
        for i, text in enumerate(texts):
            by_length[round_up(len(text.rest), POSITION_STEP), text.start > 0].append(i)
        base = self.base
        hidden_UD = base.embedding_VD.new_empty(
            (len(texts), base.embedding_VD.shape[1]), dtype=base.operands
        )
        for (padded, _), members in sorted(by_length.items()):
            size = max(1, self.limits.pass_tokens // padded)
            for chunk in (members[i : i + size] for i in range(0, len(members), size)):
                hidden_BTD = self._prefill_chunk([texts[i] for i in chunk], padded)
                for row, i in enumerate(chunk):
                    hidden_UD[i] = hidden_BTD[row, len(texts[i].rest) - 1]
        return hidden_UD

    def _prefill_chunk(self, texts: Sequence[Text], length: int) -> Tensor:
        tokens = np.zeros((len(texts), length), dtype=np.int64)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text.rest)] = text.tokens[text.start :]
        tokens_BT = torch.from_numpy(tokens).to(self.base.device)
        grid = Grid.following(self.base, [text.start for text in texts], length)
        slots = [(block.cache, slot) for block, slot in (text.slots[0] for text in texts)]
        attention = Prefill(grid, slots, [text.rest for text in texts])
        adaptations = self.mixture.adaptations(
            [text.snapshot for text in texts], length, tokens.size
        )
        hidden_ND = self.base.hidden_states(adaptations, tokens_BT.view(-1), grid, attention)
        hidden_BTD = hidden_ND.view(len(texts), length, -1)
        for row, text in enumerate(texts):
            # Of a row that goes on, its request has the scores already.
            requests = [request for request in text.requests if request.scores is None]
            tokens_P, elements = tokens_BT[row, : len(text)], self.limits.head_elements
            scorers = [
                PromptScorer(request.extra, request.params, tokens_P) for request in requests
            ]
            score_prompt(
                self.base.head, text.snapshot.weights, hidden_BTD[row], len(text), scorers, elements
            )
            for request, scorer in zip(requests, scorers, strict=True):
                request.scores = scorer.result()
            block, slot = text.slots[0]
            for other, places in groupby(text.slots[1:], key=lambda place: place[0]):
                other.cache.copy([number for _, number in places], block.cache, [slot], len(text))
        return hidden_BTD

    def _advance(self, places: Sequence[Place], columns_N: np.ndarray, hidden_ND: Tensor) -> None:
        """Sample a token for each of these rows, given the hidden state of its newest token.

        Every row takes its token before any leaves: a request that has diverged costs its
        neighbours nothing.
        """
        columns_N["position"] += 1
        rows = [row for block, slots in places for row in block.rows[slots.start : slots.stop]]
        newest = self._sample(hidden_ND, columns_N, rows)
        columns_N["token"] = [new.token for new in newest]
        start = 0
        for block, slots in places:
            block.columns_S[slots.start : slots.stop] = columns_N[start : start + len(slots)]
            start += len(slots)
        broken = dict[SampleRequest, UserError]()
        for row, new in zip(rows, newest, strict=True):
            if not math.isfinite(new.logprob):
                broken[row.request] = _diverged(row.request.snapshot)
            elif row.shaper is not None and row.shaper.failure is not None:
                broken[row.request] = row.shaper.failure
        taken = zip(rows, newest, strict=True)
        ended = [row for row, new in taken if row.request not in broken and row.take(new)]
        if ended:
            # nobody needs it: a failure is nobody's
            attempt("a cached prefix", lambda: self.rows.keep_prefixes(ended))
            self._leave(ended)
        for request, error in broken.items():
            request.fail(error)
        if broken:
            self.forget(set(broken))

    def _sample(
        self, hidden_ND: Tensor, columns_N: np.ndarray, rows: Sequence[Row]
    ) -> list[Newest]:
        """A token for every row; the logits of a few rows at a time."""
        shaping = Shaping(
            uniforms_N=uniforms(
                columns_N["seed"], columns_N["sample"], columns_N["position"].astype(np.uint64)
            ),
            temperature_N=columns_N["temperature"],
            top_k_N=columns_N["top_k"],
            top_p_N=columns_N["top_p"],
            min_p_N=columns_N["min_p"],
            tempered_N=columns_N["tempered"],
            num_top_N=columns_N["num_top"],
        )
        size = max(
            LEAST_ROWS, self.limits.head_elements // self.base.vocabulary // LEAST_ROWS * LEAST_ROWS
        )
        found, tops = list[Chosen](), dict[int, TopK]()
        for start in range(0, hidden_ND.shape[0], size):
            rows_CD = hidden_ND[start : start + size]
            if missing := -rows_CD.shape[0] % LEAST_ROWS:
                rows_CD = torch.cat([rows_CD, rows_CD.new_zeros((missing, rows_CD.shape[1]))])
            part = rows[start : start + size]
            owners = [row.request.snapshot for row in part]
            adaptations = self.mixture.adaptations(owners, 1, rows_CD.shape[0])
            logits_CV = head_logits(self.base.head, adaptations, rows_CD)[: len(part)]
            drawn_from = _shaped(logits_CV, part)
            found.append(choose(logits_CV, shaping[start : start + size], drawn_from))
            tops.update({start + row: top for row, top in found[-1].tops.items()})
        tokens = torch.cat([chosen.tokens_N for chosen in found]).tolist()
        logprobs = torch.cat([chosen.logprobs_N for chosen in found]).tolist()
        return list(map(Newest, tokens, logprobs, map(tops.get, range(len(tokens)))))

    def _tensor(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(self.base.device)


def _shaped(logits_NV: Tensor, rows: Sequence[Row]) -> ShapedRows | None:
    """The logits of rows that change theirs; None where none does."""
    shapers = {at: row.shaper for at, row in enumerate(rows) if row.shaper is not None}
    if not shapers:
        return None
    rows_M = np.array(list(shapers))
    own_MV = logits_NV[torch.from_numpy(rows_M).to(logits_NV.device)]
    return ShapedRows(rows_M, shaped(own_MV, list(shapers.values())))


def _diverged(snapshot: Snapshot) -> UserError:
    return UserError(
        "Sampling gave a log-probability that is not finite.",
        f"The weights of this snapshot (policy version {snapshot.version}) have diverged.",
        "Resume from an earlier checkpoint with a lower learning rate.",
    )


def _columns(places: Sequence[Place], multiple_of: int = 1) -> np.ndarray:
    """A copy of the columns of these rows; zeros behind them up to a multiple."""
    columns_N = np.zeros(round_up(sum(len(slots) for _, slots in places), multiple_of), COLUMNS)
    start = 0
    for block, slots in places:
        columns_N[start : start + len(slots)] = block.columns_S[slots.start : slots.stop]
        start += len(slots)
    return columns_N


def _owners(places: Sequence[Place]) -> list[Snapshot]:
    return [
        row.request.snapshot
        for block, slots in places
        for row in block.rows[slots.start : slots.stop]
    ]


def _texts(places: Sequence[Place]) -> tuple[list[Text], np.ndarray]:
    """What these rows have so far, each text of a snapshot once; and of every row the number of its
    text.
    """
    found: dict[tuple[Snapshot, bytes], tuple[int, Text]] = {}
    numbers: list[int] = []
    for block, slots in places:
        for slot in slots:
            row = block.rows[slot]
            snapshot = row.request.snapshot
            key = snapshot, row.request.prompt + np.array(row.tokens, np.int32).tobytes()
            if key not in found:
                found[key] = len(found), Text(row.text, snapshot)
            number, text = found[key]
            text.slots.append((block, slot))
            text.requests[row.request] = None
            numbers.append(number)
    return [text for _, text in found.values()], np.array(numbers)
