"""The memory of this machine that is not a GPU's, within the limits of a container too.

Owns: how much there is, and how much of it a new process can have.
Never: reserves anything.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

KIB = 1 << 10
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One kind of memory, in bytes. None: this system does not tell."""

    total: int | None
    free: int | None  # what a new process can have without pushing others out


def main_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> Memory:
    """The machine's memory, or the container's where that is less."""
    told = _meminfo(meminfo)
    total, free = told.get("MemTotal") or _physical(), told.get("MemAvailable")
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None or (total is not None and limit >= total):
        return Memory(total=total, free=free)
    left = max(0, limit - used + _reclaimable(cgroup / "memory.stat"))
    return Memory(total=limit, free=left if free is None else min(free, left))


def _meminfo(file: Path) -> dict[str, int]:
    """/proc/meminfo in bytes; nothing where there is none."""
    try:
        rows = (line.split() for line in file.read_text().splitlines())
        return {row[0].rstrip(":"): int(row[1]) * KIB for row in rows if len(row) > 1}
    except (OSError, ValueError):
        return {}


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _number(file: Path) -> int | None:
    """The number in a file; None where it holds another word (`max`), or there is none."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(file: Path) -> int:
    """Bytes of files in memory that make way for a process."""
    try:
        rows = dict(line.split() for line in file.read_text().splitlines())
        return int(rows.get("inactive_file", 0))
    except (OSError, ValueError):
        return 0
