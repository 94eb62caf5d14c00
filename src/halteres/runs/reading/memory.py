"""Whether a process ended for want of memory, as far as logs and the kernel tell.

Owns: the words by which torch, Python and the C library say so; the kernel's own count of processes it has killed.
Never: claims to know whom the kernel killed: a count is no name, and anybody may send SIGKILL.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

Memory = Literal["GPU memory", "memory"]
"""As a sentence calls it."""

_WORDS: tuple[tuple[Memory, re.Pattern[str]], ...] = (
    ("GPU memory", re.compile(r"\b(CUDA|HIP|XPU|MPS|GPU)\b.*out of memory|OutOfMemoryError|_ALLOC_FAILED", re.I)),
    (
        "memory",
        re.compile(r"out of memory|not enough memory|can(no|')t allocate memory|\bMemoryError\b|\bbad_alloc\b", re.I),
    ),
)

COUNTERS = ("/sys/fs/cgroup/memory.events", "/proc/vmstat")
"""Where the kernel counts whom it has killed: in this container, in this machine."""

_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def ran_out(lines: Iterable[str]) -> Memory | None:
    """Which memory these lines say there was too little of; None where they say no such thing.

    >>> ran_out(["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."])
    'GPU memory'
    """
    told = "\n".join(lines)
    return next((memory for memory, words in _WORDS if words.search(told)), None)


def kernel_kills() -> int:
    """Processes that the kernel has killed for want of memory since it began to count; 0 where it does not tell."""
    for file in COUNTERS:
        try:
            counted = _KILLS.search(Path(file).read_text())
        except OSError:
            continue
        if counted:
            return int(counted[1])
    return 0
