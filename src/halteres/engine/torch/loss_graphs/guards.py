"""Operations of a custom loss's graph that torch has more of than a graph may use.

Owns: wrappers that leave a CPU's tensors where they are, change no argument, make few tensors, and end soon.
Never: looks a name up.

Each raises ValueError where it refuses, and whatever torch raises of arguments that do not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_PIECES = 256
"""Tensors that one operation may return."""

MAX_DIFFERENCES = 8
"""Times that one operation may take differences."""

Function = Callable[..., Any]
"""A function behind a name."""


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


def cast(dtype: torch.dtype) -> Function:
    """To this dtype."""
    return lambda x: x.to(dtype)


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


def itself(x: Tensor) -> Tensor:
    """Nothing to do: it is on the CPU."""
    return x


def relu(x: Tensor) -> Tensor:
    """Without its argument `inplace`, as those that follow."""
    return torch.relu(x)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return F.silu(x)


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """See torch."""
    return F.elu(x, alpha)


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """See torch."""
    return F.leaky_relu(x, negative_slope)


def normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """x / max(norm of x, eps), without its argument `out`."""
    return x / torch.linalg.vector_norm(x, p, dim, True).clamp_min(eps).expand_as(x)


def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Without its argument `_stacklevel`."""
    return torch.softmax(x, dim, dtype)


def log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Without its argument `_stacklevel`."""
    return torch.log_softmax(x, dim, dtype)


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
    """One of `graph_names.ATTRIBUTES`."""
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
