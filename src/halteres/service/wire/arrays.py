"""Arrays of the Tinker API, dense or sparse (CSR: N rows of K cells), as the engine's values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halteres.engine.protocol import Array
from halteres.errors import InvalidData
from halteres.service.wire.bodies import Tensor

MAX_CELLS = 2**25
"""Cells of all sparse arrays of one request, written out: 256 MiB of token ids, as much as a dense body may hold."""

Values = npt.NDArray[Any]


class Budget:
    """How many cells the sparse arrays of one request may still have."""

    def __init__(self, cells: int = MAX_CELLS) -> None:
        self._left = cells

    def take(self, what: str, cells: int) -> None:
        """Use some of it."""
        self._left -= cells
        if self._left < 0:
            raise InvalidData(
                f"{what} has {cells} cells when it is written out.",
                f"The sparse arrays of one request may have {MAX_CELLS} together.",
                "Send fewer columns, or the datums in several requests.",
            )


@dataclass(frozen=True, slots=True)
class Csr:
    """Where the values of a sparse array lie: `crow` has N + 1 row pointers, `col` a column per value."""

    crow: Values  # int64
    col: Values  # int64

    def places(self, columns: int) -> Values:
        """The place of each value in the array written out row by row; the pointers fit it."""
        return np.repeat(np.arange(len(self.crow) - 1), np.diff(self.crow)) * columns + self.col


def array_of(
    what: str, values: Values, shape: Sequence[int] | None, csr: Csr | None, budget: Budget, pad: int = 0
) -> Array:
    """An array of float32 or int64 values; without a shape it has one dimension.

    Args:
        csr: where the values of a sparse array lie; its other cells hold `pad`.

    Raises:
        InvalidData: the shape does not fit, or a sparse array is broken or too large.
    """
    shape = (len(values),) if shape is None else tuple(shape)
    if csr is not None:
        places = _places(what, len(values), shape, csr, budget)
        full = np.full(math.prod(shape), pad, values.dtype)
        full[places] = values
        values = full
    if len(shape) > 2 or any(size < 0 for size in shape) or math.prod(shape) != len(values):
        raise InvalidData(
            f"{what} has {len(values)} values, not the shape {_short(shape)}.",
            next="Send shape [N] or [N, K], and as many values.",
        )
    return Array(dtype="int64" if values.dtype.kind == "i" else "float32", shape=shape, data=values.tobytes())


def _places(what: str, count: int, shape: tuple[int, ...], csr: Csr, budget: Budget) -> Values:
    if len(shape) != 2 or min(shape) < 0:
        raise InvalidData(f"{what} is sparse, of shape {_short(shape)}.", "A sparse array has the shape [N, K].")
    budget.take(what, math.prod(shape))
    (rows, columns), crow, col = shape, csr.crow, csr.col
    inside = ((crow >= 0) & (crow <= count)).all() and (np.diff(crow) >= 0).all()
    if len(crow) != rows + 1 or not inside or (crow[0], crow[-1]) != (0, count):
        raise InvalidData(
            f"{what}: its row pointers do not fit.",
            f"They must be {rows + 1} numbers, from 0 up to the number of its values, {count}.",
        )
    if len(col) != count or ((col < 0) | (col >= columns)).any():
        raise InvalidData(f"{what}: its columns do not fit.", f"Each of {count} values needs one of {columns}.")
    places = csr.places(columns)
    if len(np.unique(places)) != count:
        raise InvalidData(f"{what} lists a cell twice.", next="List each cell once.")
    return places


def unknown_dtype(what: str, dtype: str) -> InvalidData:
    """The refusal of a dtype."""
    return InvalidData(f"{what} has the dtype '{dtype[:50]}'.", "Arrays are float32 or int64.", "Convert it.")


def _short(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape[:4]))}{', …' if len(shape) > 4 else ''}]"


def tensor_of(what: str, tensor: Tensor, budget: Budget, pad: int = 0) -> Array:
    """An array as JSON writes it; of a sparse one, cells that are not listed hold `pad`.

    Raises:
        InvalidData: it is broken, or too large.
    """
    values = _numbers(what, tensor.data, tensor.dtype)
    return array_of(what, values, tensor.shape, csr_of(what, tensor), budget, pad)


def csr_of(what: str, tensor: Tensor) -> Csr | None:
    """Where a sparse array's values lie; None for a dense one."""
    crow, col = tensor.sparse_crow_indices, tensor.sparse_col_indices
    if crow is None and col is None:
        return None
    if crow is None or col is None or tensor.shape is None:
        raise InvalidData(f"{what} is sparse without its shape, rows or columns.", next="Send all of them, or none.")
    return Csr(_numbers(what, crow, "int64"), _numbers(what, col, "int64"))


def _numbers(what: str, data: Sequence[float], dtype: str) -> Values:
    if dtype not in ("float32", "int64"):
        raise unknown_dtype(what, dtype)
    try:
        with np.errstate(over="ignore"):  # infinite then, which every loss refuses
            values = np.asarray(data, np.float32 if dtype == "float32" else None)
    except OverflowError as error:
        raise InvalidData(f"{what} holds a number that {dtype} cannot hold.") from error
    if dtype == "float32":
        return values
    whole = values.dtype.kind == "f" and (values == np.floor(values)).all() and (np.abs(values) < 2**53).all()
    if not whole and values.dtype.kind != "i":
        raise InvalidData(f"{what} holds a number that is no int64.", next="Send whole numbers, or dtype float32.")
    return values.astype(np.int64)
