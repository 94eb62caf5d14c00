"""Codex 0.171.0, unmodified: a turn with a command of its shell tool, over responses."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from clients.conftest import ROOT, process
from service.inference_fixtures import speaking
from service.recorded_responses import RECORDED, SAYS_TO_RESULTS, sent_to

pytestmark = [
    pytest.mark.harnesses,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm, which brings it, is missing"),
]

SAYS = """Let me see.
<tool_call>
{"name": "exec_command", "arguments": {"cmd": "echo $((17 + 25))"}}
</tool_call>"""

# Tools of other types than function cannot be served: they are turned off.
OPTIONS = ("-c", 'web_search="disabled"', "--disable", "multi_agent", "--disable", "goals")
SETTINGS = """
model = "speaker"
model_provider = "halteres"
[model_providers.halteres]
name = "halteres"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


@pytest.fixture(scope="session")
def codex() -> Path:
    """Its command."""
    install = [ROOT / "scripts" / "npm-client", "@openai/codex@0.171.0"]
    made = subprocess.run(install, stdout=subprocess.PIPE, text=True, timeout=600)
    if made.returncode != 0:
        pytest.skip("@openai/codex could not be fetched from the npm registry")
    return Path(made.stdout.strip()) / "codex"


async def turn(codex: Path, url: str, folder: Path) -> list[dict[str, Any]]:
    """What one turn prints."""
    home = folder / "codex"
    home.mkdir()
    (home / "config.toml").write_text(SETTINGS.format(url=url))
    command = [codex, "exec", "--skip-git-repo-check", "--json", "-s", "danger-full-access"]
    log = folder / "codex.log"
    async with (
        process(
            [*command, *OPTIONS, "What is 17 + 25?"],
            log,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            env={"CODEX_HOME": str(home), "HOME": str(home), "PATH": os.environ["PATH"]},
        ) as child,
        asyncio.timeout(120),
    ):
        await child.wait()
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


async def test_a_turn_runs_a_command_and_says_what_came_of_it(codex: Path, tmp_path: Path) -> None:
    """Its requests have the form of those that tests/service replays."""
    async with speaking(tmp_path, SAYS, template=None, context=32768) as (scene, speaker):
        speaker.says_to_results = SAYS_TO_RESULTS
        told = await turn(codex, scene.url, tmp_path)
        sent = sent_to(scene)
    items = [one["item"] for one in told if one["type"] == "item.completed"]
    said = [item["text"] for item in items if item["type"] == "agent_message"]
    [ran] = [item for item in items if item["type"] == "command_execution"]
    assert (said, ran["aggregated_output"]) == (["Let me see.", SAYS_TO_RESULTS], "42\n"), told
    assert told[-1]["type"] == "turn.completed"
    assert [form(body) for body in sent] == [form(body) for body in RECORDED["codex 0.171.0"]]


def form(body: dict[str, Any]) -> list[Any]:
    """Fields, items and tools of a request, without what they say; the recorded model thought, too."""
    items = [item["type"] for item in body["input"] if item["type"] != "reasoning"]
    return [sorted(body), items, [tool["name"] for tool in body["tools"]]]


async def test_it_knows_that_its_conversation_is_too_long(codex: Path, tmp_path: Path) -> None:
    async with speaking(tmp_path, SAYS, template=None, context=2048) as (scene, _):
        told = await turn(codex, scene.url, tmp_path)
    assert told[-1]["type"] == "turn.failed"
    assert "ran out of room in the model's context window" in told[-1]["error"]["message"]
