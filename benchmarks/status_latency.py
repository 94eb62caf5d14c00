"""How long does an agent wait for a look at a run, with two hundred runs on disk?

Two hundred run directories as supervisors leave them (500 steps, two rows of metrics each,
settings, events, logs), one of them going on: its lock is held, and this process stands for its
supervisor. Calls go the way of every face (`agent.call`): arguments checked, answer sealed. Wall
clock and CPU time of each call; the files are in the page cache.

    .venv/bin/python benchmarks/status_latency.py [--runs 200] [--steps 500] [--repeat 200] [--home
    FOLDER] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from halteres.process import block_torch

WARM_UP = 5
BOUND_MS = 20.0
RESULTS = Path(__file__).parent / "results"


def figures(step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows of one step, trainer's and environment's, with the names and lengths of real
    ones.
    """
    noise = random.Random(step).random
    share = min(0.95, 0.2 + 0.6 * (1 - math.exp(-step / 120)) + 0.1 * noise())
    names = [
        f"logprobs/{name}{of}" for name in ("mean", "std", "min", "p50") for of in ("", "_training")
    ]
    names += [
        "logprobs/diff",
        "logprobs/absdiff_p999",
        "logprobs/absdiff_max",
        "kl_sample_train_v1",
    ]
    names += [
        "advantages/mean",
        "advantages/std",
        "advantages/sum",
        "policy/entropy",
        "reward/std",
        "train/loss",
    ]
    names += [f"time/{phase}" for phase in ("batch", "train", "publish", "checkpoint")]
    common = {"step": step, "t": 1.7e9 + 3 * step}
    measured = {name: noise() for name in names}
    rewards = {
        "reward/mean": share,
        "reward/success": share,
        "groups/without_signal": noise(),
        "time/step": 3 + noise(),
    }
    counts = {
        "kl_sample_train_v2": 1e-4 * noise(),
        "tokens/action": 8192.0,
        "sequences/count": 128.0,
    }
    lengths = {
        "train/completion_lengths": 60 + 10 * noise(),
        "rollouts/failed": 0,
        "rollouts/truncated": noise(),
    }
    trainer = {**common, "src": "trainer", **measured, **rewards, **counts}
    environment = {**common, "src": "env", "train/percent_correct": share, **lengths}
    return trainer, environment


def write_run(home: Path, run_id: str, steps: int, created_at: float) -> Path:
    """One run directory; ended."""
    from halteres.config.settings import Settings
    from halteres.runs.state import RunState, write_state

    path = home / "runs" / run_id
    (path / "logs").mkdir(parents=True)
    rows = [row for step in range(1, steps + 1) for row in figures(step)]
    evaluated = [
        {"step": step, "src": "eval", "eval/percent_correct": 0.4}
        for step in range(0, steps + 1, 25)
    ]
    events = [
        {"t": created_at, "type": "checkpoint", "step": step, "name": f"step-{step}"}
        for step in range(steps // 10)
    ]
    alerts = [
        {
            "type": "alert",
            "rule": "truncation",
            "step": 7,
            "evidence": "x" * 80,
            "remedy": "rl_get_rollouts()",
        }
    ]
    for name, lines in (
        ("metrics", rows + evaluated),
        ("events", events + alerts),
        ("checkpoints", events),
    ):
        (path / f"{name}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
        )
    for name in ("lock", "heartbeat"):
        (path / name).touch()
    (path / "settings.json").write_text(Settings().model_dump_json(indent=1), encoding="utf-8")
    (path / "logs" / "trainer.log").write_text(
        "2026-07-01 12:00:00 INFO trainer: Step 1: reward 0.3\n" * steps, encoding="utf-8"
    )
    who = {
        "pid": 4242,
        "start_time": 1234567,
        "boot_id": "0" * 36,
        "pgid": 4242,
        "port": 8001,
        "exit": 0,
    }
    state = RunState(
        run_id=run_id,
        name=f"arithmetic-{run_id}",
        environment="arithmetic",
        environment_file="/opt/environments/arithmetic.py",
        interpreter="/usr/bin/python3",
        base_model="halteres/tiny",
        tokenizer="/opt/models/tiny",
        total_steps=steps,
        created_at=created_at,
        ended_at=created_at + 3 * steps,
        status="completed",
        step=steps,
        processes={
            role: {**who, "state": "exited (0)"}
            for role in ("service", "engine", "api", "trainer", "env")
        },
        urls={"service": "http://127.0.0.1:8001", "api": "http://127.0.0.1:8000"},
        last_checkpoint={
            "name": "final",
            "step": steps,
            "state_path": f"tinker://{run_id}:0/weights/final",
        },
    )
    write_state(path / "run.json", state)
    return path


def go_on(path: Path, steps: int) -> None:
    """Make a run one that goes on under this process, until it ends."""
    from msgspec import structs

    from halteres.process import identity
    from halteres.runs.state import read_state, take_lock, write_state

    take_lock(path / "lock")  # the kernel frees it
    state = read_state(path / "run.json")
    processes = {
        role: {**facts, "exit": None, "state": "running"} for role, facts in state.processes.items()
    }
    changes: dict[str, Any] = {"status": "running", "processes": processes, "ended_at": None}
    me = identity(os.getpid())
    write_state(
        path / "run.json", structs.replace(state, **changes, supervisor=me, total_steps=2 * steps)
    )


async def latency(name: str, arguments: Mapping[str, Any], repeat: int) -> dict[str, float]:
    """Milliseconds of one call that is made again and again, by the clock and of this process's CPU
    time.
    """
    from halteres.agent.call import call
    from halteres.agent.tool import Caller

    wall, cpu = [], []
    for number in range(WARM_UP + repeat):
        began, worked = time.perf_counter(), time.process_time()
        reply = await call(name, arguments, Caller())
        if number >= WARM_UP:
            wall.append((time.perf_counter() - began) * 1e3)
            cpu.append((time.process_time() - worked) * 1e3)
    assert (
        reply.body.get("run_id") or reply.body.get("runs") or reply.body["code"] == "run_not_found"
    )
    shares = {
        f"{kind}_p{share}_ms": np.percentile(times, share)
        for kind, times in (("wall", wall), ("cpu", cpu))
        for share in (50, 99)
    }
    return {key: round(float(value), 2) for key, value in shares.items()}


async def measure(home: Path, runs: int, steps: int, repeat: int) -> dict[str, Any]:
    """Every figure."""
    ids = [random.Random(number).randbytes(4).hex() for number in range(runs)]
    folders = [write_run(home, run_id, steps, 1.7e9 + number) for number, run_id in enumerate(ids)]
    going_on = folders[runs // 2]
    go_on(going_on, steps)
    calls: dict[str, tuple[str, dict[str, Any]]] = {
        "status_by_id": ("rl_check_status", {"run_id": going_on.name, "wait_s": 0}),
        "status_by_beginning": ("rl_check_status", {"run_id": going_on.name[:6], "wait_s": 0}),
        "status_of_the_only_active_run": ("rl_check_status", {"wait_s": 0}),
        "status_of_an_ended_run": ("rl_check_status", {"run_id": folders[0].name, "wait_s": 0}),
        "status_of_an_unknown_run": ("rl_check_status", {"run_id": "no such run", "wait_s": 0}),
        "list_of_20": ("rl_list_runs", {}),
        "logs": ("rl_get_logs", {"run_id": going_on.name}),
    }
    return {
        label: await latency(name, arguments, repeat) for label, (name, arguments) in calls.items()
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--home", type=Path, help="folder for the runs; default: a temporary one")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / f"status-latency-{datetime.now(UTC):%Y-%m-%d}.json"
    )
    options = parser.parse_args()
    block_torch()
    before = machine()
    with tempfile.TemporaryDirectory(dir=options.home) as home:
        os.environ["HALTERES_HOME"] = home
        told = asyncio.run(measure(Path(home), options.runs, options.steps, options.repeat))
    status = [value["wall_p50_ms"] for label, value in told.items() if label.startswith("status")]
    report = {
        "machine": before,
        "load_average_after": machine()["load_average"],
        "runs": options.runs,
        "steps": options.steps,
        "repeat": options.repeat,
        "bound_ms": BOUND_MS,
        "within_bound": max(status) < BOUND_MS,
        **told,
    }
    text = json.dumps(report, indent=2)
    print(text)
    options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
