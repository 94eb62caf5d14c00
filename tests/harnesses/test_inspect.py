"""Inspect 0.3.285, unmodified: a task with a tool, by its providers for chats, for messages and for
responses.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clients.conftest import process, server
from service.inference_fixtures import speaking
from service.recorded_responses import RECORDED, SAYS_TO_RESULTS, THINKS, own, sent_to

from halteres.models import TINY

from .captured import captured

pytestmark = pytest.mark.harnesses

REQUIREMENTS = ("inspect", "inspect-ai==0.3.285", "openai", "anthropic")


async def evaluated(python: str, folder: Path, *models: str) -> dict[str, Any]:
    """What the program tells of each model."""
    log = folder / "program.log"
    program = [python, Path(__file__).parent / "inspect_program.py", folder / "logs", *models]
    async with process(program, log, cwd=folder) as child, asyncio.timeout(180):
        assert await child.wait() == 0, log.read_text()[-4000:]
    return json.loads(log.read_text().splitlines()[-1])


async def test_a_task_with_a_tool_is_evaluated_by_each_provider(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    python = await asyncio.to_thread(client_python, *REQUIREMENTS)
    argv = ("--state", tmp_path / "service", "--model", TINY, "--threads", "1")
    async with server(
        "halteres.service", *argv, probe="/health", log=tmp_path / "service.log"
    ) as running:
        models = {
            "openai-api/halteres/halteres/tiny": f"{running.url}/v1",
            "openai/halteres/tiny": f"{running.url}/v1",
            # it takes what stands before a second slash for a cloud that serves Anthropic's models
            "anthropic/halteres--tiny": running.url,
        }
        told = await evaluated(python, tmp_path, *(one for pair in models.items() for one in pair))
    assert {name: one["status"] for name, one in told.items()} == dict.fromkeys(models, "success")


async def test_a_task_is_solved_with_a_tool_over_responses(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    """Its requests are those that tests/service replays."""
    python = await asyncio.to_thread(client_python, *REQUIREMENTS)
    async with speaking(tmp_path, THINKS, template=None) as (scene, speaker):
        speaker.says_to_results = SAYS_TO_RESULTS
        told = await evaluated(python, tmp_path, "openai/speaker", f"{scene.url}/v1")
        sent = sent_to(scene)
    found = told["openai/speaker"]
    assert (found["status"], found["correct"], found["said"]) == ("success", "C", SAYS_TO_RESULTS)
    assert found["roles"] == ["user", "assistant", "tool", "assistant"]
    assert "reasoning" in found["parts"]
    assert own(sent) == own(RECORDED["inspect-ai 0.3.285"])


@pytest.mark.parametrize(("keeps", "again"), [(True, None), (False, "template")])
async def test_its_episode_is_the_engines_tokens_over_responses(
    client_python: Callable[..., str], tmp_path: Path, keeps: bool, again: str | None
) -> None:
    """Within a session. The model's template has no place for the reasoning, which comes back."""
    python = await asyncio.to_thread(client_python, *REQUIREMENTS)
    async with captured(tmp_path, THINKS, SAYS_TO_RESULTS, keep_reasoning=keeps) as episode:
        told = await evaluated(python, tmp_path, "openai/gpt-5", episode.openai_base_url)
        nodes = await episode.nodes()
        await episode.check_tokens()
    assert told["openai/gpt-5"]["correct"] == "C", told
    assert [node["why_root"] for node in nodes] == ["first", again]
