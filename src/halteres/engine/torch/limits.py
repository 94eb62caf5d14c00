"""What bounds the engine's memory and latency, and what happens where memory ends.

But for want of memory the plan of micro-batches is a pure function of the request and these limits.
What torch raises where memory ends, on a CPU or a GPU, becomes a value, and everything that the
broken work held is given back; whose request fails is decided elsewhere.

Some errors of CUDA stay: after an illegal access or a failed assertion every operation of this
process fails. Such an engine exits, so that the service starts another and brings back what this
one held.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from halteres.engine.checks import EngineOutOfMemory, out_of_memory
from halteres.engine.limits import (
    CACHE_BYTES,
    DECODE_ROWS,
    GPU_HEAD_ELEMENTS,
    GPU_PASS_TOKENS,
    HEAD_ELEMENTS,
    PASS_TOKENS,
    kept_bytes,
)
from halteres.engine.torch.model import BaseModel, FusedModel
from halteres.errors import HalteresError, ServerError, boundary
from halteres.process import main_memory

# positions of a sequence of usual length, in which the number that can be decoded at once is given
PLACE = 1024

MIXTURE_BYTES, MIXTURE_SHARE = 1 << 28, 8
"""Stacked adapters take so many bytes; on a GPU this part of what is free, where that is more."""

PASS_SHARE, LOGITS, TOKEN_STEP = 0.8, 2.5, 512
"""Of a GPU's memory for passes: what is reckoned with, for the allocator leaves holes; how many
numbers a logit takes, its gradient among them; and the step of a micro-batch's tokens. Not
measured yet.
"""


def token_bytes(base: FusedModel) -> int:
    """What a token of a pass keeps on a GPU until the backward, in bytes."""
    attention, mlp = base.layers[0].attention, base.layers[0].mlp
    return kept_bytes(
        layers=len(base.layers),
        width=attention[0].inputs,
        qkv=attention[0].weight_ED.shape[0],
        heads=attention[-1].inputs,
        feed=mlp[-1].inputs,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one engine process."""

    pass_tokens: int = PASS_TOKENS
    head_elements: int = HEAD_ELEMENTS
    decode_rows: int = DECODE_ROWS
    cache_bytes: int = CACHE_BYTES
    # copies of the adapters that decode together; those without room go one by one
    mixture_bytes: int = MIXTURE_BYTES
    # Keys and values that stay when their sequences have ended, while there is room: as many
    # positions as so many sequences of full context have. 0: none.
    prefixes: int = 256
    turn_steps: int = 8  # decode steps between two turns of other work

    # Larger micro-batches compute their layers once more in the backward, and keep little until
    # then. None: none does before memory is found to end.
    kept_tokens: int | None = None

    @classmethod
    def of(cls, base: BaseModel, cache_bytes: int) -> Limits:
        """The usual ones for a model on its device.

        On a GPU by what is free beside keys and values: an eighth for stacked adapters, the rest
        for passes. Large passes are those in bfloat16 of layers computed here: the largest that
        keep all they need until the backward. Longer sequences compute their layers once more.
        """
        if base.device.type == "cpu":
            return cls(cache_bytes=cache_bytes)
        free = max(0, free_bytes(base.device) - cache_bytes)
        mixture_bytes = max(MIXTURE_BYTES, free // MIXTURE_SHARE)
        if base.attention_dtype == torch.float32 or not isinstance(base, FusedModel):
            return cls(cache_bytes=cache_bytes, mixture_bytes=mixture_bytes)
        passes = int((free - mixture_bytes) * PASS_SHARE) - int(LOGITS * 4 * GPU_HEAD_ELEMENTS)
        kept = max(0, passes) // token_bytes(base) // TOKEN_STEP * TOKEN_STEP
        return cls(
            cache_bytes=cache_bytes,
            mixture_bytes=mixture_bytes,
            pass_tokens=max(PASS_TOKENS, min(GPU_PASS_TOKENS, kept)),
            head_elements=GPU_HEAD_ELEMENTS,
            kept_tokens=kept,
        )


@dataclass(slots=True)
class PassBudget:
    """What a micro-batch of an adapter's passes may take, as far as they have found out."""

    tokens: int  # that one computes
    head_elements: int  # logits that exist at once
    # layers are computed once more in the backward, and keep little until then
    recomputes: bool = False
    kept_tokens: int | None = None  # of micro-batches without that; None: all
    # that ranks plan with: the plan is the same on all, whatever memory one of them has found
    planned_tokens: int = 0

    @classmethod
    def of(cls, limits: Limits) -> PassBudget:
        """The usual one."""
        return cls(
            limits.pass_tokens,
            limits.head_elements,
            kept_tokens=limits.kept_tokens,
            planned_tokens=limits.pass_tokens,
        )

    def computes_again(self, tokens: int) -> bool:
        """A micro-batch of so many tokens computes its layers once more in the backward."""
        return self.recomputes or (self.kept_tokens is not None and tokens > self.kept_tokens)

    def shrink(self, tokens: int, rows: int) -> bool:
        """A micro-batch of so many tokens and rows found no memory: smaller ones from now on.

        Rows by themselves are computed in less memory and a third more time. False: nothing is left
        to save.
        """
        if rows > 1:
            self.tokens = tokens // 2
        elif self.computes_again(tokens):
            return False
        else:
            self.recomputes = True
        return True


T = TypeVar("T")

LEAST_CACHE = 1 << 30  # bytes that keys and values may take however little is free
_OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")

FREED_BYTES, FREED_SHARE = 1 << 30, 4
"""What the allocator of an idle engine may keep of freed memory; while the engine works also this
part of all memory, if that is more. Every page that was given back costs a fault: the next pass of
a 135 M model would take a tenth longer.
"""

IDLE_S = 30.0  # seconds without work after which an engine is idle
LOST = 70  # exit code of an engine whose GPU is lost
_STATM = Path("/proc/self/statm")

log = logging.getLogger(__name__)


class FreedMemory:
    """Freed memory of this process, given back to the kernel where much of it has piled up.

    glibc takes chunks of up to 32 MiB from heaps, which shrink at their ends only: activations of a
    pass (3 GB of a 135 M model) leave holes between whatever outlives them, and each pass of
    another shape adds to them.
    """

    def __init__(self, freed_bytes: int = FREED_BYTES) -> None:
        self._idle = freed_bytes
        self._busy = max(freed_bytes, (main_memory().total or 0) // FREED_SHARE)
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        self._least = 0  # resident bytes after the last time

    def look(self, *, idle: bool) -> None:
        """Give it back if the process has grown by more than it may keep."""
        if self._trim is None or not _STATM.is_file():
            return
        if resident_bytes() - self._least > (self._idle if idle else self._busy):
            self._trim(0)
            self._least = resident_bytes()


def resident_bytes() -> int:
    """Of this process, on Linux."""
    return int(_STATM.read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether torch, or Python, raised it for want of memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError)
        and any(phrase in str(error).lower() for phrase in _OUT_OF_MEMORY)
    )


def let_go() -> None:
    """Give back what broken work held; no exception of it may be alive any more."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def attempt(where: str, work: Callable[[], T]) -> T | HalteresError:
    """The result of `work`, or what went wrong in it.

    An EngineOutOfMemory holds no traceback: its frames would keep the tensors of the broken work
    alive for as long as somebody holds the error.
    """
    try:
        with boundary(ServerError, where):
            return work()
    except HalteresError as error:
        failure, cause = error, error.__cause__
        if is_out_of_memory(cause):
            failure = out_of_memory(where, str(cause))
        elif cause is not None and isinstance(error, ServerError):
            log.error("%s broke.", where, exc_info=error)
        del cause
    if isinstance(failure, ServerError) and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            # even a trivial operation fails: the process ends, without cleaning up
            log.critical(
                "The GPU is lost since %s (%s); the engine ends.",
                where,
                str(error).strip().splitlines()[0],
            )
            os._exit(LOST)
    if isinstance(failure, EngineOutOfMemory):
        let_go()
    return failure


def free_bytes(device: torch.device) -> int:
    """Of a GPU's memory."""
    return torch.cuda.mem_get_info(device)[0]


def free_for_cache(device: torch.device) -> int:
    """Bytes for keys and values: what is left serves passes and other processes."""
    if device.type == "cuda":
        return max(LEAST_CACHE, free_bytes(device) // 2)
    return max(LEAST_CACHE, (main_memory().free or 0) // 4)
