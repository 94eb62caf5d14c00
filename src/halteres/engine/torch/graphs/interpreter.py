"""A custom loss's graph, run.

Owns: one node after the other; bounds on sizes, memory and time.
Never: makes a tensor before its size is known; runs anything but what `operations` lists.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halteres.engine.graphs.checked import Node, check_custom, returned
from halteres.engine.protocol import CustomLoss
from halteres.engine.torch.graphs.call import Call
from halteres.errors import InvalidData, boundary

MAX_ELEMENTS = 1 << 23  # of one tensor
MAX_DIMENSIONS = 8
MAX_HELD_BYTES = 1 << 29  # of all results of one datum
MAX_MOVED_BYTES = 1 << 32  # read and written for one datum; a few seconds on one core

_SORTING = frozenset({"sort", "argsort", "topk", "median", "nanmedian", "quantile"})
_SORT_COST = 16
_PRODUCTS = frozenset({"matmul", "mm", "mv", "bmm", "dot", "outer"})
_FLOPS_PER_BYTE = 8


@dataclass(frozen=True, slots=True)
class Program:
    """A checked graph: the nodes, and which of their results are the loss and the metrics."""

    nodes: tuple[Node, ...]
    loss: str
    metrics: Mapping[str, str]  # node by key

    @classmethod
    def of(cls, custom: CustomLoss) -> Program:
        """Ready to run.

        Raises:
            InvalidData: see `check_custom`.
        """
        nodes = check_custom(custom)
        return cls(nodes, *returned(nodes[-1]))

    def run(self, inputs: Sequence[Tensor], where: str, deadline: float) -> Mapping[str, Any]:
        """Every node's result by its name.

        Args:
            inputs: on the CPU, in the graph's order.
            where: begins the sentence of an error.
            deadline: of `time.monotonic`.

        Raises:
            InvalidData: a node failed, or the bounds were reached; the message names it.
        """
        values: dict[str, Any] = {}
        meter, given = _Meter(deadline), iter(inputs)
        for node in self.nodes[:-1]:
            if node.op == "placeholder":
                values[node.name] = next(given)
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
        """Refuse a call before it is made.

        Raises:
            ValueError: its result, or all together, would be too large.
            Whatever torch raises of arguments that do not fit.
        """
        if time.monotonic() > self.deadline:
            raise ValueError("the custom loss takes too long")
        given = call.given
        if call.target == "getattr" or not (given or call.makes):
            return
        made = call.foreseen()
        for shape, _ in made:
            _check_size(shape)
        read = sum(one.numel() * one.element_size() for one in given)
        written = sum(math.prod(shape) * size for shape, size in made)
        self.held += written
        self.moved += (read + written) * (_SORT_COST if call.kind in _SORTING else 1)
        if call.kind in _PRODUCTS and given[0].ndim:
            self.moved += sum(math.prod(shape) for shape, _ in made) * given[0].shape[-1] // _FLOPS_PER_BYTE
        if self.held > MAX_HELD_BYTES or self.moved > MAX_MOVED_BYTES:
            raise ValueError(f"the graph needs more than {MAX_HELD_BYTES >> 20} MiB for one datum, or reads too much")


def _check_size(shape: torch.Size) -> None:
    if math.prod(shape) > MAX_ELEMENTS or len(shape) > MAX_DIMENSIONS:
        raise ValueError(
            f"a tensor of shape {list(shape)[:MAX_DIMENSIONS]} is too large: {MAX_ELEMENTS} elements in at most "
            f"{MAX_DIMENSIONS} dimensions are allowed"
        )
