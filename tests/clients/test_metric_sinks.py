"""What a run forwards to trackio and TensorBoard opens in trackio's own command and in
TensorBoard's own reader.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deadlines import wait_until

from halteres.config.settings import RunSettings, Settings
from halteres.observe.metrics import append_row
from halteres.observe.sinks import read_reports

from .conftest import ROOT

pytestmark = pytest.mark.clients

# and what our process needs
TRACKIO = ("sinks-trackio", "trackio==0.43.0", "msgspec", "pydantic", "pyyaml")
TENSORBOARD = ("sinks-tensorboard", "tensorboard==2.21.0")

READ = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
tags = events.Tags()["scalars"]
print(json.dumps({tag: [[one.step, one.value, one.wall_time] for one in events.Scalars(tag)] for tag in tags}))
"""


def forwarded(folder: Path, sink: Any, python: str) -> Path:
    """A run's folder after its rows were forwarded; the evaluation of step 0 came last, and
    late.
    """
    run = folder / "3fa9c1d2"
    run.mkdir()
    (run / "settings.json").write_text(Settings(run=RunSettings(sinks=(sink,))).model_dump_json())
    for step in (1, 2, 3):
        row = {
            "step": step,
            "t": 100.0 + step,
            "src": "trainer",
            "reward/mean": 0.25 * step,
            "train/loss": None,
        }
        append_row(run / "metrics.jsonl", row)
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    variables.pop("TRACKIO_DIR", None)
    with (run / "sinks.log").open("ab") as log:
        command = [python, "-m", "halteres.observe.sinks", run]
        child = subprocess.Popen(list(map(str, command)), env=variables, stdout=log, stderr=log)
    try:
        wait_until(lambda: sink in read_reports(run), 60, str(run / "sinks.log"))
        append_row(
            run / "metrics.jsonl",
            {"step": 0, "t": 104.0, "src": "eval", "eval/percent_correct": 0.5},
        )
        child.terminate()
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
    assert read_reports(run)[sink].state == "offline", (run / "sinks.log").read_text()
    return run


def test_trackios_own_command_reads_the_metrics_of_a_run(
    tmp_path: Path, client_python: Callable[..., str]
) -> None:
    python = client_python(*TRACKIO)
    run = forwarded(tmp_path, "trackio", python)

    def told(*words: str) -> Any:
        command = [Path(python).with_name("trackio"), "get", *words, "--project", "atropos-tinker"]
        command += ["--run", f"arithmetic-{run.name}", "--json"]
        variables = {**os.environ, "TRACKIO_DIR": str(run / "trackio"), "HF_HUB_OFFLINE": "1"}
        return json.loads(subprocess.check_output(command, env=variables, text=True, timeout=120))

    found = told("run")
    assert found["metrics"] == ["eval/percent_correct", "reward/mean"]
    assert found["config"]["trainer"]["learning_rate"] == Settings().trainer.learning_rate
    values = told("metric", "--metric", "reward/mean")["values"]
    assert [(one["step"], one["value"]) for one in values] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    (evaluation,) = told("metric", "--metric", "eval/percent_correct")["values"]
    assert (evaluation["step"], evaluation["value"]) == (0, 0.5)


def test_tensorboards_own_reader_opens_the_files_of_a_run(
    tmp_path: Path, client_python: Callable[..., str]
) -> None:
    python = client_python(*TENSORBOARD)
    run = forwarded(tmp_path, "tensorboard", sys.executable)
    output = subprocess.check_output(
        [python, "-c", READ, run / "tensorboard"], text=True, timeout=120
    )
    assert json.loads(output) == {
        "reward/mean": [[1, 0.25, 101.0], [2, 0.5, 102.0], [3, 0.75, 103.0]],
        "eval/percent_correct": [[0, 0.5, 104.0]],
    }
