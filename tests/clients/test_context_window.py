"""Unmodified clients take a prompt that is too long for an overflow, each by its own words."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from contract.requirements import proves

from halteres.models import TINY

from .conftest import ROOT, process, server
from .registered import NAME, register, script, service
from .test_cookbook import REQUIREMENTS

pytestmark = pytest.mark.clients

HERE = Path(__file__).parent


@proves("inference:overflow")
async def test_litellm_raises_its_error_of_the_context_window_and_sends_tools(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    python = await asyncio.to_thread(client_python, "litellm", "litellm==1.110.2")
    argv = ("--state", tmp_path / "service", "--engine", "scripted", "--model", TINY)
    log = tmp_path / "program.log"
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", **os.environ}
    async with (
        server("halteres.service", *argv, probe="/health", log=tmp_path / "service.log") as running,
        process([python, HERE / "litellm_program.py", running.url], log, env=offline) as child,
        asyncio.timeout(120),
    ):
        assert await child.wait() == 0, log.read_text()[-4000:]
    told = json.loads(log.read_text().splitlines()[-1])
    for provider in ("openai", "hosted_vllm", "anthropic"):
        assert told[provider]["long"] == "ContextWindowExceededError", provider
        assert told[provider]["short"] in ("stop", "length"), provider
        assert told[provider]["tools"] in ("stop", "length", "tool_calls"), provider


@proves("sample:max-tokens")
async def test_the_cookbooks_capture_proxy_answers_an_overflow_with_400(
    client_python: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(tmp_path / "home", monkeypatch)
    python = await asyncio.to_thread(client_python, "cookbook", *REQUIREMENTS)
    command = [ROOT / "scripts" / "sources", "tinker-cookbook", "0.6.1"]
    sources = await asyncio.to_thread(subprocess.check_output, command, text=True, timeout=600)
    async with service(tmp_path, "--engine", "scripted") as running:
        printed = await script(
            python,
            HERE / "capture_proxy_program.py",
            NAME,
            url=running.url,
            log=tmp_path / "script.log",
            cwd=tmp_path,
            PYTHONPATH=sources.strip(),
        )
    told = json.loads(printed.splitlines()[-1])
    assert told.keys() == {"/v1/messages", "/v1/chat/completions"}
    for path, seen in told.items():
        assert seen["short"][0] == 200, path
        status, kind, sentence = seen["long"]
        assert (status, kind) == (400, "invalid_request_error"), path
        assert "prompt is too long" in sentence, path
