"""Inspect 0.3.285, unmodified: a task with a tool, by its providers for chats and for messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from clients.conftest import process, server

from halteres.models import TINY

pytestmark = pytest.mark.harnesses


async def test_a_task_with_a_tool_is_evaluated_by_each_provider(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    requirements = ("inspect-ai==0.3.285", "openai", "anthropic")
    python = await asyncio.to_thread(client_python, "inspect", *requirements)
    argv = ("--state", tmp_path / "service", "--model", TINY, "--threads", "1")
    log = tmp_path / "program.log"
    async with server(
        "halteres.service", *argv, probe="/health", log=tmp_path / "service.log"
    ) as running:
        program = [python, Path(__file__).parent / "inspect_program.py", running.url]
        async with (
            process([*program, tmp_path / "logs"], log, cwd=tmp_path) as child,
            asyncio.timeout(180),
        ):
            assert await child.wait() == 0, log.read_text()[-4000:]
    told = json.loads(log.read_text().splitlines()[-1])
    assert set(told.values()) == {"success"}, told
    assert len(told) == 2
