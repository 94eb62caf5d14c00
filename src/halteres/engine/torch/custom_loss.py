"""Custom losses: a client's graph, applied to one datum after the other.

A graph sees copies of one datum, and runs node after node within bounds on sizes, memory and time.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halteres.engine.checks import LossNotFinite
from halteres.engine.loss_graphs import check_custom, returned
from halteres.engine.protocol import CustomLoss
from halteres.engine.torch.graph_operations import Call
from halteres.engine.torch.losses import Value
from halteres.engine.torch.micro_batches import MicroBatch
from halteres.errors import InvalidData, boundary

MAX_ELEMENTS = 1 << 23  # of one tensor
MAX_DIMENSIONS = 8
MAX_HELD_BYTES = 1 << 29  # of all results of one datum
MAX_MOVED_BYTES = 1 << 32  # read and written for one datum; a few seconds on one core
_SORTING = frozenset({"sort", "argsort", "topk", "median", "nanmedian", "quantile"})
_SORT_COST = 16
_PRODUCTS = frozenset({"matmul", "mm", "mv", "bmm", "dot", "outer"})
_FLOPS_PER_BYTE = 8


class Program:
    """A checked graph: the nodes, and which of their results are the loss and the metrics."""

    def __init__(self, custom: CustomLoss) -> None:
        self._nodes = check_custom(custom)
        self.loss, self.metrics = returned(self._nodes[-1])

    def run(self, inputs: Sequence[Tensor], where: str, deadline: float) -> Mapping[str, Any]:
        """Every node's result by its name; `where` begins the sentence of an error.

        `inputs` are on the CPU, in the graph's order; the deadline is of `time.monotonic`.
        """
        values: dict[str, Any] = {}
        meter, remaining = _Meter(deadline), iter(inputs)
        for node in self._nodes[:-1]:
            if node.op == "placeholder":
                values[node.name] = next(remaining)
            else:
                with boundary(InvalidData, f"{where}: node '{node.name}' ({node.target})"):
                    call = Call.of(node, values)
                    meter.measure(call)
                    values[node.name] = call.made()
        return values


@dataclass(slots=True)
class _Meter:
    """What the graph has used of a datum's bounds."""

    deadline: float
    held: int = 0
    moved: int = 0

    def measure(self, call: Call) -> None:
        """Refuse a call before it is made."""
        if time.monotonic() > self.deadline:
            raise ValueError("the custom loss takes too long")
        given = call.given
        if call.target == "getattr" or not (given or call.makes):
            return
        made = call.foreseen()
        for shape, _ in made:
            if math.prod(shape) > MAX_ELEMENTS or len(shape) > MAX_DIMENSIONS:
                raise ValueError(
                    f"a tensor of shape {list(shape)[:MAX_DIMENSIONS]} is too large: {MAX_ELEMENTS} elements in at "
                    f"most {MAX_DIMENSIONS} dimensions are allowed"
                )
        read = sum(one.numel() * one.element_size() for one in given)
        written = sum(math.prod(shape) * size for shape, size in made)
        self.held += written
        self.moved += (read + written) * (_SORT_COST if call.kind in _SORTING else 1)
        if call.kind in _PRODUCTS and given[0].ndim:
            self.moved += sum(math.prod(shape) for shape, _ in made) * given[0].shape[-1] // _FLOPS_PER_BYTE
        if self.held > MAX_HELD_BYTES or self.moved > MAX_MOVED_BYTES:
            raise ValueError(f"the graph needs more than {MAX_HELD_BYTES >> 20} MiB for one datum, or reads too much")


SECONDS = 60.0  # what a request may spend in its graph
_NOTHING_COUNTS = "Nothing of this request was accumulated."


class CustomObjective:
    """A custom loss of one request."""

    def __init__(self, custom: CustomLoss) -> None:
        self._program = Program(custom)
        self._names = [name for name, _ in custom.inputs[1:]]
        self._left_s = SECONDS

    def __call__(self, logprobs: Tensor, batch: MicroBatch, gradient: bool) -> Generator[None, None, Value]:
        """The value for log-probabilities of B x T, or B x T x K; others get their turn between datums."""
        found = torch.zeros_like(logprobs) if gradient else None
        total, metrics = 0.0, Counter[str]()
        for row, example in enumerate(batch.examples):
            start, where, length = time.monotonic(), f"Datum {example.index}", len(example)
            own = logprobs[row, :length].detach().cpu().clone().requires_grad_(gradient)
            with torch.set_grad_enabled(gradient):
                inputs = [torch.from_numpy(example.inputs[name].copy()) for name in self._names]
                values = self._program.run([own, *inputs], where, start + self._left_s)
                loss = self._loss(values, where)
                metrics.update(self._metrics(values, where))
                if found is not None:
                    found[row, :length] = _gradient(loss, own, where).to(found)
            total += float(loss.detach())
            self._left_s -= time.monotonic() - start
            yield
        return Value(total, found, dict(metrics))

    def _loss(self, values: Mapping[str, Any], where: str) -> Tensor:
        loss, node = values[self._program.loss], f"node '{self._program.loss}'"
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            is_ = f"{loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InvalidData(f"{where}: the loss, {node}, is no scalar.", f"It is {is_}.", "Sum it.")
        if not bool(torch.isfinite(loss.detach())):
            raise LossNotFinite(
                f"{where}: the custom loss, {node}, is not finite.",
                f"It is {float(loss.detach())}. {_NOTHING_COUNTS}",
                "Look for a logarithm of 0, a division by 0 or an overflowing exponential in it.",
            )
        return loss

    def _metrics(self, values: Mapping[str, Any], where: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for key, name in self._program.metrics.items():
            value = values[name]
            if not isinstance(value, int | float | Tensor) or (
                isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex())
            ):
                raise InvalidData(
                    f"{where}: the metric '{key}', node '{name}', is no scalar.", next="Sum or average it."
                )
            found[key] = float(value.detach() if isinstance(value, Tensor) else value)
        return found


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
