"""The operations of a custom loss's graph: the one function behind each name, its arguments, its result.

What a result will be like is known before it is made, by running the operation on tensors without data ("meta"). All of
it runs on the CPU, where every index is checked; `custom_loss` decides what is too much.

Functions that torch has more of than a graph may use are wrapped: they leave a CPU's tensors where they are, change no
argument, make few tensors, and end soon. Each raises ValueError where it refuses, and whatever torch raises of
arguments that do not fit.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halteres.engine.loss_graphs import ELEMENTWISE, FACTORIES, KEYWORDS, Node
from halteres.engine.loss_graphs import FUNCTIONS as NAMES_OF_FUNCTIONS
from halteres.engine.loss_graphs import METHODS as NAMES_OF_METHODS

MAX_PIECES = 256  # tensors that one operation may return
MAX_DIFFERENCES = 8  # times that one operation may take differences

Function = Callable[..., Any]  # a function behind a name


def norm(
    x: Tensor, p: float | str = "fro", dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """Of vectors only; a matrix's own norms need its singular values."""
    if isinstance(p, str) and p != "fro":
        raise ValueError(f"the norm '{p}' is not computed; use a number")
    return torch.linalg.vector_norm(x, 2 if p == "fro" else p, dim, keepdim, dtype=dtype)


def linalg_norm(
    x: Tensor, ord: float | None = None, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """Of vectors only, as `norm`."""
    if ord is not None and x.ndim > 1 and not isinstance(dim, int):
        raise ValueError("norms of matrices are not computed; use torch.linalg.vector_norm")
    return torch.linalg.vector_norm(x, 2 if ord is None else ord, dim, keepdim, dtype=dtype)


def _pieces(x: Tensor, dim: int, count: Callable[[int], float]) -> None:
    if x.ndim == 0 or count(x.shape[dim]) > MAX_PIECES:
        raise ValueError(f"a tensor of shape {list(x.shape)} is cut into more than {MAX_PIECES} pieces")


def chunk(x: Tensor, chunks: int, dim: int = 0) -> Sequence[Tensor]:
    """Into few pieces only."""
    _pieces(x, dim, lambda length: min(length, chunks))
    return torch.chunk(x, chunks, dim)


def split(x: Tensor, split_size_or_sections: int | list[int], dim: int = 0) -> Sequence[Tensor]:
    """Into few pieces only."""
    size = split_size_or_sections
    _pieces(x, dim, lambda length: math.ceil(length / max(1, size)) if isinstance(size, int) else len(size))
    return torch.split(x, size, dim)


def unbind(x: Tensor, dim: int = 0) -> Sequence[Tensor]:
    """Into few pieces only."""
    _pieces(x, dim, float)
    return torch.unbind(x, dim)


def diff(x: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None) -> Tensor:
    """A few times only: torch takes one difference after the other."""
    if n > MAX_DIFFERENCES:
        raise ValueError(f"differences are taken at most {MAX_DIFFERENCES} times, not {n}")
    return torch.diff(x, n, dim, prepend, append)


def to(x: Tensor, *args: Any, dtype: torch.dtype | None = None, other: Tensor | None = None) -> Tensor:
    """To a dtype, or another tensor's; everything is on the CPU already."""
    for arg in (*args, other):
        if isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, Tensor):
            dtype = arg.dtype
    return x if dtype is None else x.to(dtype)


def to_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To a dtype; the texts that torch understands here name devices too."""
    if not isinstance(dtype, torch.dtype):  # pyright: ignore[reportUnnecessaryIsInstance]  # a graph may say anything
        raise ValueError("the type is no dtype")
    return x.to(dtype)


def normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """x / max(norm of x, eps), without its argument `out`."""
    return x / torch.linalg.vector_norm(x, p, dim, True).clamp_min(eps).expand_as(x)


def on_numbers(function: Function) -> Function:
    """A function of `math`: of Python numbers alone, since of a tensor it would be its value, without gradient."""

    def apply(*args: Any) -> Any:
        if not all(isinstance(arg, int | float) for arg in args):
            raise ValueError("functions of math take numbers; use torch's function of that name")
        return function(*args)

    return apply


def arithmetic(function: Function) -> Function:
    """An operator between tensors and numbers; Python's own would also repeat lists and format texts."""

    def apply(*args: Any) -> Any:
        if not all(isinstance(arg, Tensor | int | float) for arg in args):
            raise ValueError(f"operators take tensors and numbers, not {', '.join(type(arg).__name__ for arg in args)}")
        return function(*args)

    return apply


def power(base: Any, exponent: Any) -> Any:
    """Of long integers as of floats, so that no number grows without bound."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > 64:
        return float(base) ** exponent
    return base**exponent


def item_of(holder: Any, index: Any) -> Any:
    """An element or a slice of a tensor, a shape, or what an operation returned."""
    if isinstance(holder, Tensor):
        picks = index if isinstance(index, tuple | list) else ()
        if any(isinstance(pick, Tensor) and pick.dtype == torch.bool for pick in picks):
            raise ValueError("a mask is combined with other indices; index with the mask alone")
        return holder[index]
    if isinstance(holder, tuple | list) and isinstance(index, int | slice):
        return holder[index]
    raise ValueError(f"a {type(holder).__name__} cannot be indexed like this")


def attribute(x: Any, name: str) -> Any:
    """One of `loss_graphs.ATTRIBUTES`."""
    if not isinstance(x, Tensor):
        raise ValueError(f"only tensors have attributes here, not a {type(x).__name__}")
    match name:
        case "shape":
            return x.shape
        case "dtype":
            return x.dtype
        case "device":
            return x.device
        case "ndim":
            return x.ndim
        case _:
            return torch.t(x)


_GUARDED: Mapping[str, Function] = {"norm": norm, "chunk": chunk, "split": split, "unbind": unbind, "diff": diff}

_SPECIAL: Mapping[str, Function] = {
    **{f"{package}.{name}": guarded for package in ("torch", "torch.functional") for name, guarded in _GUARDED.items()},
    # Without their arguments `inplace`, `out` and `_stacklevel`.
    "torch.nn.functional.softmax": torch.softmax,
    "torch.nn.functional.log_softmax": torch.log_softmax,
    "torch.nn.functional.relu": torch.relu,
    "torch.nn.functional.silu": lambda x: F.silu(x),
    "torch.nn.functional.elu": lambda x, alpha=1.0: F.elu(x, alpha),
    "torch.nn.functional.leaky_relu": lambda x, negative_slope=0.01: F.leaky_relu(x, negative_slope),
    "torch.nn.functional.normalize": normalize,
    "torch._C._nn.log_sigmoid": F.logsigmoid,
    "torch._C._linalg.linalg_norm": linalg_norm,
    "operator.pow": arithmetic(power),
    "operator.getitem": item_of,
    "getattr": attribute,
}


def _function(name: str) -> Function:
    package, _, last = name.rpartition(".")
    match package:
        case "operator":
            return arithmetic(getattr(operator, last))
        case "math":
            return on_numbers(getattr(math, last))
        case "torch.nn.functional" | "torch._C._nn":
            return getattr(F, last)
        case "torch._C._special":
            return getattr(torch.special, last.removeprefix("special_"))
        case "torch._C._linalg":
            return getattr(torch.linalg, last.removeprefix("linalg_"))
        case _:
            return getattr(torch, last)


FUNCTIONS: Mapping[str, Function] = {name: _SPECIAL.get(name) or _function(name) for name in NAMES_OF_FUNCTIONS}

_CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "bool": torch.bool,
}

METHODS: Mapping[str, Function] = {
    # A method may take other arguments than the function of its name: reshape(2, 3), x.where(mask, y).
    **{name: getattr(Tensor, name) for name in NAMES_OF_METHODS},
    **_GUARDED,
    **{name: lambda x, dtype=dtype: x.to(dtype) for name, dtype in _CASTS.items()},
    "to": to,
    "type": to_type,
    "type_as": to,
    "cpu": lambda x: x,
}

_WIDENING = frozenset(
    {"masked_select", "cosine_similarity", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"}
    | {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
)
"""They widen their arguments to one shape, and return no more than that."""

_CPU, _META = torch.device("cpu"), torch.device("meta")


@dataclass(frozen=True, slots=True)
class Call:
    """One node about to be run."""

    target: str
    function: Function
    args: list[Any]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, node: Node, values: Mapping[str, Any]) -> Call:
        """Its function and arguments; `values` are the results so far."""
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
        """The result."""
        result = self.function(*self.args, **self.kwargs, **({"device": _CPU} if self.makes else {}))
        if isinstance(result, int) and abs(result) >= 2**63:
            raise ValueError("an integer grew beyond 64 bits")
        return result

    def foreseen(self) -> list[tuple[torch.Size, int]]:
        """Shapes, and bytes of one element, of what the call will make at most, nothing being made yet."""
        if self.kind in ELEMENTWISE | _WIDENING:  # known without running anything
            shape = torch.broadcast_shapes(*(one.shape for one in self.given))
            return [(shape, max(4, *(one.element_size() for one in self.given)))]
        picks = self.target == "operator.getitem"
        if picks and len(self.args) > 1 and _is_mask(self.args[1]):
            return [(one.shape, one.element_size()) for one in self.given[:1]]
        args = [_shadow(arg, picks and i > 0) for i, arg in enumerate(self.args)]
        kwargs = {key: _shadow(arg, False) for key, arg in self.kwargs.items()}
        with torch.no_grad():
            result = self.function(*args, **kwargs, **({"device": _META} if self.makes else {}))
        return [(one.shape, one.element_size()) for one in _tensors(result)]


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
            return getattr(torch, held)
        case "float":
            return float(held)
        case "device":
            return _CPU
        case "layout":
            return torch.strided
        case _:
            return torch.contiguous_format
