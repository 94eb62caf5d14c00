"""Forward and forward-backward passes.

Owns: a pass from checked datums to log-probabilities in their order, one micro-batch at a time, alone or together with
those of other adapters' passes.
Never: applies a gradient; knows a formula.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halteres.engine.losses import settled
from halteres.engine.protocol import Array, Datum, LossSpec, ModelInfo, PassResult
from halteres.engine.torch.adapter import Adapter
from halteres.engine.torch.attention import Causal
from halteres.engine.torch.data import Example, MicroBatch, micro_batches, read_examples
from halteres.engine.torch.forward import hidden_states, target_logprobs
from halteres.engine.torch.graphs.custom import CustomObjective
from halteres.engine.torch.heads import Grid
from halteres.engine.torch.joint import JointAdaptations, JointAxis
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.losses import LOSSES
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.objectives import Objective, PerToken, Value
from halteres.engine.torch.trie import Asked
from halteres.engine.torch.trie_attention import TrieAttention
from halteres.errors import HalteresError

LEAST_TOKENS = 16
"""Of a micro-batch."""


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A micro-batch that is to be computed: by itself, or before with those of other adapters."""

    base: BaseModel
    limits: Limits
    adapter: Adapter
    batch: MicroBatch
    objective: PerToken
    forward_only: bool
    outcome: Outcome | HalteresError | None = None  # once it was computed

    @property
    def size(self) -> int:
        """Tokens to be computed."""
        return self.batch.rows * self.batch.length if self.batch.trie is None else len(self.batch.trie.tokens_N)

    def fits(self, others: Sequence[PendingBatch]) -> bool:
        """It may be computed with these; without others it always may."""
        alike = all(other.forward_only == self.forward_only for other in others)
        return alike and sum(other.size for other in others) + self.size <= self.limits.pass_tokens

    @property
    def has_room(self) -> bool:
        """Others may fit."""
        return self.size + LEAST_TOKENS <= self.limits.pass_tokens

    def settle(self) -> Outcome:
        """Its outcome, computed now if it was not before.

        Raises:
            UserError: the loss cannot be computed, or is not finite.
        """
        if self.outcome is None:
            gradient = not self.forward_only
            with torch.set_grad_enabled(gradient):
                found = _logprobs(self.base, self.adapter, self.batch, self.limits)
            value = self.objective.value(found.detach(), self.batch, gradient)
            if value.gradient is not None:
                found.backward(value.gradient)
            self.outcome = Outcome(found.detach(), value)
        if isinstance(self.outcome, HalteresError):
            raise self.outcome
        return self.outcome


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a micro-batch; the adapter has its gradient."""

    logprobs: Tensor
    value: Value


def compute_together(pending: Sequence[PendingBatch]) -> None:
    """Micro-batches of different adapters that fit together. A loss that fails is the outcome of its own alone.

    Whatever else raises here has changed no adapter, and left every one without an outcome.
    """
    base, limits, gradient = pending[0].base, pending[0].limits, not pending[0].forward_only
    axis = JointAxis.of(base, [one.batch for one in pending])
    adaptations = JointAdaptations([(span, one.adapter.weights) for span, one in zip(axis.spans, pending, strict=True)])
    with torch.set_grad_enabled(gradient):
        hidden_ND = hidden_states(base, adaptations, axis.tokens_N, Grid.single(axis.positions_N), axis)
        parts = axis.own(hidden_ND)
        found = [
            _heads_logprobs(base, one.adapter, one.batch, own, limits) for one, own in zip(pending, parts, strict=True)
        ]
    outcomes: list[Outcome | HalteresError] = []
    for one, logprobs in zip(pending, found, strict=True):
        try:
            outcomes.append(Outcome(logprobs.detach(), one.objective.value(logprobs.detach(), one.batch, gradient)))
        except HalteresError as failure:
            outcomes.append(failure)
    if gradient:
        _backward(pending, found, outcomes)
    for one, outcome in zip(pending, outcomes, strict=True):
        one.outcome = outcome


def _backward(
    pending: Sequence[PendingBatch], found: Sequence[Tensor], outcomes: Sequence[Outcome | HalteresError]
) -> None:
    """Add the gradients of those that have a value to their adapters', once all are there."""
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


def run_pass(
    base: BaseModel,
    info: ModelInfo,
    adapter: Adapter,
    data: tuple[Datum, ...],
    loss: LossSpec,
    limits: Limits,
    *,
    forward_only: bool,
) -> Generator[PendingBatch | None, None, PassResult]:
    """Yields between micro-batches, so that others get their turn; nothing counts unless the whole pass succeeds.

    What it yields before a micro-batch may be computed with others' (`compute_together`) before it goes on.

    Raises:
        InvalidData: unknown loss or setting, an unusable datum, or a custom loss that fails.
        LossNotFinite: the first token whose loss is NaN or infinite, by datum and position.
    """
    examples = read_examples(data, loss, info)
    objective = _objective(loss)
    logprobs: dict[int, Array] = {}
    metrics: list[Mapping[str, float]] = [{"loss:sum": 0.0, "num_tokens:sum": float(sum(map(len, examples)))}]
    adapter.begin_pass()
    for batch in micro_batches(examples, limits.pass_tokens, base.device):
        if isinstance(objective, PerToken):
            pending = PendingBatch(base, limits, adapter, batch, objective, forward_only)
            yield pending
            outcome = pending.settle()
        else:
            outcome = yield from _custom(base, limits, adapter, batch, objective, forward_only)
            yield
        logprobs |= _by_datum(outcome.logprobs, batch.examples)
        metrics.append({"loss:sum": outcome.value.total, **outcome.value.metrics})
    if not forward_only:
        adapter.end_pass()
    ordered = tuple(logprobs[index] for index in range(len(examples)))
    return PassResult(logprobs=ordered, metrics=_merged(metrics, len(examples)))


def _custom(
    base: BaseModel, limits: Limits, adapter: Adapter, batch: MicroBatch, objective: Objective, forward_only: bool
) -> Generator[None, None, Outcome]:
    """A loss in slices of its own."""
    with torch.set_grad_enabled(not forward_only):
        found = _logprobs(base, adapter, batch, limits)
    value = yield from objective(found.detach(), batch, not forward_only)
    if value.gradient is not None:
        found.backward(value.gradient)
    return Outcome(found.detach(), value)


def _objective(loss: LossSpec) -> Objective:
    return CustomObjective(loss.custom) if loss.custom is not None else PerToken(LOSSES[loss.name], settled(loss))


def _logprobs(base: BaseModel, adapter: Adapter, batch: MicroBatch, limits: Limits) -> Tensor:
    """Of every target, shaped as they are."""
    if batch.trie is None:
        grid = Grid.padded(base, batch.rows, batch.length)
        hidden_ND = hidden_states(base, adapter.weights, batch.tokens_N, grid, Causal(grid))
    else:
        tokens_N, positions_N = (
            torch.from_numpy(a).to(base.device) for a in (batch.trie.tokens_N, batch.trie.positions_N)
        )
        attention = TrieAttention([batch.trie], base, base.device)
        hidden_ND = hidden_states(base, adapter.weights, tokens_N, Grid.single(positions_N), attention)
    return _heads_logprobs(base, adapter, batch, hidden_ND, limits)


def _heads_logprobs(base: BaseModel, adapter: Adapter, batch: MicroBatch, hidden_ND: Tensor, limits: Limits) -> Tensor:
    """The same, given the hidden states; what examples share is computed once."""
    expected_N, expected_P = _expected(batch), None
    if batch.trie is None:
        targets_NK = batch.targets.flatten(0, 1)
        found_NK = target_logprobs(base, adapter.weights, hidden_ND, targets_NK, limits.head_elements, expected_N)
        return found_NK.view_as(batch.targets)
    asked = Asked.of(batch.trie, [example.targets for example in batch.examples], batch.length)
    arrays = (asked.rows_P, asked.targets_P, asked.cells_BT)
    rows_P, targets_P, cells_BT = (torch.from_numpy(a).to(base.device) for a in arrays)
    hidden_PD = hidden_ND.index_select(0, rows_P)
    if expected_N is not None:
        expected_P = torch.zeros(len(rows_P), dtype=torch.bool, device=base.device)
        expected_P[cells_BT.view(-1)[expected_N]] = True
    found_P = target_logprobs(base, adapter.weights, hidden_PD, targets_P, limits.head_elements, expected_P)
    return found_P.index_select(0, cells_BT.view(-1)).view_as(batch.targets)


def _expected(batch: MicroBatch) -> Tensor | None:
    """Which tokens will have a gradient, if one is asked for and each has one target."""
    return batch.weighted().view(-1) if torch.is_grad_enabled() and batch.targets.dim() == 2 else None


def _by_datum(logprobs: Tensor, examples: Sequence[Example]) -> dict[int, Array]:
    rows = logprobs.cpu().numpy()
    return {
        example.index: Array(dtype="float32", shape=example.targets.shape, data=row[: len(example)].tobytes())
        for row, example in zip(rows, examples, strict=True)
    }


def _merged(found: Sequence[Mapping[str, float]], num_datums: int) -> dict[str, float]:
    """Micro-batches' metrics as one, by the reduction that a key ends with."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for metrics in found:
        for key, value in metrics.items():
            values[key].append(value)
    return {key: _reduced(key.rpartition(":")[2], several, num_datums) for key, several in values.items()}


def _reduced(reduction: str, values: Sequence[float], num_datums: int) -> float:
    if reduction == "max":
        return max(values)
    return sum(values) / (num_datums if reduction == "mean" else 1)
