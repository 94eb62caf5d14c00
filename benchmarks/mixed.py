"""Do two environments in one run both improve? `arithmetic`, started with the run, and a game that
joins it by hand.

    python benchmarks/mixed.py [--seeds 0] [--steps 60] [--game GuessTheNumber-v0-easy]

The run normalises returns per environment (`rebn_per_environment`); the game is started as a person
would, with the addresses that `halteres runs connect` prints. Held-out tasks of both are answered
by the first and the last weights. Written: benchmarks/results/mixed.json. Exit code 1 where one of
the two does not rise by 0.15 at least.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine

RESULTS = Path(__file__).parent / "results" / "mixed.json"
HALTERES = (sys.executable, "-m", "halteres")
LEAST_GAIN = 0.15
STARTS_WITHIN_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Two environments in one run.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--game", default="GuessTheNumber-v0-easy")
    options = parser.parse_args()
    found = [run_once(seed, options) for seed in options.seeds]
    record = {
        "what": f"arithmetic and game:{options.game} in one run on halteres/tiny",
        "command": " ".join(["python", "benchmarks/mixed.py", *sys.argv[1:]]),
        "machine": machine(),
        "runs": found,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    good = all(
        one["after"] - one["before"] >= LEAST_GAIN
        for run in found
        for one in run["held_out"].values()
    )
    print("Passed." if good else "FAILED.")
    return 0 if good else 1


def run_once(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="halteres-mixed-") as home:
        os.environ["HALTERES_HOME"] = home
        told = train(seed, options)
    print(json.dumps(told), flush=True)
    return told


def train(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    from halteres.config.resolution import resolve_settings
    from halteres.runs.planning.plan import plan_run
    from halteres.runs.start import start_run

    edits = [
        f"run.seed={seed}",
        f"trainer.total_steps={options.steps}",
        "trainer.advantage=rebn_per_environment",
        "trainer.eval_every=0",
        "env.group_size=8",
        "env.batch_size=128",
        "env.min_batch_allocation=0.5",
    ]
    asked = resolve_settings("arithmetic", None, edits)
    run = start_run(plan_run(asked))
    begun = time.monotonic()
    game = join(run, options.game, seed)
    while not (state := run.state()).terminal:
        time.sleep(0.5)
    game.wait(60)
    if state.status != "completed":
        raise SystemExit(f"Run {run.run_id}: {state.status}. {state.error}")
    held_out = {
        "arithmetic": evaluated(run, "arithmetic"),
        "game": evaluated(run, f"game:{options.game}"),
    }
    return {
        "seed": seed,
        "steps": state.step,
        "wall_s": round(time.monotonic() - begun, 1),
        "held_out": held_out,
    }


def join(run: Any, game: str, seed: int) -> subprocess.Popen[bytes]:
    """The game, at the addresses of the run."""
    ends = time.monotonic() + STARTS_WITHIN_S
    while (
        told := subprocess.run(
            [*HALTERES, "runs", "connect", run.run_id],
            capture_output=True,
            text=True,
            encoding="utf-8",
        )
    ).returncode:
        if time.monotonic() > ends:
            raise SystemExit(told.stderr)
        time.sleep(0.5)
    at = dict(word.split("=", 1) for word in shlex.split(told.stdout, comments=True) if "=" in word)
    options = {
        "env.rollout_server_url": at["ROLLOUT_SERVER_URL"],
        "openai.base_url": at["OPENAI_BASE_URL"],
        "openai.api_key": at["OPENAI_API_KEY"],
        "env.group_size": "8",
        "env.batch_size": "128",
        "env.seed": str(seed),
        "env.min_batch_allocation": "0.25",
    }
    given = [word for name, value in options.items() for word in (f"--{name}", value)]
    log = (run.path / "logs" / "game.log").open("wb")
    return subprocess.Popen(
        [*HALTERES, "env", "serve", f"game:{game}", *given], stdout=log, stderr=log
    )


def evaluated(run: Any, environment: str) -> dict[str, float]:
    """Held-out success at temperature 1 before and after."""
    from halteres.config.program import find_program
    from halteres.runs.servers import served

    program = find_program(environment)
    variant = [f"--env.{name}={value}" for name, value in program.variant_setting.items()]
    paths = {row["name"]: row["sampler_path"] for row in run.checkpoints()}
    shares: list[float] = []
    with served(run.state().base_model, run) as server:
        for name in ("step-000000", "final"):
            asked = [
                "--openai.base_url",
                f"{server.url}/runs/{run.run_id}/v1",
                "--openai.model_name",
                paths[name],
            ]
            command = program.command(
                "evaluate", *variant, *asked, "--env.eval_tasks=512", "--env.eval_samples=1"
            )
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=1800, encoding="utf-8"
            )
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            shares.append(json.loads(done.stdout.strip().splitlines()[-1])["eval/percent_correct"])
    return {"before": shares[0], "after": shares[1]}


if __name__ == "__main__":
    sys.exit(main())
