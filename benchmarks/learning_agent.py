"""Does the built-in model learn through a program that knows nothing of training?

The program (`foreign_agent/play.py`) asks OpenAI's chat API for the value of a sum and writes the
answer to a file; the reward function looks at the file. Every seed is one run as
`halteres gateway run` makes it, with its own held-out evaluations before and after. Written:
benchmarks/results/learning_agent.json. Exit code 1 where the 95 % interval of the mean gain over
the seeds is not above 0.

    .venv/bin/python benchmarks/learning_agent.py [--seeds 0 1 2] [--steps 15]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine
from run_cost import follow

HERE = Path(__file__).parent
T_95 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447}
"""Student's t of a two-sided 95 % interval, by degrees of freedom."""

PROMPT = (
    "Question: {question}\nPlease reason step by step, and put your final answer within \\boxed{}."
)
HELD_OUT = 64
ENDS_WITHIN_S = 1800.0


def write_tasks(folder: Path) -> Path:
    """Sums of the two splits of the built-in model's problems, as a user's JSON lines."""
    from halteres.environments.problems import draw_problem

    folder.mkdir(parents=True)
    rng = random.Random(7)
    for name, split, count in (("train", "train", 2000), ("test", "eval", HELD_OUT)):
        problems = [draw_problem(rng, split) for _ in range(count)]
        lines = [
            json.dumps(
                {
                    "question": PROMPT.replace("{question}", one.question),
                    "answer": str(one.answer),
                }
            )
            for one in problems
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def train(seed: int, tasks: Path, options: argparse.Namespace) -> dict[str, Any]:
    from halteres.config.resolution import resolve_settings
    from halteres.observe.metrics import merge_by_step
    from halteres.runs.planning.plan import plan_run
    from halteres.runs.start import start_run

    command = [sys.executable, "-S", str(HERE / "foreign_agent" / "play.py")]
    edits = [
        f"run.seed={seed}",
        f"trainer.total_steps={options.steps}",
        f"env.tasks={tasks}",
        f"env.command={json.dumps(command)}",
        f"env.reward={HERE / 'foreign_agent' / 'reward.py'}:reward",
        f"env.eval_tasks={HELD_OUT}",
        *options.edits,
    ]
    run = start_run(plan_run(resolve_settings("agent", None, edits)))
    cpu_s = follow(run, ENDS_WITHIN_S)
    rows = merge_by_step(run.metrics())
    found = [
        row["eval/percent_correct"] for row in rows if row.get("eval/percent_correct") is not None
    ]
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    return {
        "seed": seed,
        "before": found[0],
        "after": found[-1],
        "gain": found[-1] - found[0],
        "reward": [round(one, 3) for one in rewards],
        "cpu_s": round(cpu_s, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--set", dest="edits", action="append", default=[])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "learning_agent.json")
    options = parser.parse_args()
    if len(options.seeds) - 1 not in T_95:
        parser.error("an interval needs 3 to 7 seeds")
    home = Path(tempfile.mkdtemp(prefix="halteres-bench-"))
    os.environ["HALTERES_HOME"] = str(home)
    begun, results = machine(), []
    tasks = write_tasks(home / "tasks")
    for seed in options.seeds:
        results.append(train(seed, tasks, options))
        print(json.dumps(results[-1]))
    gains = [one["gain"] for one in results]
    mean = statistics.fmean(gains)
    half = T_95[len(gains) - 1] * statistics.stdev(gains) / math.sqrt(len(gains))
    found = {
        "machine": begun,
        "steps": options.steps,
        "seeds": results,
        "mean_gain": round(mean, 4),
        "interval_95": [round(mean - half, 4), round(mean + half, 4)],
    }
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"gain {mean:+.3f}, 95 % interval {mean - half:+.3f} to {mean + half:+.3f}")
    shutil.rmtree(home)
    return int(mean - half <= 0)


if __name__ == "__main__":
    sys.exit(main())
