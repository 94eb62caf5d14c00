"""What does a step of multi-turn training cost, here and at another commit?

    git worktree add ../before COMMIT && make -C ../before install
    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/game_step.py --before ../before [--rounds 3]

Whole runs of `game:GuessTheNumber-v0-easy` as `halteres train` makes them, with the built-in model,
return batch normalisation and one engine thread, of two lengths: the difference of their CPU
seconds (all processes of the run) is what the steps between them cost. The commits take turns;
medians and their ratio. Without --before: this one alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from machine import machine

HERE = Path(__file__).parent
RESULT = HERE / "results" / "game_step.json"
SHORT, LONG = 2, 12


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--before", type=Path, help="a checkout of the other commit, with a .venv of its own"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", type=int, metavar="STEPS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_run(options.one)))
        return
    checkouts = {"now": HERE.parent} | ({"before": options.before} if options.before else {})
    before = machine()
    commits = {name: commit_of(folder) for name, folder in checkouts.items()}
    seconds: dict[str, list[float]] = {name: [] for name in checkouts}
    for _ in range(options.rounds):
        for name, folder in checkouts.items():
            short, long = (run_in(folder, steps) for steps in (SHORT, LONG))
            seconds[name].append((long - short) / (LONG - SHORT))
            print(f"{name:>6}: {seconds[name][-1]:.3f} CPU s a step", flush=True)
    found = {name: round(median(values), 3) for name, values in seconds.items()}
    result: dict[str, Any] = {
        "machine": before,
        "commits": commits,
        "cpu_s_per_step": found,
        "rounds": seconds,
    }
    if options.before:
        result["before / now (at least 2.5)"] = round(found["before"] / found["now"], 2)
        print(f"before / now: {result['before / now (at least 2.5)']}")
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def commit_of(folder: Path) -> str:
    return subprocess.check_output(
        ["git", "-C", folder, "rev-parse", "--short", "HEAD"], text=True, encoding="utf-8"
    ).strip()


def run_in(folder: Path, steps: int) -> float:
    """CPU seconds of a run that the checkout's code makes, in a home of its own."""
    with tempfile.TemporaryDirectory(prefix="halteres-bench-") as home:
        variables = {**os.environ, "HALTERES_HOME": home}
        command = [
            str(folder.absolute() / ".venv" / "bin" / "python"),
            __file__,
            "--one",
            str(steps),
        ]
        return json.loads(
            subprocess.check_output(
                command, env=variables, text=True, encoding="utf-8"
            ).splitlines()[-1]
        )


def one_run(steps: int) -> float:
    from run_cost import follow

    from halteres.config.resolution import resolve_settings
    from halteres.runs.planning.plan import plan_run
    from halteres.runs.start import start_run

    edits = [
        "run.seed=0",
        "trainer.advantage=rebn",
        f"trainer.total_steps={steps}",
        "trainer.checkpoint_every=0",
        "trainer.eval_every=0",
        "env.eval_tasks=1",
        "env.eval_samples=1",
    ]
    asked = resolve_settings("game:GuessTheNumber-v0-easy", None, edits)
    return follow(start_run(plan_run(asked)))


if __name__ == "__main__":
    main()
