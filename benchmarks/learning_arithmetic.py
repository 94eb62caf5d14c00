"""Does the reward really rise? Fresh runs of `arithmetic` at the defaults, with held-out tasks
before and after.

    python benchmarks/learning_arithmetic.py [--seeds 0 1 2 3 4] [--minutes 1] [--set
    trainer.learning_rate=1e-3]

Every seed is one run as `halteres train arithmetic` makes it, in a folder of its own, with training
bounded by `run.max_minutes`. Afterwards the run's own checkpoints "step-000000" and "final" answer
512 held-out tasks, 4 samples at temperature 1 and one greedy. Written:
benchmarks/results/learning_arithmetic.{json,png}. Exit code 1 where the mean gain is below +0.40 or
a seed's below +0.25.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from held_out import evaluate_ends
from machine import machine
from run_cost import follow

RESULTS = Path(__file__).parent / "results" / "learning_arithmetic"
LEAST_MEAN_GAIN, LEAST_GAIN = 0.40, 0.25
ENDS_WITHIN_S = 300.0  # beyond the minutes of training: start, own evaluations, final checkpoint


@dataclass(frozen=True, kw_only=True)
class Score:
    """One checkpoint on held-out tasks."""

    sampled: float  # share right at T = 1
    sampled_stderr: float
    greedy: float
    worked_share: float  # of answers at T = 1 that show their steps
    worked_accuracy: float | None  # share right among those; None where there are none
    hasty_accuracy: float | None  # ... among the others


@dataclass(frozen=True, kw_only=True)
class Result:
    """One seed."""

    seed: int
    run_id: str
    steps: int
    training_s: float
    cpu_s: float  # of all its processes, start, evaluations by its engine and checkpoints included
    before: Score
    after: Score
    kl_sample_train_v2_max: float
    absdiff_p999_max: float
    absdiff_max: float
    alerts: list[str]
    load_average: tuple[float, float, float]

    @property
    def gain(self) -> float:
        return self.after.sampled - self.before.sampled

    @property
    def gain_stderr(self) -> float:
        """Of the difference; the same tasks on both sides make the true one smaller."""
        return math.hypot(self.before.sampled_stderr, self.after.sampled_stderr)


def main() -> int:
    options = parse()
    os.environ["HALTERES_HOME"] = str(options.home)
    print(f"{machine()['cpu']}, {machine()['cores']} cores; runs in {options.home}")
    weights, results = model(), []
    curves: dict[str, list[dict[str, Any]]] = {}
    for seed in options.seeds:
        result, rows = train_and_evaluate(seed, options)
        results.append(result)
        curves[f"seed {seed}"] = rows
        print_table(results)
    if model() != weights:
        raise SystemExit(
            "The built-in model changed meanwhile: these seeds did not begin with the same weights."
        )
    write(results, curves, options)
    if not options.keep:
        shutil.rmtree(options.home)
    return verdict(results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The reward rises: five seeds, held-out tasks, before and after."
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--minutes", type=float, default=1.0, help="of training, per seed")
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--samples", type=int, default=4)
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


def train_and_evaluate(
    seed: int, options: argparse.Namespace
) -> tuple[Result, list[dict[str, Any]]]:
    from halteres.config.resolution import resolve_settings
    from halteres.observe.metrics import merge_by_step
    from halteres.runs.planning.plan import plan_run
    from halteres.runs.start import start_run

    edits = [f"run.seed={seed}", f"run.max_minutes={options.minutes}", *options.edits]
    asked = resolve_settings("arithmetic", None, edits)
    run = start_run(plan_run(asked))
    cpu_s = follow(run, options.minutes * 60 + ENDS_WITHIN_S)  # `max_minutes` is a planned end
    load = os.getloadavg()
    rows = merge_by_step(run.metrics())
    steps = [row for row in rows if row.get("reward/mean") is not None]
    before, after = evaluate(run, options.tasks, options.samples)
    result = Result(
        seed=seed,
        run_id=run.run_id,
        steps=max(row["step"] for row in steps),
        training_s=round(sum(row["time/step"] for row in steps), 1),
        cpu_s=round(cpu_s, 1),
        before=before,
        after=after,
        kl_sample_train_v2_max=largest(steps, "kl_sample_train_v2"),
        absdiff_p999_max=largest(steps, "logprobs/absdiff_p999"),
        absdiff_max=largest(steps, "logprobs/absdiff_max"),
        alerts=[event["rule"] for event in run.events() if event.get("type") == "alert"],
        load_average=load,
    )
    return result, rows


def evaluate(run: Any, tasks: int, samples: int) -> tuple[Score, Score]:
    """The run's first and last checkpoint."""
    folder = run.path / "evals" / "bench"
    arguments = ["--env.eval_tasks", str(tasks), "--env.eval_samples", str(samples)]
    before, after = evaluate_ends(run, arguments, folder)
    return score(before, folder / "step-000000"), score(after, folder / "final")


def score(metrics: dict[str, float], folder: Path) -> Score:
    """One checkpoint's figures, and those of its answers, which lie in `folder`."""
    from halteres.environments.problems import is_worked

    answers = [
        json.loads(line)
        for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    sampled = [answer for answer in answers if answer["temperature"] > 0]
    worked = [answer for answer in sampled if is_worked(answer["completion"])]
    hasty = [answer for answer in sampled if not is_worked(answer["completion"])]
    return Score(
        sampled=metrics["eval/percent_correct"],
        sampled_stderr=metrics["eval/percent_correct_stderr"],
        greedy=metrics["eval/percent_correct_greedy"],
        worked_share=len(worked) / len(sampled),
        worked_accuracy=accuracy(worked),
        hasty_accuracy=accuracy(hasty),
    )


def accuracy(answers: Sequence[dict[str, Any]]) -> float | None:
    return statistics.fmean(answer["score"] > 0 for answer in answers) if answers else None


def largest(rows: Sequence[dict[str, Any]], name: str) -> float:
    """Over the steps that have the figure; steps without comparable tokens have none."""
    return max((row[name] for row in rows if row.get(name) is not None), default=math.nan)


def print_table(results: Sequence[Result]) -> None:
    print(
        f"\n{'seed':>4} {'steps':>5} {'train s':>7} {'CPU s':>6}  {'T=1 before':>10} {'after':>6} "
        f"{'gain ± s.e.':>14}  "
        f"{'greedy':>13}  {'worked share':>13}  {'worked right':>13}  {'kl v2 max':>9}  "
        f"{'p99.9':>8}  {'max':>8}"
    )
    for r in results:
        print(
            f"{r.seed:>4} {r.steps:>5} {r.training_s:>7.1f} {r.cpu_s:>6.1f}  "
            f"{r.before.sampled:>10.3f} {r.after.sampled:>6.3f} {r.gain:>+7.3f} ± "
            f"{r.gain_stderr:.3f}  "
            f"{change(r.before.greedy, r.after.greedy):>13}  "
            f"{change(r.before.worked_share, r.after.worked_share):>13}  "
            f"{change(r.before.worked_accuracy, r.after.worked_accuracy):>13}  "
            f"{r.kl_sample_train_v2_max:>9.1e}  {r.absdiff_p999_max:>8.1e}  {r.absdiff_max:>8.1e}"
        )
    gains = [r.gain for r in results]
    print(
        f"gain: mean {statistics.fmean(gains):+.3f}, median {statistics.median(gains):+.3f}, "
        f"least {min(gains):+.3f}, "
        f"greatest {max(gains):+.3f} of {len(gains)} seeds",
        flush=True,
    )


def change(before: float | None, after: float | None) -> str:
    return " → ".join("  -  " if value is None else f"{value:.3f}" for value in (before, after))


def verdict(results: Sequence[Result]) -> int:
    gains = [result.gain for result in results]
    good = statistics.fmean(gains) >= LEAST_MEAN_GAIN and min(gains) >= LEAST_GAIN
    asked = f"mean gain ≥ {LEAST_MEAN_GAIN:+.2f}, each ≥ {LEAST_GAIN:+.2f}"
    print(f"{'Passed' if good else 'FAILED'}: {asked}.")
    return 0 if good else 1


def write(
    results: Sequence[Result], curves: dict[str, list[dict[str, Any]]], options: argparse.Namespace
) -> None:
    import msgspec

    from halteres.observe.plots import plot_runs

    gains = [result.gain for result in results]
    record = {
        "what": "arithmetic on halteres/tiny: held-out success before and after RL",
        "command": " ".join(["python", "benchmarks/learning_arithmetic.py", *sys.argv[1:]]),
        "machine": machine(),
        "model": model(),
        "minutes_of_training": options.minutes,
        "held_out": {"tasks": options.tasks, "samples": options.samples},
        "gain": {
            "mean": statistics.fmean(gains),
            "median": statistics.median(gains),
            "least": min(gains),
            "greatest": max(gains),
        },
        "seeds": [
            {**asdict(result), "gain": result.gain, "gain_stderr": result.gain_stderr}
            for result in results
        ],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_bytes(
        msgspec.json.format(msgspec.json.encode(record)) + b"\n"
    )
    title = f"Learning arithmetic, {len(results)} seeds, {options.minutes:g} min each"
    plot_runs(curves, options.out.with_suffix(".png"), title, "reward/mean")
    print(f"Written: {options.out}.json, {options.out}.png")


def model() -> dict[str, Any]:
    """Which weights these runs began with: all seeds share them."""
    from halteres.models import TINY, builtin_path

    folder = builtin_path(TINY)
    assert folder is not None, "the package has its built-in model"
    facts = json.loads((folder / "halteres.json").read_text(encoding="utf-8"))
    return {name: facts.get(name) for name in ("name", "version", "recipe_hash", "weights_sha256")}


if __name__ == "__main__":
    sys.exit(main())
