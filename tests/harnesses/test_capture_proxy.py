"""The capture proxy of tinker-cookbook 0.6.1, unmodified.

It samples through the Tinker SDK, and captures itself: no session of the gateway is below it, since
those are not paths of the Tinker API.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from clients.conftest import ROOT
from clients.registered import NAME, register, script
from clients.test_cookbook import REQUIREMENTS
from service.gateway.episodes import EngineTap
from service.inference_fixtures import speaking

pytestmark = pytest.mark.harnesses


async def test_what_it_captures_are_the_engines_tokens(
    client_python: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes of two turns, over chat completions and over messages."""
    register(tmp_path / "home", monkeypatch)
    python = await asyncio.to_thread(client_python, "cookbook", *REQUIREMENTS)
    command = [ROOT / "scripts" / "sources", "tinker-cookbook", "0.6.1"]
    sources = await asyncio.to_thread(subprocess.check_output, command, text=True, timeout=600)
    async with speaking(tmp_path, "Let me add. It is 42.", template=None) as (scene, speaker):
        speaker.varied = np.random.default_rng(0)
        tap = EngineTap(scene)
        printed = await script(
            python,
            Path(__file__).parent / "capture_proxy_program.py",
            scene.service.base.name,
            NAME,
            url=scene.url,
            log=tmp_path / "script.log",
            cwd=tmp_path,
            PYTHONPATH=sources.strip(),
        )
    found = json.loads(printed.splitlines()[-1])
    assert len(found) == 4
    assert found == [[one.prompt, one.tokens, one.logprobs] for one in tap.samplings]
