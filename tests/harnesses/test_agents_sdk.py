"""OpenAI's Agents SDK 0.24.0, unmodified, over chat completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from clients.conftest import process, server

from halteres.models import TINY

pytestmark = pytest.mark.harnesses


async def test_an_agent_with_a_tool_names_the_model_without_a_slash(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    """The SDK takes what stands before a slash for a provider."""
    python = await asyncio.to_thread(client_python, "agents-sdk", "openai-agents==0.24.0")
    argv = ("--state", tmp_path / "service", "--model", TINY, "--threads", "1")
    log = tmp_path / "program.log"
    async with server(
        "halteres.service", *argv, probe="/health", log=tmp_path / "service.log"
    ) as running:
        program = Path(__file__).parent / "agents_program.py"
        async with process([python, program, running.url], log) as child, asyncio.timeout(120):
            assert await child.wait() == 0, log.read_text()[-4000:]
    told = json.loads(log.read_text().splitlines()[-1])
    assert told["halteres--tiny"] == "str"
    assert "Unknown prefix: halteres" in told["halteres/tiny"]
