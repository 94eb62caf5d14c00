"""Where unmodified harnesses run: a Python for them, each in an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from clients.conftest import ROOT, client_python

__all__ = ["client_python"]  # the fixture

PYTHON = "3.12"


def python_for_harnesses() -> str | None:
    """One that verifiers and the small environments that its harnesses make run on."""
    beside = sorted(Path.home().glob(f".pyenv/versions/{PYTHON}.*/bin/python"))
    for one in (shutil.which(f"python{PYTHON}"), *map(str, beside)):
        if one is not None and subprocess.run([one, "-c", ""], capture_output=True).returncode == 0:
            return one
    return None


@pytest.fixture(scope="session")
def verifiers() -> Path:
    """The folder of commands of an environment with verifiers 0.4.0, renderers 0.1.12 and uv."""
    python = python_for_harnesses()
    if python is None:
        pytest.skip(f"Python {PYTHON} is not installed here")
    command = [
        str(ROOT / "scripts" / "client"),
        "verifiers",
        *("verifiers==0.4.0", "renderers==0.1.12", "uv"),
    ]
    made = subprocess.run(
        command,
        env={**os.environ, "PYTHON": python},
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
    )
    if made.returncode != 0:
        pytest.skip("verifiers could not be installed: scripts/client says why")
    return Path(made.stdout.strip()).parent
