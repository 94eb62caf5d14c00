"""Does a policy learn a game of several turns? Fresh runs of `game`, estimators side by side on the
same work.

    python benchmarks/learning_game.py [--game GuessTheNumber-v0-easy] [--estimators rebn reinforce
        group_std gae] [--seeds 0 1 2 3 4] [--steps 60] [--side-by-side 1]

Every line is one run as `halteres train game:GAME` makes it, with the same number of optimiser
steps and of episodes in each; group_std (GRPO on whole episodes) plays every game eight times; gae
has a critic, which goes through each batch four times. Held-out games are played by the first and
the last weights, 512 of them at temperature 1. CPU seconds are those of all processes of the run's
training, the critic's too, evaluations apart. Written after every run:
benchmarks/results/learning_game.{json,png}, with the mean curve of each estimator and its interval.
Started again with the same arguments, it goes on where it stopped: runs that the file has are not
done again. Exit code 1 where rebn wins less than 0.90 of the games in the mean, or less than 0.85
with a seed, or takes more than 360 CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from held_out import evaluate_ends
from machine import machine
from run_cost import follow

RESULTS = Path(__file__).parent / "results" / "learning_game"
LEAST_MEAN, LEAST, MOST_CPU_S = 0.90, 0.85, 360.0
# settings of one estimator alone
OWN: dict[str, tuple[str, ...]] = {"gae": ("trainer.critic_epochs=4",)}
GROUPS = {"group_std": 8, "group_mean": 8, "rloo": 8, "turn_mean": 8}
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t, 0.975, by the number of seeds."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run."""

    estimator: str
    seed: int
    run_id: str
    steps: int
    cpu_s: float  # of training
    wall_s: float
    wins_before: float  # share of held-out games won at T = 1
    wins_after: float
    return_before: float
    return_after: float
    greedy_after: float
    kl_sample_train_v2_max: float
    success: list[float]  # of each step's batch
    explained_variance: list[float]  # of each step; empty without a critic


def main() -> int:
    options = parse()
    os.environ["HALTERES_HOME"] = str(options.home)
    print(f"{machine()['cpu']}, {machine()['cores']} cores; runs in {options.home}", flush=True)
    results = finished(options)
    done = {(one.estimator, one.seed) for one in results}
    jobs = [
        (estimator, seed)
        for seed in options.seeds
        for estimator in options.estimators
        if (estimator, seed) not in done
    ]
    with ThreadPoolExecutor(options.side_by_side) as pool:
        for result in pool.map(lambda job: train(*job, options), jobs):
            results.append(result)
            write(results, options)
    print_table(results)
    if not options.keep:
        shutil.rmtree(options.home)
    return verdict(results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Games of several turns: estimators side by side.")
    parser.add_argument("--game", default="GuessTheNumber-v0-easy")
    parser.add_argument(
        "--estimators", nargs="+", default=["rebn", "reinforce", "group_std", "gae"]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--side-by-side", type=int, default=1, help="runs at the same time")
    parser.add_argument(
        "--set", dest="edits", action="append", default=[], help="a setting, as for halteres train"
    )
    parser.add_argument(
        "--home", type=Path, help="where the runs go and stay; default: a temporary folder"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="results, without suffix")
    options = parser.parse_args()
    options.keep = options.home is not None
    options.home = (options.home or Path(tempfile.mkdtemp(prefix="halteres-bench-"))).absolute()
    return options


def asked_for(options: argparse.Namespace) -> dict[str, Any]:
    """What the runs of one file have in common."""
    return {
        "game": options.game,
        "steps": options.steps,
        "held_out_games": options.tasks,
        "set": options.edits,
    }


def finished(options: argparse.Namespace) -> list[Result]:
    """The runs that the file of results has."""
    file = options.out.with_suffix(".json")
    if not file.exists():
        return []
    record = json.loads(file.read_text(encoding="utf-8"))
    if record.get("asked") != asked_for(options):
        raise SystemExit(f"{file} has runs with other arguments: name another file (--out).")
    return [Result(**run) for run in record["runs"]]


def train(estimator: str, seed: int, options: argparse.Namespace) -> Result:
    """One run, and the games that its first and last weights win."""
    from halteres.config.resolution import resolve_settings
    from halteres.observe.metrics import merge_by_step
    from halteres.runs.planning.plan import plan_run
    from halteres.runs.start import start_run

    edits = [
        f"run.seed={seed}",
        f"trainer.advantage={estimator}",
        f"trainer.total_steps={options.steps}",
        f"env.group_size={GROUPS.get(estimator, 1)}",
        "trainer.checkpoint_every=0",
        "trainer.eval_every=0",
        "env.eval_tasks=16",
        "env.eval_samples=1",
        *OWN.get(estimator, ()),
        *options.edits,
    ]
    asked = resolve_settings(f"game:{options.game}", None, edits)
    begun = time.monotonic()
    run = start_run(plan_run(asked))
    cpu_s = follow(run)
    wall_s = time.monotonic() - begun
    rows = merge_by_step(run.metrics())
    asked = ["--env.eval_tasks", str(options.tasks), "--env.eval_samples", "1"]
    before, after = evaluate_ends(run, asked)
    result = Result(
        estimator=estimator,
        seed=seed,
        run_id=run.run_id,
        steps=options.steps,
        cpu_s=round(cpu_s, 1),
        wall_s=round(wall_s, 1),
        wins_before=before["eval/outcome/success"],
        wins_after=after["eval/outcome/success"],
        return_before=before["eval/mean_return"],
        return_after=after["eval/mean_return"],
        greedy_after=after["eval/percent_correct_greedy"],
        kl_sample_train_v2_max=max(
            (row.get("kl_sample_train_v2") or 0.0 for row in rows), default=math.nan
        ),
        success=column(rows, "reward/success"),
        explained_variance=column(rows, "critic/explained_variance"),
    )
    print(
        f"{estimator:>20} seed {seed}: wins {result.wins_before:.3f} -> {result.wins_after:.3f}, "
        "return "
        f"{result.return_before:.3f} -> {result.return_after:.3f}, {result.cpu_s:.0f} CPU s, "
        f"{wall_s:.0f} s",
        flush=True,
    )
    return result


def column(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """What each step reports under this name, where it does."""
    return [round(row[name], 4) for row in rows if row.get(name) is not None]


def interval(values: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of the mean."""
    if len(values) < 2:
        return math.nan
    return T_975.get(len(values), 1.96) * statistics.stdev(values) / math.sqrt(len(values))


def summary(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for estimator in dict.fromkeys(result.estimator for result in results):
        own = [result for result in results if result.estimator == estimator]
        wins = [result.wins_after for result in own]
        found[estimator] = {
            "wins_before": statistics.fmean(result.wins_before for result in own),
            "wins_after": statistics.fmean(wins),
            "wins_interval": interval(wins),
            "wins_least": min(wins),
            "return_after": statistics.fmean(result.return_after for result in own),
            "cpu_s": statistics.median(result.cpu_s for result in own),
            "cpu_s_most": max(result.cpu_s for result in own),
            "seeds": len(own),
        }
    return found


def mean_curve(curves: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Of each step the mean over seeds, and half of its 95 % interval."""
    return [(statistics.fmean(step), interval(step)) for step in zip(*curves, strict=False) if step]


def print_table(results: Sequence[Result]) -> None:
    print(
        f"\n{'estimator':>20} {'seeds':>5} {'wins before':>11} {'after ± 95 %':>15} {'least':>6} "
        f"{'CPU s':>6}"
    )
    for estimator, row in summary(results).items():
        print(
            f"{estimator:>20} {row['seeds']:>5} {row['wins_before']:>11.3f} "
            f"{row['wins_after']:>7.3f} ± "
            f"{row['wins_interval']:.3f} {row['wins_least']:>7.3f} {row['cpu_s']:>6.0f}",
            flush=True,
        )


def verdict(results: Sequence[Result]) -> int:
    rebn = summary(results).get("rebn")
    if rebn is None:
        return 0
    good = (
        rebn["wins_after"] >= LEAST_MEAN
        and rebn["wins_least"] >= LEAST
        and rebn["cpu_s_most"] <= MOST_CPU_S
    )
    print(
        f"{'Passed' if good else 'FAILED'}: rebn wins ≥ {LEAST_MEAN} in the mean, each ≥ {LEAST}, "
        f"≤ {MOST_CPU_S} CPU s."
    )
    return 0 if good else 1


def write(results: Sequence[Result], options: argparse.Namespace) -> None:
    import msgspec

    curves = {
        estimator: mean_curve([one.success for one in results if one.estimator == estimator])
        for estimator in dict.fromkeys(one.estimator for one in results)
    }
    record = {
        "what": f"game:{options.game} on halteres/tiny: held-out games won before and after RL",
        "command": " ".join(["python", "benchmarks/learning_game.py", *sys.argv[1:]]),
        "machine": machine(),
        "asked": asked_for(options),
        "summary": summary(results),
        "curves": {
            name: [[round(x, 4) for x in point] for point in curves[name]] for name in curves
        },
        "runs": [asdict(result) for result in results],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    whole = msgspec.json.format(msgspec.json.encode(record)) + b"\n"
    beside = options.out.with_suffix(".new")
    beside.write_bytes(whole)
    beside.replace(options.out.with_suffix(".json"))
    draw(curves, options)


def draw(curves: dict[str, list[tuple[float, float]]], options: argparse.Namespace) -> None:
    """The mean curve of each estimator, in the band of its interval."""
    from halteres.observe.canvas import Canvas, finish, steps_below
    from halteres.observe.plots import COLOURS

    canvas = Canvas(f"{options.game}: games won in each step's batch", rows=1)
    (axes,) = canvas.panels
    for (name, curve), colour in zip(curves.items(), COLOURS, strict=False):
        steps = range(1, len(curve) + 1)
        axes.plot(steps, [mean for mean, _ in curve], color=colour, linewidth=2, label=name)
        if curve and not math.isnan(curve[0][1]):
            low, high = ([mean + sign * half for mean, half in curve] for sign in (-1, 1))
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    finish(axes, "reward/success")
    steps_below(axes)
    canvas.legend(axes)
    canvas.save(options.out.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(main())
