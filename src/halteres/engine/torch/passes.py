"""Forward and forward-backward passes.

Owns: a pass from checked datums to log-probabilities in their order, one micro-batch at a time.
Never: applies a gradient; mixes adapters (several in one pass: a later version).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import torch
from torch import Tensor

from halteres.engine.checks import LossNotFinite
from halteres.engine.protocol import Datum, ModelInfo, PassResult
from halteres.engine.torch.adapter import Adapter
from halteres.engine.torch.attention import Causal
from halteres.engine.torch.data import Example, MicroBatch, plan, read_examples
from halteres.engine.torch.forward import hidden_states, target_logprobs
from halteres.engine.torch.heads import Grid
from halteres.engine.torch.limits import Limits
from halteres.engine.torch.losses import Loss, find_loss
from halteres.engine.torch.model import BaseModel


def run_pass(
    base: BaseModel,
    info: ModelInfo,
    adapter: Adapter,
    data: tuple[Datum, ...],
    loss: str,
    limits: Limits,
    *,
    forward_only: bool,
) -> Generator[None, None, PassResult]:
    """Yields between micro-batches, so that others get their turn; nothing counts unless the whole pass succeeds.

    Raises:
        InvalidData: unknown loss, or an unusable datum.
        LossNotFinite: the first token whose loss is NaN or infinite, by datum and position.
    """
    examples = read_examples(data, loss, info)
    formula = find_loss(loss)
    logprobs, total = [b""] * len(examples), 0.0
    adapter.begin_pass()
    for indices in plan([len(example) for example in examples], limits.pass_tokens):
        batch = MicroBatch.of([examples[i] for i in indices], base.device)
        with torch.set_grad_enabled(not forward_only):
            logprobs_N, loss_N = _micro_batch(base, adapter, batch, formula, limits)
        _check_finite(loss_N, batch, indices)
        if not forward_only:
            loss_N.sum().backward()
        rows = logprobs_N.detach().view(batch.rows, batch.length).cpu().numpy()
        for row, i in zip(rows, indices, strict=True):
            logprobs[i] = row[: len(examples[i])].tobytes()
        total += float(loss_N.detach().double().sum())
        yield
    if not forward_only:
        adapter.end_pass()
    return PassResult(logprobs=tuple(logprobs), metrics=_metrics(examples, formula, total))


def _micro_batch(
    base: BaseModel, adapter: Adapter, batch: MicroBatch, loss: Loss, limits: Limits
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and loss per token."""
    grid = Grid.padded(base, batch.rows, batch.length)
    hidden_ND = hidden_states(base, adapter.weights, batch.tokens_N, grid, Causal(grid))
    logprobs_N = target_logprobs(base, adapter.weights, hidden_ND, batch.targets_N, limits.head_elements)
    return logprobs_N, loss.per_token(logprobs_N, batch.inputs)


def _check_finite(loss_N: Tensor, batch: MicroBatch, indices: Sequence[int]) -> None:
    finite_N = torch.isfinite(loss_N.detach())
    if bool(finite_N.all()):
        return
    row, position = divmod(int((~finite_N).nonzero()[0]), batch.length)
    raise LossNotFinite(
        f"The loss is not finite at datum {indices[row]}, position {position}.",
        "An importance ratio exp(logprob - sampler's logprob) overflowed, or the adapter's weights have diverged. "
        "Nothing of this request was accumulated.",
        "Check that 'logprobs' belong to these tokens; lower the learning rate and resume from a checkpoint.",
    )


def _metrics(examples: Sequence[Example], formula: Loss, total: float) -> dict[str, float]:
    return {
        "loss:sum": total,
        "num_tokens:sum": float(sum(map(len, examples))),
        "num_loss_tokens:sum": float(sum(int(np.count_nonzero(e.inputs[formula.scale])) for e in examples)),
    }
