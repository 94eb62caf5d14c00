"""OpenAI's Agents SDK 0.24.0, unmodified, over chat completions and over responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from clients.conftest import process, server
from service.inference_fixtures import speaking
from service.recorded_responses import RECORDED, SAYS_TO_RESULTS, THINKS, own, sent_to

from halteres.models import TINY

from .captured import captured

pytestmark = pytest.mark.harnesses

PROGRAM = Path(__file__).parent / "agents_program.py"
REQUIREMENTS = ("agents-sdk", "openai-agents==0.24.0")


def of_service(url: str) -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "tml-test"}


async def test_an_agent_with_a_tool_names_the_model_without_a_slash(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    """The SDK takes what stands before a slash for a provider."""
    python = await asyncio.to_thread(client_python, *REQUIREMENTS)
    argv = ("--state", tmp_path / "service", "--model", TINY, "--threads", "1")
    log = tmp_path / "program.log"
    async with server(
        "halteres.service", *argv, probe="/health", log=tmp_path / "service.log"
    ) as running:
        for api in ("chat_completions", "responses"):
            asked = [python, PROGRAM, api, "halteres--tiny", "halteres/tiny"]
            variables = of_service(running.url)
            async with process(asked, log, env=variables) as child, asyncio.timeout(120):
                assert await child.wait() == 0, log.read_text()[-4000:]
            told = json.loads(log.read_text().splitlines()[-1])
            assert all(isinstance(said, str) for said in told["halteres--tiny"]["said"]), told
            assert "Unknown prefix: halteres" in told["halteres/tiny"]


async def test_an_agent_calls_its_tool_over_responses(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    """Its requests are those that tests/service replays."""
    python = await asyncio.to_thread(client_python, *REQUIREMENTS)
    log = tmp_path / "program.log"
    async with speaking(tmp_path, THINKS, template=None) as (scene, speaker):
        speaker.says_to_results = SAYS_TO_RESULTS
        async with (
            process(
                [python, PROGRAM, "responses", "speaker"], log, env=of_service(scene.url)
            ) as child,
            asyncio.timeout(120),
        ):
            assert await child.wait() == 0, log.read_text()[-4000:]
        sent = sent_to(scene)
    told = json.loads(log.read_text().splitlines()[-1])
    assert told["sums"] == [42, 42]
    assert told["speaker"]["said"] == [SAYS_TO_RESULTS] * 2, told
    items = ["reasoning_item", "message_output_item", "tool_call_item", "tool_call_output_item"]
    assert told["speaker"]["items"] == [[*items, "message_output_item"]] * 2
    assert "raw_response_event" in told["speaker"]["events"]
    assert own(sent) == own(RECORDED["openai-agents 0.24.0"])


async def test_its_episodes_are_the_engines_tokens_over_responses(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    """Within one session: an agent whose tool is called, and the same once more, streamed."""
    python = await asyncio.to_thread(client_python, *REQUIREMENTS)
    log = tmp_path / "program.log"
    async with captured(tmp_path, THINKS, SAYS_TO_RESULTS, keep_reasoning=True) as episode:
        program = [python, PROGRAM, "responses", "gpt-5"]
        async with (
            process(program, log, env=episode.variables) as child,
            asyncio.timeout(120),
        ):
            assert await child.wait() == 0, log.read_text()[-4000:]
        nodes = await episode.nodes()
        await episode.check_tokens()
    told = json.loads(log.read_text().splitlines()[-1])
    assert told["gpt-5"]["said"] == [SAYS_TO_RESULTS] * 2, told
    assert [node["why_root"] for node in nodes] == ["first", None] * 2
