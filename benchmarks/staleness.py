"""What does it cost to learn from older weights' answers, and does a correction mend it?

    python benchmarks/staleness.py [--seeds 0 1 2] [--steps 40] [--staleness 1 2 4] [--tasks 256]
    [--set NAME=VALUE]

Runs of `arithmetic` on the built-in model, each with as many steps, beside on-policy ones. They are
deterministic, so that every batch is exactly as old as `max_staleness` says (an ordinary run's are
as old as it happens, at most), and a row of the table can be had again, bit for bit. Without a
correction the loss, `importance_sampling`, takes the ratio to the sampler as it is; with `truncate`
each token's is cut at `trainer.ratio_cap`, with `mask` what lies outside of it does not count. At
the default rate no ratio exceeds the cap at ages 1 and 2, and one in a thousand at age 4: there
`none` and `truncate` are the same. With `--staleness 16 --set trainer.learning_rate=4e-3` they are
not. Figures: held-out success at temperature 1 after the last step, mean over seeds, and its range.
Written: benchmarks/results/staleness.json, after every run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine

RESULT = Path(__file__).parent / "results" / "staleness.json"
CORRECTIONS = ("none", "truncate", "mask")
ENDS_WITHIN_S = 6 * 3600.0


def main() -> None:
    """Train, print the table, write."""
    options = parse()
    os.environ["HALTERES_HOME"] = str(options.home)
    runs: list[dict[str, Any]] = []
    for staleness, correction in [
        (0, "none"),
        *((s, c) for s in options.staleness for c in options.corrections),
    ]:
        for seed in options.seeds:
            runs.append(train(staleness, correction, seed, options))
            write(runs, options)
        print_table(runs)
    if not options.keep:
        shutil.rmtree(options.home)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--corrections", nargs="+", choices=CORRECTIONS, default=["none", "truncate"]
    )
    parser.add_argument("--tasks", type=int, default=256, help="held-out tasks")
    parser.add_argument(
        "--set", dest="edits", action="append", default=[], help="a setting, as for halteres train"
    )
    parser.add_argument(
        "--home", type=Path, help="where the runs go and stay; default: a temporary folder"
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    options.keep = options.home is not None
    options.home = (options.home or Path(tempfile.mkdtemp(prefix="halteres-bench-"))).absolute()
    return options


def train(
    staleness: int, correction: str, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One run."""
    from halteres.config.resolution import resolve_settings
    from halteres.runs.planning.plan import plan_run
    from halteres.runs.start import start_run

    edits = {
        "run.seed": seed,
        "trainer.deterministic": "true",
        "trainer.max_staleness": staleness,
        "trainer.correction": correction,
        "trainer.allow_unclipped_staleness": "true",
        "trainer.total_steps": options.steps,
        "trainer.checkpoint_every": 0,
        "trainer.eval_every": 0,
        "env.eval_tasks": options.tasks,
    }
    asked = resolve_settings(
        "arithmetic", None, [*(f"{name}={value}" for name, value in edits.items()), *options.edits]
    )
    run = start_run(plan_run(asked))
    ends = time.monotonic() + ENDS_WITHIN_S
    while not (state := run.state()).terminal:
        if time.monotonic() > ends:
            raise SystemExit(f"Run {run.run_id} is still {state.status}: {run.path}")
        time.sleep(0.5)
    if state.status != "completed":
        raise SystemExit(f"Run {run.run_id} {state.status}: {state.error} ({run.path})")
    rows = run.metrics()
    held_out = {row["step"]: row["eval/percent_correct"] for row in rows if row["src"] == "eval"}
    steps = [row for row in rows if row["src"] == "trainer"]
    return {
        "staleness": staleness,
        "correction": correction,
        "seed": seed,
        "before": held_out[0],
        "after": held_out[options.steps],
        "staleness_mean": round(statistics.fmean(row["policy/staleness_mean"] for row in steps), 3),
        "batch_reward": [round(row["reward/mean"], 3) for row in steps],
        "ratio_bounded_mean": mean([row["tokens/ratio_bounded"] for row in steps]),
        "updates": sum(row["train/updates"] for row in steps),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def mean(values: list[float | None]) -> float | None:
    """Of those that are there."""
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), 5) if known else None


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line of the table for each staleness and correction."""
    lines: dict[tuple[int, str], list[float]] = {}
    for run in runs:
        lines.setdefault((run["staleness"], run["correction"]), []).append(run["after"])
    return [
        {
            "staleness": staleness,
            "correction": correction,
            "seeds": len(after),
            "after_mean": round(statistics.fmean(after), 4),
            "after_range": [min(after), max(after)],
        }
        for (staleness, correction), after in lines.items()
    ]


def print_table(runs: list[dict[str, Any]]) -> None:
    print(f"\n{'staleness':>9} {'correction':>10} {'seeds':>5} {'success after':>13} {'range':>15}")
    for line in summary(runs):
        low, high = line["after_range"]
        print(
            f"{line['staleness']:>9} {line['correction']:>10} {line['seeds']:>5} "
            f"{line['after_mean']:>13.3f} "
            f"{low:>7.3f}-{high:.3f}",
            flush=True,
        )


def write(runs: list[dict[str, Any]], options: argparse.Namespace) -> None:
    report = {
        "what": (
            "arithmetic on halteres/tiny: held-out success by the age of what is learnt from, "
            "and its correction"
        ),
        "command": " ".join(["python", "benchmarks/staleness.py", *sys.argv[1:]]),
        "machine": machine(),
        "steps": options.steps,
        "held_out_tasks": options.tasks,
        "table": summary(runs),
        "runs": runs,
    }
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
