"""How much memory that is not a GPU's this machine, or its container, has, and how much a new process can have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One kind of memory, in bytes. None: this system does not tell."""

    total: int | None
    free: int | None  # what a new process can have without pushing others out


def main_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> Memory:
    """The machine's memory, or the container's where that is less."""
    machine = dict(_numbers(meminfo))  # KiB
    total, free = (machine[name] << 10 if name in machine else None for name in ("MemTotal", "MemAvailable"))
    if total is None:
        try:
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            total = None
    container = {name: dict(_numbers(cgroup / f"memory.{name}")) for name in ("max", "current", "stat")}
    limit, used = container["max"].get(""), container["current"].get("")
    if limit is None or used is None or (total is not None and limit >= total):
        return Memory(total=total, free=free)
    left = max(0, limit - used + container["stat"].get("inactive_file", 0))  # files in memory make way for a process
    return Memory(total=limit, free=left if free is None else min(free, left))


def _numbers(file: Path) -> Iterator[tuple[str, int]]:
    """The numbers in a file by the word before them; none where it holds no number (`max`), or is not there."""
    try:
        rows = [line.split() for line in file.read_text().splitlines() if line.strip()]
    except (OSError, ValueError):
        return
    for row in rows:
        name, value = ("", row[0]) if len(row) == 1 else (row[0].rstrip(":"), row[1])
        if value.isdecimal():
            yield name, int(value)
