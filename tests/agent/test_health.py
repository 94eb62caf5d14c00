"""rl_health_check and the doctor: the same findings, in few words."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from halteres.agent import health as checks
from halteres.agent.call import call
from halteres.agent.health import machine_checks
from halteres.agent.tool import Caller
from halteres.cli.main import app
from halteres.config import environ
from halteres.errors import InvalidConfig
from halteres.models import TINY
from halteres.runs.planning import resources

SMI = """#!/bin/sh
echo "NVIDIA H200, 143771, 143156"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    return tmp_path


async def health() -> dict[str, Any]:
    body = (await call("rl_health_check", {}, Caller())).body
    assert len(json.dumps(body, separators=(",", ":"))) / 4 <= 250
    return body


async def test_a_machine_that_is_ready_is_told_with_what_there_is(home: Path) -> None:
    (home / "policy.yaml").write_text("name: careful\n")
    told = await health()
    assert told["status"] == "ok" and "problems" not in told
    assert told["machine"].keys() == {"cores", "memory_gb", "free_gb", "gpu"}
    assert told["models"][0] == {"name": TINY, "fits": "yes", "proposed": True}
    assert (told["policy"], told["active_runs"], told["next"]) == (
        "careful",
        [],
        "rl_list_environments()",
    )


async def test_what_is_wrong_is_told_with_its_remedy(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "MIN_FREE_BYTES", 10**18)
    (home / "policy.yaml").write_text(yaml.safe_dump({"caps": {"max_stepps": 3}}))
    told = await health()
    assert (told["status"], told["policy"]) == ("degraded", "unreadable")
    assert told["next"] == "mend the problems, then rl_health_check()"
    disk, policy = told["problems"]
    assert disk.startswith("HALTERES_HOME: ") and "Make room" in disk
    assert policy.startswith("policy: ") and "max_stepps" in policy


async def test_an_answer_stays_short_whatever_there_is(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        checks, "PACKAGES", tuple(f"a-package-that-is-not-there-{i}" for i in range(9))
    )
    for number in range(12):
        folder = home / "models" / f"somebody/a-model-with-a-rather-long-name-{number}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    told = await health()
    assert len(told["models"]) <= 7 and len(told["problems"]) == 3


def test_the_doctor_prints_the_same_findings(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MIN_FREE_BYTES", 10**18)
    ended = CliRunner().invoke(app, ["doctor"])
    assert ended.exit_code == 1
    failed = [check.name for check in checks.machine_checks() if not check.ok]
    assert (
        [line.split()[1] for line in ended.output.splitlines() if line.startswith("NO")]
        == failed
        == ["HALTERES_HOME"]
    )


def test_free_memory_is_what_a_new_process_can_have_within_its_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(
        "MemTotal:       24000000 kB\nMemFree:          100000 kB\nMemAvailable:   20000000 kB\n"
    )
    alone = resources.main_memory(meminfo, tmp_path / "none")
    assert (alone.total, alone.free) == (24_000_000 * 1024, 20_000_000 * 1024)
    for name, text in (
        ("max", "8000000000\n"),
        ("current", "3000000000\n"),
        ("stat", "anon 1\ninactive_file 500000000\n"),
    ):
        (tmp_path / f"memory.{name}").write_text(text)
    contained = resources.main_memory(meminfo, tmp_path)
    assert (contained.total, contained.free) == (8_000_000_000, 5_500_000_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert resources.main_memory(meminfo, tmp_path) == alone


@pytest.mark.parametrize(("torch", "seen"), [("2.13.0", True), ("2.13.0+cpu", False)])
def test_a_gpu_counts_if_torch_can_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, seen: bool
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HALTERES_DEVICE", "cuda")
    monkeypatch.setattr(resources.importlib.metadata, "version", lambda package: torch)
    found = resources.this_machine().gpu
    assert (found is not None) is seen
    if found is not None:
        assert (found.name, found.memory.free) == ("NVIDIA H200", 143_156 << 20)
        assert resources.this_machine().model_memory == found.memory


def test_the_engine_takes_the_cpu_beside_a_gpu_unless_its_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its CUDA path is not verified yet; the check says so, and how to take it."""
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("HALTERES_DEVICE", raising=False)
    monkeypatch.setattr(resources.importlib.metadata, "version", lambda package: "2.13.0")
    assert (environ.device(), resources.this_machine().gpu) == ("cpu", None)
    told = next(check.found for check in machine_checks() if check.name == "machine")
    assert "NVIDIA H200" in told and "HALTERES_DEVICE=cuda" in told
    monkeypatch.setenv("HALTERES_DEVICE", "cuda")
    assert environ.device() == "cuda"
    monkeypatch.setenv("HALTERES_DEVICE", "tpu")
    with pytest.raises(InvalidConfig, match="HALTERES_DEVICE"):
        environ.check()


def test_a_driver_that_does_not_answer_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    smi.chmod(0o755)
    monkeypatch.setenv("HALTERES_DEVICE", "cuda")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(resources.importlib.metadata, "version", lambda package: "2.13.0")
    assert resources.this_machine().gpu is None


def test_a_gpu_that_is_asked_for_and_not_here_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_usable_gpu", lambda: None)
    assert "device" not in {check.name for check in machine_checks()}
    monkeypatch.setenv("HALTERES_DEVICE", "cuda")
    finding = next(check for check in machine_checks() if check.name == "device")
    assert not finding.ok and "cpu or auto" in finding.remedy


def test_a_home_that_lies_below_a_file_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "file" / "home"))
    (check,) = (check for check in machine_checks() if check.name == "HALTERES_HOME")
    assert not check.ok and check.found.endswith(f"{tmp_path / 'file'} is no folder")
