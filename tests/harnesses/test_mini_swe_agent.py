"""mini-swe-agent 2.4.6, unmodified: it acts by calls of its one tool, `bash`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from clients.conftest import ROOT, process
from service.inference_fixtures import TOKENIZER, speaking

from .captured import captured

pytestmark = pytest.mark.harnesses

REQUIREMENTS = ("mini-swe-agent", "mini-swe-agent==2.4.6")

COMMAND = (
    "test -f seen && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT || { touch seen; echo first; }"
)


def saying(command: str) -> str:
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"I look.\n<tool_call>\n{call}\n</tool_call>"


SAYS = saying(COMMAND)

MENDS = saying("sed -i s/-/+/ sums.py && python3 test_sums.py && echo it passes")
SUBMITS = saying("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")

REPOSITORY = {
    "sums.py": "def add(a, b):\n    return a - b\n",
    "test_sums.py": "from sums import add\n\nassert add(3, 4) == 7\n",
}
TASK = "test_sums.py fails. Mend sums.py."

PAGE = (ROOT / "docs" / "agent-programs.md").read_text(encoding="utf-8").partition("## mini-swe")[2]
"""What a reader finds there of this agent."""

SHORT = "run.name=mini total_steps=1 env.batch_size=4 env.group_size=4 eval_tasks=1 eval_samples=1"


def variables_of(folder: Path) -> dict[str, str]:
    """What its processes have: a home of their own, nothing fetched."""
    return {
        "MSWEA_GLOBAL_CONFIG_DIR": str(folder / "config"),
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def block(language: str) -> str:
    """The page's one block in this language."""
    [found] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return found


def repository(folder: Path) -> Path:
    """A toy repository whose test fails."""
    made = folder / "repository"
    made.mkdir()
    for name, text in REPOSITORY.items():
        (made / name).write_text(text, encoding="utf-8")
    return made


async def test_its_calls_are_read_and_their_results_told_where_the_template_has_no_place_for_tools(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    """The model says one call again and again: the first time it leaves a file, then it submits."""
    python = await asyncio.to_thread(client_python, *REQUIREMENTS)
    folder, log = tmp_path / "work", tmp_path / "program.log"
    folder.mkdir()
    async with speaking(tmp_path / "service", SAYS, template=None) as (scene, speaker):
        program = [python, Path(__file__).parent / "mini_swe_program.py"]
        argv = [*program, scene.url, scene.service.base.name, folder]
        async with (
            process(argv, log, env=variables_of(tmp_path), cwd=tmp_path) as child,
            asyncio.timeout(180),
        ):
            assert await child.wait() == 0, log.read_text()[-4000:]
    told = json.loads(log.read_text().splitlines()[-1])
    assert told == {"exit_status": "Submitted", "calls": 2}
    first, second = [TOKENIZER.decode(one, skip_special_tokens=False) for one in speaker.prompts]
    assert '"name": "bash"' in first and "<tool_response>" not in first
    assert SAYS in second and "first" in second.partition("<tool_response>")[2]


async def test_an_episode_in_a_toy_repository_is_the_engines_tokens(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    """Its command, within a session, with its own long prompt: it mends the repository, submits."""
    python = await asyncio.to_thread(client_python, *REQUIREMENTS)
    work, log = repository(tmp_path), tmp_path / "program.log"
    async with captured(tmp_path, MENDS, SUBMITS) as episode:
        arguments = ("-m", "openai/policy", "-t", TASK, "-y", "--exit-immediately")
        argv = [Path(python).parent / "mini", *arguments, "-o", tmp_path / "trajectory.json"]
        costs = {"MSWEA_COST_TRACKING": "ignore_errors"}
        variables = {**variables_of(tmp_path), **costs, **episode.variables}
        async with (
            process(argv, log, env=variables, cwd=work, stdin=subprocess.DEVNULL) as child,
            asyncio.timeout(180),
        ):
            assert await child.wait() == 0, log.read_text()[-4000:]
        nodes = await episode.nodes()
        await episode.check_tokens()
    written = json.loads((tmp_path / "trajectory.json").read_bytes())
    assert written["info"]["exit_status"] == "Submitted"
    assert (work / "sums.py").read_text(encoding="utf-8").endswith("return a + b\n")
    assert [node["why_root"] for node in nodes] == ["first", None]


@pytest.mark.timeout(900)
async def test_the_pages_command_trains_it_for_a_step(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    """The built-in model behind it, as docs/agent-programs.md says."""
    python = await asyncio.to_thread(client_python, *REQUIREMENTS)
    repository(tmp_path)
    for name, language in (("short.yaml", "yaml"), ("reward.py", "python")):
        (tmp_path / name).write_text(block(language), encoding="utf-8")
    tasks = [{"task": TASK}, {"task": "Correct sums.py, so that test_sums.py passes."}]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)), encoding="utf-8")
    edits = " ".join(f"--set {one}" for one in SHORT.split())
    places = (Path(sys.executable).parent, Path(python).parent, os.environ["PATH"])
    variables = {
        "HALTERES_HOME": str(tmp_path / "home"),
        "HOME": str(tmp_path),
        "PATH": os.pathsep.join(map(str, places)),
    }
    log, shown = tmp_path / "run.log", tmp_path / "stop.log"
    command = block("sh").replace("gateway run", f"gateway run {edits}")
    try:
        async with process(["bash", "-ec", command], log, env=variables, cwd=tmp_path) as child:
            async with asyncio.timeout(780):
                assert await child.wait() == 0, log.read_text()[-4000:]
    finally:
        stop = [sys.executable, "-m", "halteres", "runs", "stop", "mini"]
        async with process(stop, shown, env=variables) as child, asyncio.timeout(60):
            await child.wait()
    assert "failed" not in log.read_text()
    [rollouts] = (tmp_path / "home" / "runs").glob("*/rollouts/step_1.jsonl")
    rows = [json.loads(row) for row in rollouts.read_text(encoding="utf-8").splitlines()]
    completions = [one for row in rows for one in row["completions"]]
    assert len(completions) == 4
    assert len({one["score"] for one in completions}) > 1
