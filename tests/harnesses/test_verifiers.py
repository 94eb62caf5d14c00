"""verifiers 0.4.0, unmodified: rollouts of its harnesses, sampled by our service."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from clients.conftest import ROOT, Server, process
from clients.registered import NAME, register, service

from .captured import captured

pytestmark = pytest.mark.harnesses

HERE = Path(__file__).parent

EVALUATION = (
    *("-n", "1", "--no-push", "--no-rich"),
    *("--env.agent.runtime.type", "subprocess", "--sampling.max-tokens", "200"),
)
TRAIN = (
    *("--client.type", "train", "--client.renderer.name", "default"),
    *("--client.renderer.tool-parser", "qwen3"),
)

CALLS = (
    "I add.\n<tool_call>\n"
    '{"name": "bash", "arguments": {"command":"echo $((9 + 8)), as it is"}}\n</tool_call>'
)
PRINTED = "17, as it is"
"""What that command prints."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A service under a name that verifiers finds a tokenizer for, and what its commands need."""

    folder: Path
    commands: Path

    async def rollouts(
        self, base_url: str, harness: str, *client: str, count: int = 4, key: str = "tml-test"
    ) -> list[Any]:
        """The traces of rollouts of one task."""
        folder, log = self.folder / "out", self.folder / "eval.log"
        argv = (
            *(self.commands / "vf-eval", "tiny_sums", "-m", NAME, "-r", count, *EVALUATION),
            *("--env.agent.harness.id", harness, *client),
            *("--client.base-url", base_url, "-o", folder),
        )
        variables = {
            "PATH": f"{self.commands}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(HERE / "tasksets"),
            "PRIME_API_KEY": key,
            "HOME": str(self.folder),
            # each harness makes a small environment; what it needs is fetched once
            "UV_CACHE_DIR": str(ROOT / ".venvs" / "uv-cache"),
        }
        async with process(argv, log, env=variables, cwd=self.folder) as child:
            async with asyncio.timeout(300):
                assert await child.wait() == 0, log.read_text()[-4000:]
        [traces] = folder.rglob("traces.jsonl")
        episodes = [json.loads(line) for line in traces.read_text().splitlines()]
        assert [episode["errors"] for episode in episodes] == [[]] * count, log.read_text()[-4000:]
        return [trace for episode in episodes for trace in episode["traces"]]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verifiers: Path) -> Scene:
    register(tmp_path / "home", monkeypatch)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return Scene(tmp_path, verifiers)


async def drawn_again(running: Server, state: Path) -> list[list[int]]:
    """Prompt and answer of every request of the journal, the answer sampled anew from its seed."""
    with sqlite3.connect(f"file:{state}/journal.sqlite?mode=ro", uri=True) as journal:
        rows = journal.execute(
            "SELECT body, drawn FROM requests WHERE kind = 'generate'"
        ).fetchall()
    journal.close()
    told = list[list[int]]()
    async with aiohttp.ClientSession() as http:
        for raw, drawn in rows:
            body = json.loads(raw)
            body["sampling_params"]["seed"] = json.loads(drawn)["seed"]
            async with http.post(f"{running.url}/inference/v1/generate", json=body) as response:
                answer = await response.json()
            told.append(body["token_ids"] + answer["choices"][0]["token_ids"])
    return told


async def test_the_tokens_of_the_null_harness_are_those_of_the_journal(scene: Scene) -> None:
    """By the train client: four rollouts of one task, each prompt and each answer."""
    async with service(scene.folder) as running:
        traces = await scene.rollouts(f"{running.url}/v1", "null", *TRAIN)
        known = await drawn_again(running, scene.folder / "service")
    told = [[token for node in trace["nodes"] for token in node["token_ids"]] for trace in traces]
    assert len(told) == 4
    assert sorted(told) == sorted(known)
    assert all(set(trace["rewards"]) == {"right"} for trace in traces)


@pytest.mark.parametrize("client", [("--client.type", "eval"), TRAIN], ids=["eval", "train"])
async def test_the_bash_harness_is_answered_with_its_tools(
    scene: Scene, client: tuple[str, ...]
) -> None:
    """The built-in model's template has no place for them: our service tells them in words."""
    async with service(scene.folder) as running:
        traces = await scene.rollouts(f"{running.url}/v1", "bash", *client)
    assert [trace["stop_condition"] for trace in traces] == ["agent_completed"] * 4
    assert all(trace["tools"] for trace in traces)


@pytest.mark.parametrize("client", [("--client.type", "eval"), TRAIN], ids=["eval", "train"])
async def test_an_episode_of_the_null_harness_is_the_engines_tokens(
    scene: Scene, client: tuple[str, ...]
) -> None:
    """Within a session, whose addresses and key are all that it is given."""
    async with captured(scene.folder, "It is \\boxed{17}.") as episode:
        [trace] = await scene.rollouts(
            episode.openai_base_url, "null", *client, count=1, key=episode.key
        )
        nodes = await episode.nodes()
        await episode.check_tokens()
    assert trace["rewards"]["right"]["score"] == 1.0
    assert [node["why_root"] for node in nodes] == ["first"]


@pytest.mark.parametrize("client", [("--client.type", "eval"), TRAIN], ids=["eval", "train"])
async def test_an_episode_of_the_bash_harness_is_the_engines_tokens(
    scene: Scene, client: tuple[str, ...]
) -> None:
    """Within a session: a command, and an answer to what it printed."""
    async with captured(scene.folder, CALLS, "It is \\boxed{17}.") as episode:
        episode.speaker.result_mark = PRINTED
        [trace] = await scene.rollouts(
            episode.openai_base_url, "bash", *client, count=1, key=episode.key
        )
        nodes = await episode.nodes()
        await episode.check_tokens()
    assert trace["rewards"]["right"]["score"] == 1.0
    # The train client's default renderer writes the whole history again, in tokens of its own.
    again = "first" if client == TRAIN else None
    assert [node["why_root"] for node in nodes] == ["first", again]


async def test_an_overflow_starts_the_compaction_of_chat_programs(scene: Scene) -> None:
    log = scene.folder / "program.log"
    async with service(scene.folder, "--engine", "scripted") as running:
        argv = [scene.commands / "python", HERE / "overflow_program.py", running.url]
        async with process(argv, log) as child, asyncio.timeout(120):
            assert await child.wait() == 0, log.read_text()[-4000:]
    assert json.loads(log.read_text().splitlines()[-1]) == {"threshold": 1024, "overflow": True}
