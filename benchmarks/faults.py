"""Does a run hold its result while things break? `arithmetic` with 15 % of all sampling requests
failing, an environment that dies at step 10 and a training service that is killed at step 20.

    python benchmarks/faults.py [--seeds 0] [--steps 60]

Every failure is one that the product meets in life: the request fails with an error of the server,
the processes end by themselves or by SIGKILL. Printed and written (benchmarks/results/faults.json):
what was counted, how often each process was started, held-out success before and after. Exit code 1
where a run does not complete, a failure is missing from the run's own figures, or held-out success
is below 0.95.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine

RESULTS = Path(__file__).parent / "results" / "faults.json"
LEAST = 0.95
FAILING_SHARE, DIES_AT, SERVICE_DIES_AT = 0.15, 10, 20

ENVIRONMENT = f'''"""Arithmetic with a sampler that fails and a process that dies."""

import os
import random
import sys
from pathlib import Path

from halteres.environments.arithmetic import ArithmeticEnv
from halteres.errors import ServerError

HERE = Path(__file__).parent


class FaultyArithmetic(ArithmeticEnv):
    """Arithmetic while things break."""

    name = "faulty_arithmetic"

    async def setup(self):
        generate, chance = self.server.client.generate, random.Random(os.getpid())

        async def failing(*arguments):
            if chance.random() < {FAILING_SHARE}:
                with (HERE / "failed_calls").open("a") as file:
                    file.write("x")
                raise ServerError("The inference server broke.")
            return await generate(*arguments)

        if "serve" in sys.argv:  # evaluations are measurements
            self.server.client.generate = failing
        await super().setup()

    async def get_next_item(self):
        died = HERE / "died"
        if self.curr_step >= {DIES_AT} and not died.exists():
            died.touch()
            os._exit(17)
        return await super().get_next_item()


if __name__ == "__main__":
    FaultyArithmetic.cli()
'''


def main() -> int:
    parser = argparse.ArgumentParser(description="A run while things break.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    found = [run_once(seed, options.steps) for seed in options.seeds]
    record = {
        "what": "arithmetic on halteres/tiny while things break",
        "command": " ".join(["python", "benchmarks/faults.py", *sys.argv[1:]]),
        "machine": machine(),
        "runs": found,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    good = all(
        one["status"] == "completed" and one["all_counted"] and one["after"] >= LEAST
        for one in found
    )
    print("Passed." if good else "FAILED.")
    return 0 if good else 1


def run_once(seed: int, steps: int) -> dict[str, Any]:
    """One run, and what it says of what happened to it."""
    with tempfile.TemporaryDirectory(prefix="halteres-faults-") as folder:
        home, environment = Path(folder) / "home", Path(folder) / "faulty_arithmetic.py"
        os.environ["HALTERES_HOME"] = str(home)
        environment.write_text(ENVIRONMENT, encoding="utf-8")
        told = follow(environment, seed, steps)
        told["failed_calls"] = len((Path(folder) / "failed_calls").read_text(encoding="utf-8"))
    # What failed in the step during which the environment died is told by nobody.
    counted = told["failed_calls_counted"] >= 0.7 * told["failed_calls"] > 0
    told["all_counted"] = counted and told["environment_starts"] == told["service_starts"] == 2
    print(json.dumps(told), flush=True)
    return told


def follow(environment: Path, seed: int, steps: int) -> dict[str, Any]:
    from halteres.config.resolution import resolve_settings
    from halteres.observe.metrics import merge_by_step
    from halteres.runs.planning.plan import plan_run
    from halteres.runs.start import start_run

    edits = [
        f"run.seed={seed}",
        f"trainer.total_steps={steps}",
        "trainer.eval_every=0",
        "env.eval_tasks=512",
    ]
    asked = resolve_settings(str(environment), None, edits)
    run = start_run(plan_run(asked))
    begun, killed = time.monotonic(), 0
    while not (state := run.state()).terminal:
        if not killed and (state.step or 0) >= SERVICE_DIES_AT:
            killed = state.processes["service"]["pid"]
            os.kill(killed, signal.SIGKILL)
        if time.monotonic() - begun > 3600:
            raise SystemExit(f"Run {run.run_id} is still {state.status}.")
        time.sleep(0.2)
    rows = merge_by_step(run.metrics())
    evals = [
        row["eval/percent_correct"] for row in rows if row.get("eval/percent_correct") is not None
    ]
    env_rows = [row for row in run.metrics() if row.get("src") == "env"]
    starts = [
        event
        for event in run.events()
        if event.get("type") in ("restart", "restarted", "role_restarted")
    ]
    return {
        "seed": seed,
        "status": state.status,
        "error": state.error,
        "steps": state.step,
        "before": evals[0] if evals else None,
        "after": evals[-1] if evals else None,
        "failed_calls_counted": sum(row.get("sampling/failed_calls") or 0 for row in env_rows),
        "failed_rollouts": sum(row.get("rollouts/failed") or 0 for row in env_rows),
        "failed_groups": sum(row.get("groups/failed") or 0 for row in env_rows),
        "environment_starts": 1 + sum(event.get("role") == "env" for event in starts),
        "service_starts": 1 + sum(event.get("role") == "service" for event in starts),
        "events": sorted({event["type"] for event in run.events()}),
        "wall_s": round(time.monotonic() - begun, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
