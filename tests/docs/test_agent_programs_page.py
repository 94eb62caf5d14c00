"""docs/agent-programs.md: its three files and its command train for a step, as typed; an agent's
calls and a loop of one's own play episodes on a run's policy.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from agent.calls_in_texts import calls_in_blocks, read_call
from agent.gateway_scene import KEY, gateway_of_a_run, play
from agent.run_fixtures import told
from deadlines import until

PAGE = (Path(__file__).parents[2] / "docs" / "agent-programs.md").read_text(encoding="utf-8")

SHORT = "run.name=page total_steps=1 env.batch_size=16 env.group_size=8 eval_tasks=1 eval_samples=1"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.runs
@pytest.mark.timeout(600)
def test_the_pages_files_and_command_train(tmp_path: Path) -> None:
    # The blocks of mini-swe-agent, behind these, are run by tests/harnesses.
    [tasks], [agent, reward, *_], [command, *_] = blocks("json"), blocks("python"), blocks("sh")
    files = {"tasks.jsonl": tasks * 8, "my_agent.py": agent, "reward.py": reward}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    edits = " ".join(f"--set {one}" for one in SHORT.split())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "HALTERES_HOME": str(tmp_path / "home"), "PATH": path}
    try:
        told = subprocess.run(
            ["bash", "-c", command.replace("gateway run", f"gateway run {edits}")],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=540,
        )
    finally:
        stop = [sys.executable, "-m", "halteres", "runs", "stop", "page"]
        subprocess.run(stop, env=variables, capture_output=True, timeout=60)
    assert told.returncode == 0, f"{told.stdout}\n{told.stderr}"
    [rollouts] = (tmp_path / "home" / "runs").glob("*/rollouts/step_1.jsonl")
    rows = rollouts.read_text(encoding="utf-8").splitlines()
    completions = [one for row in rows for one in json.loads(row)["completions"]]
    assert {one["score"] for one in completions} <= {0.0, 1.0}


def run_python(text: str, folder: Path, variables: dict[str, str]) -> None:
    program = [sys.executable, "-c", text]
    ended = subprocess.run(
        program, cwd=folder, env=variables, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.runs
async def test_the_pages_calls_and_its_loop_play_episodes_on_a_runs_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    section = PAGE.partition("## From an agent")[2]
    (opens, opening), (posts, reward) = map(read_call, calls_in_blocks(section))
    agent, _, loop, *_ = blocks("python")
    async with gateway_of_a_run(tmp_path) as scene:
        for _ in range(2):
            opened = await told(opens, **{**opening, "run_id": scene.run.run_id})
            await asyncio.to_thread(play, opened)
            scored = await told(posts, **{**reward, "session": opened["session"]})
            assert scored["state"] == "scored"
        (tmp_path / "my_agent.py").write_text(agent, encoding="utf-8")
        variables = {
            "PATH": os.environ["PATH"],
            "OPENAI_BASE_URL": f"{scene.service.url}/runs/{scene.run.run_id}/v1",
            "OPENAI_API_KEY": KEY,
        }
        await asyncio.to_thread(run_python, loop, tmp_path, variables)
        groups = scene.service.gateway.groups
        await until(lambda: len(groups.in_state("posted")) == 2)
        assert [one.name for one in groups.in_state("posted")] == ["sum-1", "sum-2"]
