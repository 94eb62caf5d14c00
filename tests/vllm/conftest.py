"""A real vLLM, where its environment is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDERS = Path(__file__).parents[2] / ".venvs"


@pytest.fixture(scope="session")
def vllm_command() -> str:
    """The command of `vllm serve`, and what makes it start sooner."""
    given = os.environ.get("VLLM")
    found = [given] if given else sorted(map(str, FOLDERS.glob("vllm-*/bin/vllm")))
    if not found or not Path(found[-1]).exists():
        pytest.skip("vLLM's environment is missing: make test-vllm makes it")
    return f"{found[-1]} --enforce-eager"
