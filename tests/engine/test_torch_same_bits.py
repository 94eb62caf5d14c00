"""An engine is exact where its processor's kernels are: they are chosen so, and tried."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from halteres.engine.torch import cpu_kernels, same_bits
from halteres.engine.torch.loading import load_base

from .torch_fixtures import DTYPE

TRIED = """
import sys
from pathlib import Path
from halteres.engine.torch import same_bits
from halteres.engine.torch.loading import load_base
import torch
torch.set_num_threads(1)
base = load_base(Path(sys.argv[1]), getattr(torch, sys.argv[2]), torch.device("cpu"))
print(same_bits.is_exact(base))
"""


def tried(folder: Path, dtype: str, **environment: str) -> str:
    """What a fresh process says, which has chosen nothing yet."""
    clean = {name: value for name, value in os.environ.items() if name not in CHOSEN}
    return subprocess.run(
        [sys.executable, "-c", TRIED, str(folder), dtype],
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.strip()


CHOSEN = ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_that_are_chosen_give_a_row_the_same_bits_among_any_others(
    model_folder: Path, dtype: str
) -> None:
    assert tried(model_folder, dtype) == "True"


def test_kernels_are_chosen_on_processors_of_intel_and_those_with_amx_alone() -> None:
    amd, xeon = "vendor_id : AuthenticAMD\nflags : avx512f", "vendor_id : GenuineIntel\nflags : "
    assert cpu_kernels.reproducible(amd) == {}
    assert cpu_kernels.reproducible(xeon) == {"MKL_CBWR": "AUTO,STRICT"}
    assert cpu_kernels.reproducible(f"{xeon} amx_bf16") == {
        "MKL_CBWR": "AUTO,STRICT",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    }


def test_what_an_operator_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text("GenuineIntel amx_bf16", encoding="utf-8")
    monkeypatch.setattr(cpu_kernels, "CPU_INFO", cpu_info)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "ALL")
    monkeypatch.delenv("MKL_CBWR", raising=False)
    cpu_kernels.choose()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "ALL"
    assert os.environ["MKL_CBWR"] == "AUTO,STRICT"


@pytest.mark.parametrize("kernel", ["linear", "unrounded", "reduced", "weighted"])
def test_an_engine_whose_kernels_differ_by_rows_is_not_exact_and_the_log_says_so(
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kernel: str,
) -> None:
    base = load_base(model_folder, getattr(torch, DTYPE), torch.device("cpu"))
    exact = getattr(same_bits, kernel)

    def by_rows(rows: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        """The last bits are others where there are few rows."""
        found = exact(rows, *rest)
        return found * (1 + 2**-7) if rows.shape[-2] == same_bits.FEWER[0] else found

    assert same_bits.is_exact(base)
    monkeypatch.setattr(same_bits, kernel, by_rows)
    assert not same_bits.is_exact(base)
    assert "is not exact" in caplog.text
