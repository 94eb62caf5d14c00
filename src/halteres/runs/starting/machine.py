"""This machine, as a run sees it: cores, memory, GPU.

Owns: what is free now, within the limits of a container too; whether the engine will use a GPU.
Never: imports torch, reserves anything.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from halteres.config import environ
from halteres.process import usable_cores

NVIDIA_SMI = "nvidia-smi"
ANSWERS_WITHIN_S = 5.0
MIB, KIB = 1 << 20, 1 << 10
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One kind of memory, in bytes. None: this system does not tell."""

    total: int | None
    free: int | None  # what a new process can have without pushing others out


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The accelerator that the engine will use."""

    name: str
    memory: Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What there is."""

    cores: int
    memory: Memory
    gpu: Gpu | None
    unused_gpu: Gpu | None = None  # there, and left alone by the engine

    @property
    def model_memory(self) -> Memory:
        """Where the base model lies: the GPU's memory, else the machine's."""
        return self.gpu.memory if self.gpu else self.memory

    @property
    def mark(self) -> str:
        """Tells this machine from others, for figures that were measured on one."""
        return f"{platform.node()}/{platform.machine()}/{self.cores} cores/{self.gpu.name if self.gpu else 'no GPU'}"


def look() -> Machine:
    """This machine, now."""
    used = gpu()
    return Machine(cores=usable_cores(), memory=main_memory(), gpu=used, unused_gpu=None if used else _usable_gpu())


def gb(count: int | None) -> float | None:
    """Bytes as GB (10^9), for people."""
    return None if count is None else round(count / 1e9, 2)


def main_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> Memory:
    """The machine's memory, or the container's where that is less."""
    told = _meminfo(meminfo)
    total, free = told.get("MemTotal") or _physical(), told.get("MemAvailable")
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None or (total is not None and limit >= total):
        return Memory(total=total, free=free)
    left = max(0, limit - used + _reclaimable(cgroup / "memory.stat"))
    return Memory(total=limit, free=left if free is None else min(free, left))


def gpu() -> Gpu | None:
    """The first GPU, if the engine will use it."""
    return _usable_gpu() if environ.device() == "cuda" else None


def _usable_gpu() -> Gpu | None:
    """The first GPU, if the installed torch can use it."""
    program = shutil.which(NVIDIA_SMI)
    if program is None or _torch_is_for_cpu():
        return None
    query = [program, "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=ANSWERS_WITHIN_S, check=True)
        name, total, free = answer.stdout.splitlines()[0].rsplit(",", 2)
        return Gpu(name=name.strip(), memory=Memory(total=int(total) * MIB, free=int(free) * MIB))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None  # a driver that does not answer is no GPU to count on


def _torch_is_for_cpu() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return True


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
