"""The client program, run inside the environment of some SDK version.

Owns: how the program is started and how its report reads.
Never: starts the service.
"""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

VERSIONS = (
    "0.3.0",
    "0.9.0",
    "0.14.0",
    "0.18.2",
    "0.22.7",
    "0.25.0",
    "0.27.2",
    "0.30.4",
    "0.33.1",
    "0.36.0",
    "0.38.0",
)
"""One SDK of every generation that differs on the wire, oldest first."""

RUN_S = 420


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the program reported."""

    sdk: str
    steps: list[dict[str, Any]]
    said: str  # its standard error

    @property
    def failed(self) -> list[str]:
        """One line per step that is not ok."""
        return [f"{step['name']}: {step['error']}" for step in self.steps if not step["ok"]]


def environment(version: str) -> str:
    """The interpreter of a cached environment with this SDK.

    Raises:
        CalledProcessError: it could not be installed.
    """
    # the only one that asks for it: else pip takes gigabytes of CUDA
    torch = ["torch"] if version == "0.3.0" else []
    command = [ROOT / "scripts" / "client", f"tinker-{version}", f"tinker=={version}", *torch]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=900
    ).stdout.strip()


def drive(python: str, url: str, *, model: str, folder: Path, report: Path) -> Outcome:
    """Run the program with that interpreter against a service.

    torch is looked for in our own environment where the SDK's has none: most SDKs can do without
    it.
    """
    argv = [python, "-m", "program", "--report", report, "--model", model, "--folder", folder]
    argv += ["--also", sysconfig.get_paths()["purelib"]]
    variables = {
        **os.environ,
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-contract",
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(report.parent / "huggingface"),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    ended = subprocess.run(
        list(map(str, argv)), cwd=HERE, env=variables, capture_output=True, text=True, timeout=RUN_S
    )
    if not report.is_file():
        raise RuntimeError(
            "The program wrote no report and ended with "
            f"{ended.returncode}:\n{ended.stderr[-4000:]}"
        )
    told = json.loads(report.read_text())
    return Outcome(told["sdk"], told["steps"], ended.stderr)
