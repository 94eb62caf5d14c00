"""Foreign code whose failure is a value; memory that ran out is given back.

Owns: what torch raises where memory ends, on a CPU and on a GPU; letting go of everything that the broken work held;
how much of what is free keys and values may take.
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
from halteres.main_memory import main_memory

T = TypeVar("T")

LEAST_CACHE = 1 << 30
"""Bytes that keys and values may take however little is free."""

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


def free_for_cache(device: torch.device) -> int:
    """Bytes for keys and values: what is left serves passes and other processes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(LEAST_CACHE, free // 2)
    return max(LEAST_CACHE, (main_memory().free or 0) // 4)


def _told(where: str, error: HalteresError) -> HalteresError:
    cause = error.__cause__
    if isinstance(cause, MemoryError | torch.OutOfMemoryError) or (
        isinstance(cause, RuntimeError) and any(said in str(cause).lower() for said in _SAID)
    ):
        return out_of_memory(where, str(cause))
    if cause is not None and isinstance(error, ServerError):
        log.error("%s broke.", where, exc_info=error)
    return error
