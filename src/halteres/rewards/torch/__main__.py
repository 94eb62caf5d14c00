"""The process that trains a reward model as a run: `python -m halteres.rewards.torch --run RUN`.

It writes the run's metrics.jsonl, checkpoints.jsonl, events.jsonl, control/trainer.ready and
control/failure.json; a request in `control` ends it after its step, with a checkpoint. The run's
state is the supervisor's.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halteres.config import environ
from halteres.config.environ import read_stop_request
from halteres.errors import HalteresError, ServerError, as_failure, boundary
from halteres.observe.metrics import append_row, read_rows
from halteres.process import begin, usable_cores
from halteres.rewards.model_folder import RESULT
from halteres.rewards.training_plan import TrainingRun

log = logging.getLogger(__name__)


def main() -> int:
    """Train to the end, or until SIGTERM or a request to stop; exit code 0, or 1 with what, why and
    next.
    """
    parser = argparse.ArgumentParser(
        prog="python -m halteres.rewards.torch", description="Train a reward model."
    )
    parser.add_argument("--run", type=Path, required=True, help="the run's directory")
    run: Path = parser.parse_args().run
    environ.stay_offline()
    try:
        begin("trainer", torch=True, threads=environ.threads() or max(1, usable_cores() - 1))
        training = TrainingRun.read(run)
        with boundary(ServerError, "Reward training"):
            _train(run, training)
    except HalteresError as error:
        (run / "control" / "failure.json").write_text(
            json.dumps({"role": "trainer", **as_failure(error)}), encoding="utf-8"
        )
        sys.stderr.write(f"error: {error.sentence}\n")
        return 1
    return 0


def _train(run: Path, training: TrainingRun) -> None:
    from halteres.rewards.torch.trainer import RewardTrainer

    files = RunFiles(
        run, int(Path(training.resume_from).name.rpartition("-")[2]) if training.resume_from else 0
    )
    train, held_out, _ = training.plan.preferences()
    trainer = RewardTrainer(
        training.plan.model,
        training.settings(run),
        train_dataset=train,
        eval_dataset=held_out,
        on_step=files.report,
        should_stop=lambda: read_stop_request(run / "control" / "stop.json") is not None,
    )
    append_row(
        run / "events.jsonl",
        {"type": "planned", "total_steps": trainer.total_steps, "t": time.time()},
    )
    (run / "control" / "trainer.ready").touch()
    # train() listens to SIGTERM; one that comes after it must not keep the checkpoint from being
    # recorded.
    signal.signal(signal.SIGTERM, lambda *_: None)
    result = trainer.train(training.resume_from)
    files.checkpoint(result.folder, result.num_steps, final=result.stop_reason == "finished")
    log.info(
        "Training ended (%s) after step %d of %d.",
        result.stop_reason,
        result.num_steps,
        result.total_steps,
    )


class RunFiles:
    """The run's files as far as the training writes them."""

    def __init__(self, run: Path, first_step: int = 0) -> None:
        self._run = run
        self._recorded = {row.get("state_path") for row in read_rows(run / "checkpoints.jsonl")}
        self._last, self._last_step = time.monotonic(), first_step

    def report(self, metrics: Mapping[str, float]) -> None:
        """A row of metrics, under TRL's names; and the checkpoints written since the last one."""
        from halteres.rewards.torch.model import checkpoints

        now, steps = time.monotonic(), max(1.0, metrics["step"] - self._last_step)
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        row: dict[str, Any] = {
            "t": time.time(),
            "src": "trainer",
            **finite,
            "time/step": (now - self._last) / steps,
        }
        append_row(self._run / "metrics.jsonl", row)
        self._last, self._last_step = now, metrics["step"]
        for folder in checkpoints(self._run / RESULT):
            if str(folder) not in self._recorded:
                self.checkpoint(folder, int(folder.name.rpartition("-")[2]), final=False)

    def checkpoint(self, folder: Path, step: int, *, final: bool) -> None:
        """A row of checkpoints.jsonl, and its event."""
        self._recorded.add(str(folder))
        place = {"state_path": str(folder), "sampler_path": None}
        row = {"name": folder.name, "step": step, **place, "final": final, "t": time.time()}
        append_row(self._run / "checkpoints.jsonl", row)
        append_row(self._run / "events.jsonl", {**row, "type": "checkpoint"})


if __name__ == "__main__":
    sys.exit(main())
