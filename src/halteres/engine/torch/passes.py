"""Forward and forward-backward passes.

Owns: a pass from checked datums to log-probabilities in their order, one micro-batch at a time.
Never: applies a gradient; mixes adapters (several in one pass: a later version); knows a formula.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence

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
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.losses import LOSSES
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.objectives import Objective, PerToken
from halteres.engine.torch.trie import Asked, Trie
from halteres.engine.torch.trie_attention import TrieAttention


def run_pass(
    base: BaseModel,
    info: ModelInfo,
    adapter: Adapter,
    data: tuple[Datum, ...],
    loss: LossSpec,
    limits: Limits,
    *,
    forward_only: bool,
) -> Generator[None, None, PassResult]:
    """Yields between micro-batches, so that others get their turn; nothing counts unless the whole pass succeeds.

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
        with torch.set_grad_enabled(not forward_only):
            found = _logprobs(base, adapter, batch, limits)
        value = yield from objective(found.detach(), batch, not forward_only)
        if value.gradient is not None:
            found.backward(value.gradient)
        logprobs |= _by_datum(found.detach(), batch.examples)
        metrics.append({"loss:sum": value.total, **value.metrics})
        yield
    if not forward_only:
        adapter.end_pass()
    ordered = tuple(logprobs[index] for index in range(len(examples)))
    return PassResult(logprobs=ordered, metrics=_merged(metrics, len(examples)))


def _objective(loss: LossSpec) -> Objective:
    return CustomObjective(loss.custom) if loss.custom is not None else PerToken(LOSSES[loss.name], settled(loss))


def _logprobs(base: BaseModel, adapter: Adapter, batch: MicroBatch, limits: Limits) -> Tensor:
    """Of every target, shaped as they are."""
    if batch.trie is not None:
        return _shared_logprobs(base, adapter, batch, batch.trie, limits)
    grid = Grid.padded(base, batch.rows, batch.length)
    hidden_ND = hidden_states(base, adapter.weights, batch.tokens_N, grid, Causal(grid))
    targets_NK, expected_N = batch.targets.flatten(0, 1), _expected(batch)
    found_NK = target_logprobs(base, adapter.weights, hidden_ND, targets_NK, limits.head_elements, expected_N)
    return found_NK.view_as(batch.targets)


def _shared_logprobs(base: BaseModel, adapter: Adapter, batch: MicroBatch, trie: Trie, limits: Limits) -> Tensor:
    """The same, with what the examples share computed once."""
    asked = Asked.of(trie, [example.targets for example in batch.examples], batch.length)
    arrays = (trie.tokens_N, trie.positions_N, asked.rows_P, asked.targets_P, asked.cells_BT)
    tokens_N, positions_N, rows_P, targets_P, cells_BT = (torch.from_numpy(a).to(base.device) for a in arrays)
    grid, attention = Grid.single(positions_N), TrieAttention(trie, base, base.device)
    hidden_ND = hidden_states(base, adapter.weights, tokens_N, grid, attention)
    hidden_PD = hidden_ND.index_select(0, rows_P)
    expected_N = _expected(batch)
    if expected_N is not None:
        expected_P = torch.zeros(len(rows_P), dtype=torch.bool, device=base.device)
        expected_P[cells_BT.view(-1)[expected_N]] = True
    else:
        expected_P = None
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
