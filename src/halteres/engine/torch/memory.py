"""Foreign code whose failure is a value; memory that ran out is given back.

Owns: what torch raises where memory ends, on a CPU and on a GPU; letting go of everything that the broken work held.
Never: decides whose request fails.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from halteres.engine.failures import EngineOutOfMemory, out_of_memory
from halteres.errors import HalteresError, ServerError, boundary

T = TypeVar("T")

_SAID = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")

log = logging.getLogger(__name__)


def attempt(where: str, work: Callable[[], T]) -> T | HalteresError:
    """The result of `work`, or what went wrong in it.

    An EngineOutOfMemory holds no traceback: its frames would keep the tensors of the broken work alive for as long as
    somebody holds the error.
    """
    try:
        with boundary(ServerError, where):
            return work()
    except HalteresError as error:
        failure = _told(where, error)
    if isinstance(failure, EngineOutOfMemory):
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return failure


def _told(where: str, error: HalteresError) -> HalteresError:
    cause = error.__cause__
    if isinstance(cause, MemoryError | torch.OutOfMemoryError) or (
        isinstance(cause, RuntimeError) and any(said in str(cause).lower() for said in _SAID)
    ):
        return out_of_memory(where, str(cause))
    if cause is not None and isinstance(error, ServerError):
        log.error("%s broke.", where, exc_info=error)
    return error
