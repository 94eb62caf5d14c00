"""Run directories as a supervisor keeps them, with this process in its place."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import structs

from halteres.agent.call import Reply, call
from halteres.agent.tool import Caller
from halteres.config.settings import Settings
from halteres.next_step import NextStep, Remedy
from halteres.observe.metrics import append_row
from halteres.process import identity
from halteres.runs.directory import RunDirectory, runs_home
from halteres.runs.reading.alerts import Alert
from halteres.runs.state import RunState, lock_taken, read_state, write_state

RUN = "3fa9c1d2"
STOP = NextStep("rl_stop_training", {"run_id": RUN})
READ_BEST = NextStep("rl_get_rollouts", {"run_id": RUN, "which": "best"})
ENV = {"group_size": 8, "batch_size": 64, "max_token_length": 1024}
LIVE = {"pid": 4242, "exit": None, "state": "running"}
SEED_STATUS = {
    "run_id",
    "status",
    "environment",
    "running_time_minutes",
    "processes",
    "wandb_project",
    "wandb_run_name",
    "logs",
}


async def told(name: str, /, **arguments: Any) -> dict[str, Any]:
    """The answer to a call; it has `next`, one line, and is JSON."""
    return (await replied(name, **arguments)).body


async def replied(name: str, /, **arguments: Any) -> Reply:
    reply = await call(name, arguments, Caller())
    following = reply.body["next"]
    assert following and "\n" not in following
    return reply


def tokens(answer: dict[str, Any]) -> float:
    """By the measure of the budgets."""
    return len(json.dumps(answer, ensure_ascii=False, separators=(",", ":"), allow_nan=False)) / 4


def make_run(
    run_id: str = RUN, *, steps: int = 0, step_s: float = 15.0, **changes: Any
) -> RunDirectory:
    """A run that nobody supervises: it has ended, or it will be found lost unless `supervised`."""
    run = RunDirectory(runs_home() / run_id)
    for folder in ("logs", "control"):
        (run.path / folder).mkdir(parents=True)
    for name in ("heartbeat", "lock", "events.jsonl", "metrics.jsonl", "checkpoints.jsonl"):
        (run.path / name).touch()
    settings = Settings.model_validate(
        {"env": ENV, "trainer": {"total_steps": 50, "learning_rate": 4e-5}}
    )
    (run.path / "settings.json").write_text(settings.model_dump_json())
    state: dict[str, Any] = {
        "run_id": run_id,
        "name": f"gsm8k-{run_id}",
        "environment": "gsm8k",
        "environment_file": "/nowhere.py",
        "interpreter": "/python",
        "base_model": "Qwen/Qwen3-0.6B",
        "tokenizer": "/nowhere",
        "total_steps": 50,
        "created_at": time.time() - 240,
        "status": "completed",
        "step": steps,
        **changes,
    }
    write_state(run.path / "run.json", RunState(**state))
    for step in range(1, steps + 1):
        add_step(run, step, step_s=step_s)
    return run


def add_step(run: RunDirectory, step: int, *, step_s: float = 15.0, **figures: Any) -> None:
    """The rows of one step, the trainer's and the environment's."""
    share = 0.18 + 0.01 * step
    trained = {
        "train/loss_per_token": 0.0131,
        "reward/mean": share,
        "reward/success": share,
        "kl_sample_train_v2": 0.00213,
    }
    row = {
        "step": step,
        "t": time.time(),
        "src": "trainer",
        **trained,
        "groups/without_signal": 0.25,
    }
    append_row(run.path / "metrics.jsonl", {**row, "time/step": step_s, **figures})
    append_row(
        run.path / "metrics.jsonl",
        {"step": step, "src": "env", "train/percent_correct": share + 0.02},
    )


def add_evaluation(run: RunDirectory, step: int, share: float = 0.39) -> None:
    append_row(
        run.path / "metrics.jsonl", {"step": step, "src": "eval", "eval/percent_correct": share}
    )


def add_alert(
    run: RunDirectory,
    rule: str = "truncation",
    step: int = 7,
    *,
    evidence: str = "41 % of the answers were cut off.",
    remedy: Remedy | str = "rl_edit_config('max_token_length', 1536)",
) -> None:
    """A text is a remedy that has no calls."""
    remedy = Remedy(words=remedy) if isinstance(remedy, str) else remedy
    alert = Alert(rule=rule, step=step, evidence=evidence, remedy=remedy)
    append_row(run.path / "events.jsonl", {"type": "alert", **alert.facts})


def end_alert(run: RunDirectory, rule: str = "truncation", step: int = 12) -> None:
    """Its cause is gone."""
    append_row(run.path / "events.jsonl", {"type": "alert_over", "rule": rule, "step": step})


def change(run: RunDirectory, **changes: Any) -> None:
    """What its supervisor writes."""
    file = run.path / "run.json"
    write_state(file, structs.replace(read_state(file), **changes))


@contextmanager
def supervised(run: RunDirectory, **changes: Any) -> Iterator[RunDirectory]:
    """The run goes on, under this process, for the length of a block."""
    processes = dict.fromkeys(("service", "engine", "api", "trainer", "env"), LIVE)
    with lock_taken(run.path / "lock"):
        change(run, **{"status": "running", "processes": processes, "supervisor": me(), **changes})
        yield run


def me() -> dict[str, Any]:
    return identity(os.getpid())


_HOMES = itertools.count()


def short_home(folder: Path) -> Path:
    """A path as long as people's homes are: answers with absolute paths are measured."""
    home = Path("/tmp") / f"halteres-{os.getpid()}-{next(_HOMES)}"
    home.symlink_to(folder)
    return home
