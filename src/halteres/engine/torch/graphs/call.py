"""One operation of a custom loss's graph: its function, its arguments, its result.

Owns: arguments decoded; what a result will be like, told before it is made by running the operation on tensors without
data ("meta").
Never: runs off the CPU, where an index out of range ends the process; decides what is too much (`graph` does).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halteres.engine.graphs.checked import Node
from halteres.engine.graphs.names import ELEMENTWISE, FACTORIES, KEYWORDS
from halteres.engine.torch.graphs.guards import Function
from halteres.engine.torch.graphs.operations import FUNCTIONS, METHODS

_GETITEM = "operator.getitem"
_WIDENING = frozenset(
    {"masked_select", "cosine_similarity", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"}
    | {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
)
"""They widen their arguments to one shape, and return no more than that."""
_AS_WIDE_AS_GIVEN = ELEMENTWISE | _WIDENING

_CPU, _META = torch.device("cpu"), torch.device("meta")
_DTYPES = {
    "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64,
    "int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
    "bool": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """One node about to be run."""

    target: str
    function: Function
    args: list[Any]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, node: Node, values: Mapping[str, Any]) -> Call:
        """Its function and arguments; `values` are the results so far.

        Raises:
            ValueError: a method of what is no tensor.
        """
        function = (METHODS if node.op == "call_method" else FUNCTIONS)[node.target]
        args = [_decoded(arg, values) for arg in node.args]
        if node.op == "call_method" and not (args and isinstance(args[0], Tensor)):
            raise ValueError("methods are called on tensors")
        kwargs = {key: _decoded(arg, values) for key, arg in node.kwargs.items() if key in KEYWORDS}
        return cls(node.target, function, args, kwargs)

    @property
    def kind(self) -> str:
        """The operation, however it was called."""
        return self.target.rpartition(".")[2]

    @property
    def makes(self) -> bool:
        """It makes a tensor out of none."""
        return self.target in FACTORIES

    @property
    def given(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [*_tensors([*self.args, *self.kwargs.values()])]

    def made(self) -> Any:
        """The result.

        Raises:
            ValueError: an integer that has become too long.
            Whatever torch raises of arguments that do not fit.
        """
        result = self.function(*self.args, **self.kwargs, **({"device": _CPU} if self.makes else {}))
        if isinstance(result, int) and abs(result) >= 2**63:
            raise ValueError("an integer grew beyond 64 bits")
        return result

    def foreseen(self) -> list[tuple[torch.Size, int]]:
        """Shapes, and bytes of one element, of what the call will make at most, nothing being made yet.

        Raises:
            Whatever torch raises of arguments that do not fit.
        """
        if self.kind in _AS_WIDE_AS_GIVEN:  # known without running anything
            shape = torch.broadcast_shapes(*(one.shape for one in self.given))
            return [(shape, max(4, *(one.element_size() for one in self.given)))]
        return [(one.shape, one.element_size()) for one in self._shadows()]

    def _shadows(self) -> list[Tensor]:
        """Tensors without data, as large as the results will be at most."""
        picks = self.target == _GETITEM
        if picks and len(self.args) > 1 and _is_mask(self.args[1]):
            return self.given[:1]
        args = [_shadow(arg, picks and i > 0) for i, arg in enumerate(self.args)]
        kwargs = {key: _shadow(arg, False) for key, arg in self.kwargs.items()}
        with torch.no_grad():
            return [*_tensors(self.function(*args, **kwargs, **({"device": _META} if self.makes else {})))]


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _shadow(value: Any, index: bool) -> Any:
    """The value, its tensors without data. An index of no dimension is a number whose value decides nothing here."""
    if isinstance(value, Tensor):
        return 0 if index and value.ndim == 0 and not _is_mask(value) else value.detach().to(_META)
    if type(value) in (list, tuple):  # torch.Size and the named results of torch are passed on whole
        return type(value)(_shadow(one, index) for one in value)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _decoded(value: Any, values: Mapping[str, Any]) -> Any:
    """An argument as its function takes it."""
    if isinstance(value, list):
        return [_decoded(one, values) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    match kind:
        case "ref":
            return values[held]
        case "tuple":
            return tuple(_decoded(one, values) for one in held)
        case "slice":
            return slice(*(_decoded(one, values) for one in held))
        case "ellipsis":
            return Ellipsis
        case "dtype":
            return _DTYPES[held]
        case "float":
            return float(held)
        case "device":
            return _CPU
        case "layout":
            return torch.strided
        case _:
            return torch.contiguous_format
