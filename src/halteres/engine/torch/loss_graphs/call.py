"""One operation of a custom loss's graph: its function, its arguments, its result.

Owns: for each name of `engine.loss_graphs.names` the one function that is called; arguments decoded; what a
result will be like, known before it is made by running the operation on tensors without data ("meta").
Never: runs off the CPU, where an index out of range ends the process; decides what is too much (`custom` does).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halteres.engine.loss_graphs.names import ELEMENTWISE, FACTORIES, KEYWORDS
from halteres.engine.loss_graphs.validation import Node
from halteres.engine.torch.loss_graphs import guards
from halteres.engine.torch.loss_graphs.guards import Function

_ELEMENTWISE: tuple[Function, ...] = (
    torch.abs, torch.acos, torch.acosh, torch.asin, torch.asinh, torch.atan, torch.atan2, torch.atanh, torch.ceil,
    torch.clamp, torch.clamp_max, torch.clamp_min, torch.clip, torch.cos, torch.cosh, torch.erf, torch.erfc,
    torch.exp, torch.exp2, torch.expm1, torch.floor, torch.frac, torch.lgamma, torch.log, torch.log10, torch.log1p,
    torch.log2, torch.logaddexp, torch.logaddexp2, torch.logit, torch.neg, torch.negative, torch.pow,
    torch.reciprocal, torch.relu, torch.round, torch.rsqrt, torch.sigmoid, torch.sign, torch.sin, torch.sinh,
    torch.sqrt, torch.square, torch.tan, torch.tanh, torch.trunc, torch.nan_to_num, torch.add, torch.sub,
    torch.subtract, torch.mul, torch.multiply, torch.div, torch.divide, torch.true_divide, torch.floor_divide,
    torch.remainder, torch.fmod, torch.maximum, torch.minimum, torch.fmax, torch.fmin, torch.hypot, torch.xlogy,
    torch.lerp, torch.eq, torch.ne, torch.gt, torch.ge, torch.lt, torch.le, torch.isnan, torch.isinf,
    torch.isfinite, torch.isclose, torch.logical_and, torch.logical_or, torch.logical_not, torch.logical_xor,
    torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor, torch.bitwise_not,
)  # fmt: skip

_REDUCTIONS: tuple[Function, ...] = (
    torch.sum, torch.mean, torch.prod, torch.amax, torch.amin, torch.max, torch.min, torch.std, torch.var,
    torch.logsumexp, torch.any, torch.all, torch.argmax, torch.argmin, torch.nansum, torch.nanmean,
    torch.count_nonzero, torch.median, torch.nanmedian, torch.quantile, torch.softmax, torch.log_softmax,
    torch.cumsum, torch.cumprod, torch.cummax, torch.cummin, torch.logcumsumexp,
)  # fmt: skip

_REARRANGING: tuple[Function, ...] = (
    torch.where, torch.gather, torch.index_select, torch.masked_fill, torch.masked_select, torch.scatter,
    torch.scatter_add, torch.index_add, torch.take, torch.topk, torch.sort, torch.argsort, torch.narrow,
    torch.select, torch.diagonal, torch.reshape, torch.flatten, torch.unflatten, torch.squeeze, torch.unsqueeze,
    torch.transpose, torch.permute, torch.movedim, torch.flip, torch.roll, torch.tril, torch.triu,
    torch.broadcast_to, torch.tile, torch.t, torch.detach, torch.clone, torch.numel,
)  # fmt: skip

_PRODUCTS: tuple[Function, ...] = (torch.matmul, torch.mm, torch.mv, torch.bmm, torch.dot, torch.outer)


def _by_name(functions: Sequence[Function]) -> dict[str, Function]:
    return {function.__name__: function for function in functions}


_GUARDED = _by_name((guards.norm, guards.chunk, guards.split, guards.unbind, guards.diff))
_TORCH = {**_by_name((*_ELEMENTWISE, *_REDUCTIONS, *_REARRANGING, *_PRODUCTS)), **_GUARDED}

_FACTORIES = _by_name((torch.zeros, torch.ones, torch.full, torch.arange, torch.linspace, torch.eye))

_LOSSES = _by_name(
    (
        F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
    )
)  # fmt: skip

_OPERATORS: dict[str, Function] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod, "pow": guards.power, "neg": operator.neg, "pos": operator.pos,
    "abs": operator.abs, "matmul": operator.matmul, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge, "and_": operator.and_, "or_": operator.or_,
    "xor": operator.xor, "invert": operator.invert,
}  # fmt: skip

_MATH: tuple[Function, ...] = (
    math.sqrt, math.exp, math.expm1, math.log, math.log1p, math.log2, math.log10, math.pow, math.floor, math.ceil,
    math.trunc, math.fabs, math.sin, math.cos, math.tan, math.tanh,
)  # fmt: skip

FUNCTIONS: Mapping[str, Function] = {
    **{f"torch.{name}": function for name, function in {**_TORCH, **_FACTORIES}.items()},
    "torch.cat": torch.cat,
    "torch.zeros_like": torch.zeros_like,
    "torch.ones_like": torch.ones_like,
    "torch.full_like": torch.full_like,
    "torch.concat": torch.concat,
    "torch.stack": torch.stack,
    "torch.cosine_similarity": torch.cosine_similarity,
    "torch.functional.norm": guards.norm,
    "torch.functional.split": guards.split,
    **{f"torch.nn.functional.{name}": function for name, function in _LOSSES.items()},
    "torch.nn.functional.softmax": guards.softmax,
    "torch.nn.functional.log_softmax": guards.log_softmax,
    "torch.nn.functional.relu": guards.relu,
    "torch.nn.functional.silu": guards.silu,
    "torch.nn.functional.elu": guards.elu,
    "torch.nn.functional.leaky_relu": guards.leaky_relu,
    "torch.nn.functional.softsign": F.softsign,
    "torch.nn.functional.pad": F.pad,
    "torch.nn.functional.normalize": guards.normalize,
    "torch._C._nn.log_sigmoid": F.logsigmoid,
    "torch._C._nn.softplus": F.softplus,
    "torch._C._nn.gelu": F.gelu,
    "torch._C._special.special_expit": torch.special.expit,
    "torch._C._special.special_expm1": torch.special.expm1,
    "torch._C._special.special_log1p": torch.special.log1p,
    "torch._C._special.special_xlogy": torch.special.xlogy,
    "torch._C._linalg.linalg_norm": guards.linalg_norm,
    "torch._C._linalg.linalg_vector_norm": torch.linalg.vector_norm,
    **{f"operator.{name}": guards.arithmetic(function) for name, function in _OPERATORS.items()},
    "operator.getitem": guards.item_of,
    **{f"math.{function.__name__}": guards.on_numbers(function) for function in _MATH},
    "getattr": guards.attribute,
}

METHODS: Mapping[str, Function] = {
    # A method may take other arguments than the function of its name: reshape(2, 3), x.where(mask, y).
    **{name: getattr(Tensor, name) for name in _TORCH},
    **_GUARDED,
    "view": Tensor.view,
    "view_as": Tensor.view_as,
    "reshape_as": Tensor.reshape_as,
    "expand": Tensor.expand,
    "expand_as": Tensor.expand_as,
    "repeat": Tensor.repeat,
    "to": guards.to,
    "type": guards.to_type,
    "type_as": guards.to,
    "float": guards.cast(torch.float32),
    "double": guards.cast(torch.float64),
    "half": guards.cast(torch.float16),
    "bfloat16": guards.cast(torch.bfloat16),
    "int": guards.cast(torch.int32),
    "long": guards.cast(torch.int64),
    "bool": guards.cast(torch.bool),
    "cpu": guards.itself,
    "contiguous": Tensor.contiguous,
    "new_zeros": Tensor.new_zeros,
    "new_ones": Tensor.new_ones,
    "new_full": Tensor.new_full,
    "size": Tensor.size,
    "dim": Tensor.dim,
}


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
