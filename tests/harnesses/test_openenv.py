"""OpenEnv 0.10.0, unmodified: whether its capture server can train on what our service samples."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clients.conftest import process, server

from halteres.models import TINY

pytestmark = pytest.mark.harnesses

TRAINABLE = {"ok": True, "capture_level": "tokens", "logprobs_mode": "processed"}
EVALUATED = {"ok": False, "capture_level": "logprobs", "logprobs_mode": "raw"}


@pytest.mark.parametrize(
    ("kind", "expected"), [("tempered", TRAINABLE), ("raw", EVALUATED)], ids=["tempered", "raw"]
)
async def test_its_probe_takes_the_service_for_trainable_with_tempered_log_probabilities(
    kind: str, expected: dict[str, Any], client_python: Callable[..., str], tmp_path: Path
) -> None:
    """It sends tools, and compares the likeliest tokens at two temperatures."""
    python = await asyncio.to_thread(client_python, "openenv", "openenv==0.10.0")
    argv = ("--state", tmp_path / "service", "--model", TINY, "--sample-logprobs", kind)
    log = tmp_path / "program.log"
    async with server(
        "halteres.service", *argv, probe="/health", log=tmp_path / "service.log"
    ) as running:
        program = Path(__file__).parent / "openenv_program.py"
        async with process([python, program, running.url], log) as child, asyncio.timeout(120):
            assert await child.wait() == 0, log.read_text()[-4000:]
    told = json.loads(log.read_text().splitlines()[-1])
    assert told.items() >= expected.items()
    # the tools were taken; the built-in model answers in prose
    assert told["tool_support"] in ("ok", "no-tool-call")
