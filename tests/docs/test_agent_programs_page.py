"""docs/agent-programs.md: its three files and its command train for a step, as typed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
