"""Kernels with which a row of a matmul has the same bits whatever rows stand beside it.

The engine's promise rests on them: sampler and trainer agree to the bit, and a request that is
computed again has the answer that it had. `same_bits` tries whether it holds.

MKL on AMD has such kernels by itself, from 4 rows on. On Intel its sums change with the number of
rows, unless strict reproducibility is asked for (measured on a Sapphire Rapids core: 81 instead of
104 GFLOP/s with 8 rows, no slower from 32 on). oneDNN's bfloat16 kernels on AMX tiles split sums by
the number of rows, those on AVX-512 do not; they have a fifteenth of the speed with 2,048 rows.
Whoever prefers the speed sets ONEDNN_MAX_CPU_ISA=ALL, and has an engine that is not exact.

Source: Intel oneMKL developer guide, "Obtaining Numerically Reproducible Results"; oneDNN developer
guide, "CPU Dispatcher Control".
"""

from __future__ import annotations

from pathlib import Path

from halteres.config import environ

CPU_INFO = Path("/proc/cpuinfo")


def reproducible(cpu_info: str) -> dict[str, str]:
    """The environment variables that choose these kernels on this processor.

    Args:
        cpu_info: the text of /proc/cpuinfo.
    """
    found: dict[str, str] = {}
    if "GenuineIntel" in cpu_info:
        found["MKL_CBWR"] = "AUTO,STRICT"
    if "amx_bf16" in cpu_info:
        found["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    return found


def choose() -> None:
    """Choose them for this process, but for what its environment says already. MKL and oneDNN read
    it when they compute for the first time.
    """
    try:
        cpu_info = CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        # no Linux: nothing is known of its kernels
        return
    environ.prefer(reproducible(cpu_info))
