"""The scene of other people's scripts: the built-in model under a name that they know, a service,
and no network.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from halteres.models import TINY

from .conftest import Server, process, server

NAME = "Qwen/Qwen3-4B-Instruct-2507"
"""tinker-cookbook 0.6.1 knows a renderer for it, and seed 003 defaults to it."""

SCRIPT_S = 160.0


def register(home: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """A home and a Hugging Face cache of the test's own, where the built-in model has these names
    (default: NAME).
    """
    monkeypatch.setenv("HALTERES_HOME", str(home))
    monkeypatch.setenv("HF_HOME", str(home / "hugging-face"))
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    for name in names or (NAME,):
        subprocess.run(
            [sys.executable, "-m", "halteres", "models", "add", TINY, "--as", name],
            check=True,
            timeout=60,
        )


@asynccontextmanager
async def service(folder: Path, *options: Any) -> AsyncIterator[Server]:
    """`halteres serve --model NAME`, with these options besides."""
    argv = ("--state", folder / "service", "--model", NAME, "--threads", "1", *options)
    async with server(
        "halteres.service", *argv, probe="/api/v1/healthz", log=folder / "service.log"
    ) as running:
        yield running


async def script(
    python: str, *argv: Any, url: str, log: Path, cwd: Path, ends: int = 0, **variables: str
) -> str:
    """What somebody's program printed, run to its end in an environment of its own."""
    told = {
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-test",
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "NO_PROXY": os.environ.get("NO_PROXY", "") + ",127.0.0.1",
        **variables,
    }
    log.unlink(missing_ok=True)
    async with process([python, *argv], log, env=told, cwd=cwd) as child:
        async with asyncio.timeout(SCRIPT_S):
            code = await child.wait()
    printed = log.read_text()
    assert code == ends, printed[-4000:]
    return printed
