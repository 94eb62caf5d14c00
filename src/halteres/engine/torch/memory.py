"""Foreign code whose failure is a value; memory that ran out is given back; a GPU that is lost ends the process.

Owns: what torch raises where memory ends, on a CPU and on a GPU; letting go of everything that the broken work held;
giving back what the allocator keeps of a large pass; how much of what is free keys and values may take.
Never: decides whose request fails.

Some errors of CUDA stay: after an illegal access or a failed assertion every operation of this process fails. Such an
engine exits, so that the service starts another and brings back what this one held.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from halteres.engine.checks import EngineOutOfMemory, out_of_memory
from halteres.errors import HalteresError, ServerError, boundary
from halteres.main_memory import main_memory

T = TypeVar("T")

LEAST_CACHE = 1 << 30
"""Bytes that keys and values may take however little is free."""

_SAID = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")

KEPT_BYTES, KEPT_SHARE = 1 << 30, 4
"""What the allocator of an idle engine may keep of freed memory; while the engine works also this part of all memory,
if that is more. Every page that was given back costs a fault: the next pass of a 135 M model would take a tenth longer.
"""

IDLE_S = 30.0
"""Seconds without work after which an engine is idle."""

LOST = 70
"""Exit code of an engine whose GPU is lost."""

_STATM = Path("/proc/self/statm")

log = logging.getLogger(__name__)


class FreedMemory:
    """Freed memory of this process, given back to the kernel where much of it is kept.

    glibc takes chunks of up to 32 MiB from heaps, which shrink at their ends only: activations of a pass (3 GB of a
    135 M model) leave holes between whatever outlives them, and each pass of another shape adds to them.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._idle = kept_bytes
        self._busy = max(kept_bytes, (main_memory().total or 0) // KEPT_SHARE)
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        self._least = 0  # resident bytes when nothing was kept

    def look(self, *, idle: bool) -> None:
        """Give it back if the process has grown by more than it may keep."""
        if self._trim is None or not _STATM.is_file():
            return
        if resident_bytes() - self._least > (self._idle if idle else self._busy):
            self._trim(0)
            self._least = resident_bytes()


def resident_bytes() -> int:
    """Of this process, on Linux."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether torch, or Python, raised it for want of memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(said in str(error).lower() for said in _SAID)
    )


def let_go() -> None:
    """Give back what broken work held; no exception of it may be alive any more."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


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
    if isinstance(failure, ServerError) and torch.cuda.is_initialized():
        _leave_if_lost(where)
    if isinstance(failure, EngineOutOfMemory):
        let_go()
    return failure


def _leave_if_lost(where: str) -> None:
    """End the process, without cleaning up, if the GPU fails a trivial operation, too."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        log.critical("The GPU is lost since %s (%s); the engine ends.", where, str(error).strip().splitlines()[0])
        os._exit(LOST)


def free_for_cache(device: torch.device) -> int:
    """Bytes for keys and values: what is left serves passes and other processes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(LEAST_CACHE, free // 2)
    return max(LEAST_CACHE, (main_memory().free or 0) // 4)


def _told(where: str, error: HalteresError) -> HalteresError:
    cause = error.__cause__
    if is_out_of_memory(cause):
        return out_of_memory(where, str(cause))
    if cause is not None and isinstance(error, ServerError):
        log.error("%s broke.", where, exc_info=error)
    return error
