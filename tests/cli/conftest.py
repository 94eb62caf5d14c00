"""Run directories as a finished run leaves them, and the program itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from halteres.config.settings import Settings
from halteres.observe.metrics import append_row
from halteres.runs.directory import RunDirectory
from halteres.runs.state import RunState, write_state

PROMPT = "Question: What is 3 + 4?"


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A completed run of two steps, evaluated before and after."""
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    run = RunDirectory(tmp_path / "runs" / "aaaa1111")
    (run.path / "logs").mkdir(parents=True)
    (run.path / "adapter").mkdir()
    (run.path / "logs" / "trainer.log").write_text("first\nlast\n")
    (run.path / "settings.json").write_text(Settings().model_dump_json())
    (run.path / "config.yaml").write_text(
        yaml.safe_dump({"env": {"prompt_template": "Question: {question}"}})
    )
    _evaluation(run, 0, 0.25, "I think \\boxed{9}.", 0.0)
    for step in (1, 2):
        row = {
            "step": step,
            "src": "trainer",
            "reward/mean": 0.3 * step,
            "reward/success": 0.3 * step,
            "time/step": 1.0,
        }
        append_row(run.path / "metrics.jsonl", row)
    _evaluation(run, 2, 0.75, "3 + 4 = 7. \\boxed{7}", 1.0)
    append_row(
        run.path / "checkpoints.jsonl",
        {
            "name": "final",
            "step": 2,
            "state_path": "tinker://x/weights/final",
            "sampler_path": "tinker://x/sampler_weights/final",
        },
    )
    append_row(
        run.path / "events.jsonl",
        {"type": "alert", "rule": "logprob_drift", "step": 2, "remedy": "look"},
    )
    write_state(run.path / "run.json", _state())
    return run


@pytest.fixture
def halteres(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The program, as a person starts it, with its own home and output that is no terminal."""

    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from halteres.cli.main import main; main()", *arguments]
        environment = {**os.environ, "HALTERES_HOME": str(tmp_path)}
        return subprocess.run(
            command, capture_output=True, text=True, input=stdin, env=environment, timeout=60
        )

    return run


def _evaluation(run: RunDirectory, step: int, share: float, answer: str, score: float) -> None:
    row = {
        "step": step,
        "src": "eval",
        "eval/percent_correct": share,
        "eval/percent_correct_greedy": share,
    }
    append_row(run.path / "metrics.jsonl", row)
    folder = run.path / "evals" / f"step_{step}"
    folder.mkdir(parents=True)
    samples = [
        {"prompt": PROMPT, "completion": answer, "score": score},
        {"prompt": PROMPT, "completion": "x", "score": 0},
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def _state() -> RunState:
    return RunState(
        run_id="aaaa1111",
        name="sums",
        environment="arithmetic",
        environment_file="/nowhere.py",
        interpreter=sys.executable,
        base_model="halteres/tiny",
        tokenizer="/nowhere",
        total_steps=2,
        created_at=1.0,
        status="completed",
        step=2,
    )
