"""Custom losses: a client's graph, applied to one datum after the other.

Owns: what a graph is given and what it must return; the time that a request may spend in it.
Never: knows its operations (`graph` does); lets it see another datum, or anything but copies.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halteres.engine.checks import LossNotFinite
from halteres.engine.protocol import CustomLoss
from halteres.engine.torch.data import Example, MicroBatch
from halteres.engine.torch.graphs.interpreter import Program
from halteres.engine.torch.objectives import Value, Valuing
from halteres.errors import InvalidData, boundary

SECONDS = 60.0
"""What a request may spend in its graph."""

_NOTHING_COUNTS = "Nothing of this request was accumulated."


class CustomObjective:
    """A custom loss of one request; see `Objective`."""

    def __init__(self, custom: CustomLoss) -> None:
        self._program = Program.of(custom)
        self._names = [name for name, _ in custom.inputs[1:]]
        self._left_s = SECONDS

    def __call__(self, logprobs: Tensor, batch: MicroBatch, gradient: bool) -> Valuing:
        """See `Objective`; a datum is a slice."""
        found = torch.zeros_like(logprobs) if gradient else None
        total, metrics = 0.0, Counter[str]()
        for row, example in enumerate(batch.examples):
            start = time.monotonic()
            alone = logprobs[row, : len(example)].detach().cpu().clone().requires_grad_(gradient)
            with torch.set_grad_enabled(gradient):
                loss, of_datum = self._run(alone, example, start + self._left_s)
                if found is not None:
                    found[row, : len(example)] = _gradient(loss, alone, self._where(example)).to(found)
            total += float(loss.detach())
            metrics.update(of_datum)
            self._left_s -= time.monotonic() - start
            yield
        return Value(total, found, dict(metrics))

    def _run(self, logprobs: Tensor, example: Example, deadline: float) -> tuple[Tensor, dict[str, float]]:
        where = self._where(example)
        inputs = [torch.from_numpy(example.inputs[name].copy()) for name in self._names]
        values = self._program.run([logprobs, *inputs], where, deadline)
        return self._loss(values, where), self._metrics(values, where)

    def _loss(self, values: Mapping[str, Any], where: str) -> Tensor:
        loss = values[self._program.loss]
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            is_ = f"{loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InvalidData(
                f"{where}: the loss, node '{self._program.loss}', is no scalar.", f"It is {is_}.", "Sum it."
            )
        if not bool(torch.isfinite(loss.detach())):
            raise LossNotFinite(
                f"{where}: the custom loss, node '{self._program.loss}', is not finite.",
                f"It is {float(loss.detach())}. {_NOTHING_COUNTS}",
                "Look for a logarithm of 0, a division by 0 or an overflowing exponential in it.",
            )
        return loss

    def _metrics(self, values: Mapping[str, Any], where: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for key, name in self._program.metrics.items():
            value = values[name]
            if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
                found[key] = float(value.detach())
            elif isinstance(value, int | float):
                found[key] = float(value)
            else:
                raise InvalidData(
                    f"{where}: the metric '{key}', node '{name}', is no scalar.", next="Sum or average it."
                )
        return found

    @staticmethod
    def _where(example: Example) -> str:
        return f"Datum {example.index}"


def _gradient(loss: Tensor, logprobs: Tensor, where: str) -> Tensor:
    if not loss.requires_grad:
        raise InvalidData(
            f"{where}: the custom loss does not depend on logprobs.",
            "Nothing could be learnt from it.",
            "Compute it from logprobs, without detach().",
        )
    with boundary(InvalidData, f"{where}: the gradient of the custom loss"):
        found = torch.autograd.grad(loss, logprobs, allow_unused=True, materialize_grads=True)[0]
    if not bool(torch.isfinite(found).all()):
        raise LossNotFinite(
            f"{where}: the gradient of the custom loss is not finite.",
            f"First at position {(~torch.isfinite(found)).nonzero()[0].tolist()[0]}. {_NOTHING_COUNTS}",
            "Look for a square root or a logarithm of 0 in it, also behind a where.",
        )
    return found
