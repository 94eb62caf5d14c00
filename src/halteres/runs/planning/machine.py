"""This machine: its processors, its memory, and the GPU that the engine will use."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from halteres.config import environ
from halteres.errors import InvalidConfig
from halteres.process import Memory, main_memory, usable_cores

NVIDIA_SMI = "nvidia-smi"
ANSWERS_WITHIN_S = 5.0
MIB = 1 << 20

CPU_INFO = Path("/proc/cpuinfo")

BFLOAT16, TILES = "avx512_bf16", "amx_bf16"
"""Flags of a processor. Where there are tiles the engine leaves them alone, for they have no
equal bits (`engine/torch/cpu_kernels`), and float32 is faster than what is left.
"""


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
        if self.gpu:
            return self.gpu.memory
        return self.memory

    @property
    def mark(self) -> str:
        """Tells this machine from others, for figures that were measured on one."""
        return (
            f"{platform.node()}/{platform.machine()}/{self.cores} "
            f"cores/{self.gpu.name if self.gpu else 'no GPU'}"
        )

    def check_device(self, device: str | None = None) -> None:
        """InvalidConfig where the settings' device, or else HALTERES_DEVICE, is a GPU that is not
        here.
        """
        if (device or environ.device()) == "cuda" and self.gpu is None:
            raise InvalidConfig(
                "The engine is to compute on a GPU, and there is none that it can use.",
                "nvidia-smi names none, or the installed torch is a build for the CPU.",
                "Set inference.device (or HALTERES_DEVICE) to cpu or auto, or install a torch "
                "build for your GPU.",
                field="inference.device",
            )


def look(device: str | None = None) -> Machine:
    """This machine, now; `device` is that of the settings, by default HALTERES_DEVICE."""
    there = _usable_gpu()
    used, unused = there, None
    if (device or environ.device()) == "cpu":
        used, unused = None, there
    return Machine(cores=usable_cores(), memory=main_memory(), gpu=used, unused_gpu=unused)


def multiplies_bfloat16() -> bool:
    """Whether the engine is faster with it on this processor; false where the system does not
    tell.
    """
    try:
        described = CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    flags = described.split()
    return BFLOAT16 in flags and TILES not in flags


def gb(count: int | None) -> float | None:
    """Bytes as GB (10^9), for people."""
    if count is None:
        return None
    return round(count / 1e9, 2)


def _usable_gpu() -> Gpu | None:
    """The first GPU, if the installed torch can use it."""
    program = shutil.which(NVIDIA_SMI)
    try:
        torch_is_for_cpu = importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        torch_is_for_cpu = True
    if program is None or torch_is_for_cpu:
        return None
    query = [program, "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            query,
            capture_output=True,
            text=True,
            timeout=ANSWERS_WITHIN_S,
            check=True,
            encoding="utf-8",
        )
        name, total, free = answer.stdout.splitlines()[0].rsplit(",", 2)
        return Gpu(name=name.strip(), memory=Memory(total=int(total) * MIB, free=int(free) * MIB))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None  # a driver that does not answer is no GPU to count on
