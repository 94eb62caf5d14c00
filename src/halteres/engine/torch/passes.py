"""Forward and forward-backward passes.

A pass leads from checked datums to log-probabilities in their order, one micro-batch at a time,
alone or together with those of other adapters' passes: end to end on one axis, where each keeps the
bits that it has alone.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from halteres.engine.checks import complete_loss, out_of_memory
from halteres.engine.connection import Failure, decode, encode, packed, unpacked
from halteres.engine.protocol import Array, Datum, LossSpec, ModelInfo, PassResult
from halteres.engine.torch.adapter import Adapter, Lora, LoraWeights
from halteres.engine.torch.attention import Causal
from halteres.engine.torch.limits import PassBudget, is_out_of_memory, let_go
from halteres.engine.torch.losses import LOSSES, PerToken, Value
from halteres.engine.torch.micro_batches import Example, MicroBatch, planned, read_examples
from halteres.engine.torch.model import Attention, BaseModel, Grid, Heads
from halteres.engine.torch.projections import Projection, target_logprobs
from halteres.engine.torch.ranks import Ranks
from halteres.engine.torch.trie import joins, target_cells, trie_attention
from halteres.errors import HalteresError, ServerError, boundary

LEAST_TOKENS = 128  # of a micro-batch: the matmuls of smaller ones take longer for each token
SLACK = 0.1  # more than an even share, since sequences are not divided

log = logging.getLogger(__name__)


class Objective(Protocol):
    """What a pass makes of log-probabilities; `PerToken` is one."""

    def value(self, logprobs: Tensor, batch: MicroBatch, gradient: bool) -> Value:
        """Of a micro-batch; with its gradient if that is asked for."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a micro-batch; the adapter has its gradient."""

    logprobs: Tensor
    value: Value


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A micro-batch that is to be computed: by itself, or before with those of other adapters."""

    base: BaseModel
    budget: PassBudget
    adapter: Adapter
    batch: MicroBatch
    objective: Objective
    forward_only: bool
    outcome: Outcome | HalteresError | None = None  # once it was computed

    def fits(self, others: Sequence[PendingBatch], tokens: int) -> bool:
        """It may be computed with these, up to so many tokens; without others it always may."""
        alike = all(other.forward_only == self.forward_only for other in others)
        return alike and sum(other.batch.size for other in others) + self.batch.size <= tokens

    def settle(self) -> Outcome:
        """Its outcome, computed now if it was not before."""
        if self.outcome is None:
            gradient = not self.forward_only
            with torch.set_grad_enabled(gradient):
                found = self.logprobs()
            value = self.objective.value(found.detach(), self.batch, gradient)
            self.outcome = Outcome(found.detach(), value)
            _backward([self], [found], [self.outcome])
        if isinstance(self.outcome, HalteresError):
            raise self.outcome
        return self.outcome

    def logprobs(self) -> Tensor:
        """Of every target, shaped as they are."""
        base, batch = self.base, self.batch
        tokens_N, positions_N = _tokens_and_positions(batch, base)
        if batch.trie is None:
            grid = Grid.padded(base, batch.rows, batch.length)
            attention: Attention = Causal(grid)
        else:
            grid, attention = Grid.single(positions_N), trie_attention([batch.trie], base)
        recompute = self.budget.computes_again(batch.size)
        return self.logprobs_of(
            base.hidden_states(self.adapter.weights, tokens_N, grid, attention, recompute=recompute)
        )

    def logprobs_of(self, hidden_ND: Tensor) -> Tensor:
        """Of every target, shaped as they are, given the hidden states; what examples share is
        computed once.
        """
        base, batch, lora, elements = (
            self.base,
            self.batch,
            self.adapter.weights,
            self.budget.head_elements,
        )
        expected_N, expected_P = None, None
        if torch.is_grad_enabled() and batch.targets.dim() == 2:  # tokens with one target each
            expected_N = batch.weighted().view(-1)
        if batch.trie is None:
            targets_NK = batch.targets.flatten(0, 1)
            found_NK = target_logprobs(base.head, lora, hidden_ND, targets_NK, elements, expected_N)
            return found_NK.view_as(batch.targets)
        arrays = target_cells(
            batch.trie, [example.targets for example in batch.examples], batch.length
        )
        rows_P, targets_P, cells_BT = (torch.from_numpy(a).to(base.device) for a in arrays)
        if expected_N is not None:
            expected_P = torch.zeros(len(rows_P), dtype=torch.bool, device=base.device)
            expected_P[cells_BT.view(-1)[expected_N]] = True
        hidden_PD = hidden_ND.index_select(0, rows_P)
        found_P = target_logprobs(base.head, lora, hidden_PD, targets_P, elements, expected_P)
        return found_P.index_select(0, cells_BT.view(-1)).view_as(batch.targets)


def compute_together(pending: Sequence[PendingBatch]) -> None:
    """Micro-batches of different adapters that fit together. A loss that fails is the outcome of
    its own alone.

    Whatever else raises here has changed no adapter, and left every one without an outcome.
    """
    first = pending[0]
    base, gradient = first.base, not first.forward_only
    axis = JointAxis(base, [one.batch for one in pending])
    adaptations = _joint(
        [(span, one.adapter.weights) for span, one in zip(axis.spans, pending, strict=True)]
    )
    with torch.set_grad_enabled(gradient):
        grid = Grid.single(axis.positions_N)
        recompute = first.budget.computes_again(len(axis.tokens_N))
        hidden_ND = base.hidden_states(adaptations, axis.tokens_N, grid, axis, recompute=recompute)
        found = [
            one.logprobs_of(own_ND)
            for one, own_ND in zip(pending, axis.own(hidden_ND), strict=True)
        ]
    outcomes: list[Outcome | HalteresError] = []
    for one, logprobs in zip(pending, found, strict=True):
        try:
            outcomes.append(
                Outcome(
                    logprobs.detach(), one.objective.value(logprobs.detach(), one.batch, gradient)
                )
            )
        except HalteresError as failure:
            outcomes.append(failure)
    _backward(pending, found, outcomes)
    for one, outcome in zip(pending, outcomes, strict=True):
        one.outcome = outcome


def _backward(
    pending: Sequence[PendingBatch],
    found: Sequence[Tensor],
    outcomes: Sequence[Outcome | HalteresError],
) -> None:
    """Add the gradients of those that have one to their adapters', once all are there: none if
    memory ends before.
    """
    outputs, gradients, leaves = list[Tensor](), list[Tensor](), list[Tensor]()
    for one, logprobs, outcome in zip(pending, found, outcomes, strict=True):
        if isinstance(outcome, Outcome) and outcome.value.gradient is not None:
            outputs.append(logprobs)
            gradients.append(outcome.value.gradient)
            leaves += [tensor for lora in one.adapter.weights.values() for tensor in lora.tensors]
    if outputs:
        sums = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
        for leaf, gradient in zip(leaves, sums, strict=True):
            if leaf.grad is not None and gradient is not None:  # pyright: ignore[reportUnnecessaryComparison]
                leaf.grad.add_(gradient)


class Part(msgspec.Struct):
    """What one rank has computed of a pass; a trainer of one process is one rank."""

    logprobs: dict[int, Array] = {}  # by the number of the datum
    metrics: list[tuple[int, dict[str, float]]] = []  # by the place of the micro-batch in the plan
    failure: tuple[int, Failure] | None = None  # at which place it ended, and why

    def add(self, place: int, batch: MicroBatch, outcome: Outcome) -> None:
        """A micro-batch was computed."""
        for one, row in zip(batch.examples, outcome.logprobs.cpu().numpy(), strict=True):
            self.logprobs[one.index] = Array(
                dtype="float32", shape=one.targets.shape, data=row[: len(one)].tobytes()
            )
        self.metrics.append((place, {"loss:sum": outcome.value.total, **outcome.value.metrics}))


def run_pass(
    base: BaseModel,
    info: ModelInfo,
    adapter: Adapter,
    data: tuple[Datum, ...],
    loss: LossSpec,
    budget: PassBudget,
    *,
    forward_only: bool,
    ranks: Ranks | None = None,
) -> Generator[PendingBatch | None, None, PassResult]:
    """Yields between micro-batches, so that others get their turn; nothing counts unless the whole
    pass succeeds.

    What it yields before a micro-batch may be computed with others' (`compute_together`) before it
    goes on. One that finds no memory is tried again in halves, and those after it, also of later
    passes, are no larger.

    Of several ranks each computes every N-th micro-batch of one plan; what failed on one of them
    has failed on all.

    Raises:
        InvalidData: unknown loss or setting, or an unusable datum.
        LossNotFinite: the first token whose loss is NaN or infinite, by datum and position.
    """
    examples = read_examples(data, loss, info)
    objective = PerToken(LOSSES[loss.name], complete_loss(loss))
    adapter.begin_pass()
    work, part = _Work(base, budget, adapter, objective, forward_only), Part()
    if ranks is None:
        plan = planned(examples, budget.tokens)
        yield from work.compute(list(enumerate(plan)), part)
        parts = [part]
    else:
        plan = planned(examples, tokens_each(examples, budget.planned_tokens, ranks.size))
        if ranks.shard:
            yield from work.compute_in_step(plan, part, ranks)
        else:
            own = list(enumerate(plan))[ranks.rank :: ranks.size]
            yield from work.compute_or_fail(own, part)
        parts = [decode(one, type=Part) for one in ranks.exchange(encode(part))]
        _raise_first(parts)
        if not forward_only:
            ranks.sum(adapter.pass_gradient)
    if not forward_only:
        adapter.end_pass()
    logprobs = {index: found for one in parts for index, found in one.logprobs.items()}
    found = sorted((pair for one in parts for pair in one.metrics), key=lambda pair: pair[0])
    counts = {"loss:sum": 0.0, "num_tokens:sum": float(sum(map(len, examples)))}
    return PassResult(
        logprobs=tuple(logprobs[index] for index in range(len(examples))),
        metrics=_merged([counts, *(metrics for _, metrics in found)], len(examples)),
    )


def tokens_each(examples: Sequence[Example], tokens: int, ranks: int) -> int:
    """Tokens of a micro-batch, at most `tokens`, of which every rank gets equally many."""
    if ranks == 1:
        return tokens
    total = sum(map(len, examples))
    rounds = -(-total // (ranks * tokens))
    even = int(total / (ranks * rounds) * (1 + SLACK))
    return min(tokens, max(LEAST_TOKENS, even))


def _raise_first(parts: Sequence[Part]) -> None:
    """Raise what failed first in the order of the plan, which is what one process would raise."""
    failures = [part.failure for part in parts if part.failure is not None]
    if failures:
        raise unpacked(min(failures, key=lambda pair: pair[0])[1])


Planned = tuple[int, tuple[Example, ...]]
"""The place of a micro-batch in the plan, and its examples."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What all micro-batches of a pass have in common."""

    base: BaseModel
    budget: PassBudget
    adapter: Adapter
    objective: PerToken
    forward_only: bool

    def compute(
        self, plan: Sequence[Planned], part: Part
    ) -> Generator[PendingBatch | None, None, None]:
        """Micro-batch after micro-batch, added to `part`."""
        waiting = deque(plan)
        while waiting:
            place, examples = waiting.popleft()
            yield from self._compute_one(place, examples, part, waiting)

    def compute_or_fail(
        self, plan: Sequence[Planned], part: Part
    ) -> Generator[PendingBatch | None, None, None]:
        """As `compute`; a failure becomes part of `part`, for the other ranks to learn of it."""
        waiting, place = deque(plan), 0
        try:
            with boundary(ServerError, "forward_backward"):
                while waiting:
                    place, examples = waiting.popleft()
                    yield from self._compute_one(place, examples, part, waiting)
        except HalteresError as error:
            failure = error
            if is_out_of_memory(error.__cause__):
                failure = out_of_memory("forward_backward", str(error.__cause__))
            part.failure = place, packed(failure)

    def _compute_one(
        self, place: int, examples: tuple[Example, ...], part: Part, waiting: deque[Planned]
    ) -> Generator[PendingBatch | None, None, None]:
        """One that is too large, or finds no memory, is waiting again, in parts if it has them."""
        batch = MicroBatch.of(examples, self.base.device)
        if batch.rows > 1 and batch.size > self.budget.tokens:
            # planned before memory was found to end
            smaller = planned(examples, self.budget.tokens)
            waiting.extendleft((place, one) for one in reversed(smaller))
            return
        outcome = yield from _outcome(self._pending(batch, self.objective))
        if outcome is None:
            waiting.appendleft((place, examples))
        else:
            part.add(place, batch, outcome)

    def compute_in_step(
        self, plan: Sequence[tuple[Example, ...]], part: Part, ranks: Ranks
    ) -> Generator[PendingBatch | None, None, None]:
        """Layer by layer with the other ranks, which have parts of its weights. So every rank
        computes equally many micro-batches, forward and backward; one that is not its own, or
        comes after a failure, counts nothing.
        """
        for first in range(0, len(plan), ranks.size):
            yield None
            place = first + ranks.rank
            is_own = place < len(plan) and part.failure is None
            examples = plan[min(place, len(plan) - 1)]
            objective = _InStep(self.objective, counts=is_own)
            try:
                batch = MicroBatch.of(examples, self.base.device)
                outcome = self._pending(batch, objective).settle()
                if objective.failure is not None:
                    part.failure = place, packed(objective.failure)
                elif is_own:
                    part.add(place, batch, outcome)
            except Exception as error:  # noqa: BLE001 - the others wait for this rank
                ranks.end(
                    f"Rank {ranks.rank} failed within a micro-batch of {len(examples)} datums.",
                    f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(".") + ".",
                )

    def _pending(self, batch: MicroBatch, objective: Objective) -> PendingBatch:
        return PendingBatch(
            self.base, self.budget, self.adapter, batch, objective, self.forward_only
        )


@dataclass(slots=True)
class _InStep:
    """A loss whose gradient is there whatever happens: 0 where nothing counts."""

    inner: Objective
    counts: bool
    failure: HalteresError | None = None

    def value(self, logprobs: Tensor, batch: MicroBatch, gradient: bool) -> Value:
        """See `Objective`."""
        if self.counts:
            try:
                return self.inner.value(logprobs, batch, gradient)
            except HalteresError as failure:
                self.failure = failure
        nothing = None
        if gradient:
            nothing = torch.zeros_like(logprobs)
        return Value(0.0, nothing)


def _outcome(pending: PendingBatch) -> Generator[PendingBatch | None, None, Outcome | None]:
    """Of one micro-batch; None: it found no memory, and the budget is smaller now."""
    batch, budget = pending.batch, pending.budget
    try:
        yield pending
        return pending.settle()
    except Exception as error:
        if not is_out_of_memory(error) or not budget.shrink(batch.size, batch.rows):
            raise
    let_go()
    then = "layer by layer" if batch.rows == 1 else f"in parts of {budget.tokens} tokens"
    log.warning("A micro-batch of %d tokens found no memory; it is computed %s.", batch.size, then)
    return None


def _merged(found: Sequence[Mapping[str, float]], num_datums: int) -> dict[str, float]:
    """Micro-batches' metrics as one, by the reduction that a key ends with."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for metrics in found:
        for key, value in metrics.items():
            values[key].append(value)
    merged = {key: max(all_) if key.endswith(":max") else sum(all_) for key, all_ in values.items()}
    return {
        key: value / num_datums if key.endswith(":mean") else value for key, value in merged.items()
    }


def _tokens_and_positions(batch: MicroBatch, base: BaseModel) -> tuple[Tensor, Tensor]:
    if batch.trie is None:
        return batch.tokens_N, torch.arange(batch.length, device=base.device).repeat(batch.rows)
    tokens_N, positions_N = (
        torch.from_numpy(batch.trie.tokens_N),
        torch.from_numpy(batch.trie.positions_N),
    )
    return tokens_N.to(base.device), positions_N.to(base.device)


class JointAxis:
    """All tokens of several micro-batches; those that are attended together lie side by side."""

    def __init__(self, base: BaseModel, batches: Sequence[MicroBatch]) -> None:
        groups: dict[object, list[int]] = {}
        for i, batch in enumerate(batches):
            if batch.trie is None:
                groups.setdefault(batch.length, []).append(i)
            else:
                groups.setdefault("tries" if joins(batch.trie, base) else ("alone", i), []).append(
                    i
                )
        tokens, positions = list[Tensor](), list[Tensor]()
        self.spans, start = [slice(0)] * len(batches), 0  # of each micro-batch
        self.attentions: list[tuple[int, Attention]] = []  # of so many tokens each
        for members in groups.values():
            before = start
            for i in members:
                own_tokens, own_positions = _tokens_and_positions(batches[i], base)
                tokens.append(own_tokens)
                positions.append(own_positions)
                self.spans[i] = slice(start, start + len(own_tokens))
                start = self.spans[i].stop
            tries = [trie for i in members if (trie := batches[i].trie) is not None]
            attention = (
                trie_attention(tries, base)
                if tries
                else _PaddedRows(base, [batches[i] for i in members])
            )
            self.attentions.append((start - before, attention))
        self.tokens_N, self.positions_N = torch.cat(tokens), torch.cat(positions)

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """See `Attention`; every sequence sees itself."""
        key_heads = heads.k_XTW.shape[0] // len(self.tokens_N)
        sizes = [size * key_heads for size, _ in self.attentions]
        own = zip(
            heads.q_XGTW.split(sizes),
            heads.k_XTW.split(sizes),
            heads.v_XTW.split(sizes),
            strict=True,
        )
        found = [
            attend(layer, Heads(*parts))
            for (_, attend), parts in zip(self.attentions, own, strict=True)
        ]
        return torch.cat(found) if len(found) > 1 else found[0]

    def own(self, rows_ND: Tensor) -> list[Tensor]:
        """Each micro-batch's rows."""
        ordered = sorted(self.spans, key=lambda span: span.start)
        parts = rows_ND.split([span.stop - span.start for span in ordered])
        by_start = {span.start: part for span, part in zip(ordered, parts, strict=True)}
        return [by_start[span.start] for span in self.spans]


class _PaddedRows:
    """Attention of padded micro-batches of one length, given heads token by token."""

    def __init__(self, base: BaseModel, batches: Sequence[MicroBatch]) -> None:
        self._rows, self._length = sum(batch.rows for batch in batches), batches[0].length
        self._causal = Causal(Grid.padded(base, self._rows, self._length))

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        return self._causal(
            layer, Heads(self._laid(heads.q_XGTW), self._laid(heads.k_XTW), self._laid(heads.v_XTW))
        )

    def _laid(self, tokens: Tensor) -> Tensor:
        """From B * T * K (x G) x 1 x W to B * K (x G) x T x W."""
        groups, width = tokens.shape[1:-2], tokens.shape[-1]
        laid = tokens.view(self._rows, self._length, -1, *groups, width).movedim(1, -2)
        return laid.reshape(-1, *groups, self._length, width)


def _joint(parts: Sequence[tuple[slice, LoraWeights]]) -> dict[Projection, _JointProjection]:
    """What is added to the axis, each span of which has an adapter of its own."""
    found: dict[Projection, _JointProjection] = {}
    for span, weights in parts:
        for projection, lora in weights.items():
            found.setdefault(projection, _JointProjection([])).parts.append((span, lora))
    return found


@dataclass(frozen=True, slots=True)
class _JointProjection:
    """See `Adaptation`."""

    parts: list[tuple[slice, Lora]]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for _, lora in self.parts for tensor in lora.tensors)

    def add_to(self, y_NE: Tensor, x_ND: Tensor) -> Tensor:
        return torch.cat(
            [lora.add_to(y_NE[span], x_ND[span]).view(-1) for span, lora in self.parts]
        )

    def gradients(
        self, dy_NE: Tensor, x_ND: Tensor, h: Tensor, dx_ND: Tensor | None
    ) -> tuple[Tensor, ...]:
        sizes = [(span.stop - span.start) * lora.a_RD.shape[0] for span, lora in self.parts]
        found: list[Tensor] = []
        for (span, lora), own in zip(self.parts, h.split(sizes), strict=True):
            h_NR, own_dx_ND = (
                own.view(-1, lora.a_RD.shape[0]),
                None if dx_ND is None else dx_ND[span],
            )
            found += lora.gradients(dy_NE[span], x_ND[span], h_NR, own_dx_ND)
        return tuple(found)
