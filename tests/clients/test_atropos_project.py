"""An environment of a project of atroposlib's trains as it is: `halteres train` on its file, and it
lacks nothing.

The project lies where nobody knows it; `atropos_project` is its layout, in the way of the users'
guide.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from halteres.agent.transports.functions import Tools
from halteres.observe.metrics import merge_by_step
from halteres.runs.directory import RunDirectory, list_runs

from .atropos_fixtures import atropos_python

pytestmark = pytest.mark.clients

STEPS = 3
EDITS = (
    f"trainer.total_steps={STEPS}",
    "trainer.checkpoint_every=0",
    "trainer.eval_every=0",
    "inference.threads=1",
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Somebody's checkout."""
    return shutil.copytree(Path(__file__).parent / "atropos_project", tmp_path / "project")


async def test_an_unmodified_project_trains_and_its_figures_and_rollouts_are_the_runs(
    client_python: Callable[..., str],
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HALTERES_HOME", str(home))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    edits = (*EDITS, f"run.interpreter={await atropos_python(client_python)}")
    command = [
        Path(sys.executable).parent / "halteres",
        "train",
        project / "word_sums" / "environments" / "sums_env.py",
    ]
    ended = await asyncio.to_thread(
        subprocess.run,
        [*map(str, command), *(word for edit in edits for word in ("--set", edit))],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    (run,) = list_runs()
    check_figures(run)
    await check_rollouts(run)
    assert run.settings().env["group_size"] == 4, (
        "of configs/default.yaml, which lies in the project's folder"
    )
    assert not list(tmp_path.rglob("*.wandb")), "nobody opens a run of W&B but us"


def check_figures(run: RunDirectory) -> None:
    """The environment's own, beside the trainer's, under the names that it gave them."""
    rows = merge_by_step(run.metrics())
    own = [row["train/percent_correct"] for row in rows if "train/percent_correct" in row]
    assert own and all(0 <= share <= 1 for share in own)
    evaluated = {row["step"]: row for row in rows if "eval/percent_correct" in row}
    assert set(evaluated) == {0, STEPS}
    for row in evaluated.values():
        assert row["eval/percent_correct"] == row["eval/left_to_wandb_log"]
    outcome = json.loads((run.path / "results.json").read_bytes())
    assert "eval/percent_correct" in outcome["improvement"]


async def check_rollouts(run: RunDirectory) -> None:
    """What the policy answered, decoded from the batches."""
    told = await Tools().call("rl_get_rollouts", run_id=run.run_id, which="best")
    assert told["figures"]["rollouts"] == 16
    assert all("Question: What is the value of" in one["prompt"] for one in told["rollouts"])
    assert all(one["completion"] for one in told["rollouts"])
