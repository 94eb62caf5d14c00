"""GEM's training script, as it is, and `halteres train game:...` on the same work: how far does
either come?

    python benchmarks/gem_script.py [--seeds 0 1 2 3 4] [--steps 20] [--turns 128] [--rank 16]
    [--python PYTHON]

The script (`tinker_train_gem.py`, unmodified, beside this checkout) trains against our service with
the built-in model; it reads no seed, so that its seeds are repetitions. Each is followed by a run
of ours with as many steps, the same learning rate, rank, discount and token limit, and as many
whole episodes in a step as make nearly the script's number of turns. The same held-out games are
then played by the final weights of both, at temperature 1. CPU seconds are those of all processes
of training, evaluations apart. Written: benchmarks/results/gem_script.{json,png}. Exit code 1 where
ours wins less than the script's weights, by more than the 95 % interval of the difference.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import learning_game
from machine import machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gem_script"
SCRIPT = ROOT.parent / "shared" / "seeds" / "restored" / "tinker_train_gem.py"
REQUIREMENTS = ("torch", "gem-llm==0.1.0", "chz", "wandb", "termcolor", "tinker==0.38.0")
NAME = "Qwen/Qwen3-4B-Instruct-2507"
"""The script's default model, which stands for the built-in one here."""

PARTIES = ("script", "halteres")
CURVE = "sampler/episode_return"
GAMMA = 0.9
ENDS_WITHIN_S = 3600.0

Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One training."""

    party: str
    seed: int
    turns_sampled: float  # a step, in the mean
    turns_trained: float
    episodes: float
    wins_before: float  # share of held-out games that untrained weights win: the same of both
    wins: float  # ... and the final ones
    held_out_return: float
    cpu_s: float  # of training
    wall_s: float


def main() -> int:
    options = parse()
    prepare(options)
    print(f"{machine()['cpu']}, {machine()['cores']} cores; runs in {options.home}", flush=True)
    results: list[Result] = []
    curves: dict[str, list[Rows]] = {party: [] for party in PARTIES}
    for seed in options.seeds:
        for result, rows in both(seed, options):
            results.append(result)
            curves[result.party].append(rows)
            tell(result)
    print_table(results)
    write(results, curves, options)
    if not options.keep:
        shutil.rmtree(options.home)
    return verdict(results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="GEM's script, unmodified, and ours on the same work."
    )
    parser.add_argument("--script", type=Path, default=SCRIPT)
    parser.add_argument(
        "--python",
        type=Path,
        help="an interpreter with the script's packages; default: one is made once",
    )
    parser.add_argument("--game", default="GuessTheNumber-v0-easy")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=128, help="of a step: the script's batch_size")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--max-tokens", type=int, default=64, help="of one answer")
    parser.add_argument("--tasks", type=int, default=512, help="held-out games")
    parser.add_argument(
        "--home", type=Path, help="where everything goes and stays; default: a temporary folder"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="results, without suffix")
    options = parser.parse_args()
    if not options.script.is_file():
        parser.exit(
            1, f"error: the script is not there: {options.script}. Name it with --script.\n"
        )
    options.keep = options.home is not None
    options.home = (options.home or Path(tempfile.mkdtemp(prefix="halteres-bench-"))).absolute()
    return options


def prepare(options: argparse.Namespace) -> None:
    """An interpreter for the script, and the built-in model under the name that it asks for."""
    if options.python is None:
        command = [ROOT / "scripts" / "client", "gem", *REQUIREMENTS]
        options.python = Path(subprocess.check_output(command, text=True, encoding="utf-8").strip())
    options.python = options.python.absolute()
    os.environ["HALTERES_HOME"] = str(options.home)
    os.environ["HF_HOME"] = str(options.home / "hugging-face")
    added = subprocess.run(
        [sys.executable, "-m", "halteres", "models", "add", "halteres/tiny", "--as", NAME],
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    if added.returncode:
        sys.exit(added.stderr)


def both(seed: int, options: argparse.Namespace) -> list[tuple[Result, Rows]]:
    """The script's training and ours; ours comes second, for it is given the script's number of
    turns.
    """
    from halteres.runs.directory import find_run
    from halteres.runs.servers import served

    folder = options.home / f"script-{seed}"
    folder.mkdir(parents=True)
    theirs, spent = run_script(seed, folder, options)
    turns = statistics.fmean(row["sampler/num_turns_per_episode"] for row in theirs)
    options.edits = [
        f"env.batch_size={max(2, round(options.turns / turns))}",
        f"env.max_new_tokens={options.max_tokens}",
        f"trainer.lora_rank={options.rank}",
        f"trainer.learning_rate={options.learning_rate}",
        f"trainer.gamma={GAMMA}",
    ]
    trained, ours = learning_game.train("rebn", seed, options)
    ours = [row for row in ours if CURVE in row]
    (folder_of_output,) = (folder / "tinker_output").iterdir()
    *_, last = map(
        json.loads,
        (folder_of_output / "checkpoints.jsonl").read_text(encoding="utf-8").splitlines(),
    )
    with served(NAME, log=folder / "service.log") as service:
        played = learning_game.score(
            find_run(trained.run_id), service.url, last["state_path"], options.tasks
        )
    return [
        (
            Result(
                party="script",
                seed=seed,
                turns_trained=options.turns,
                wins_before=trained.wins_before,
                wins=played["eval/outcome/success"],
                held_out_return=played["eval/mean_return"],
                **spent,
                **sampled(theirs),
            ),
            theirs,
        ),
        (
            Result(
                party="halteres",
                seed=seed,
                turns_trained=sampled(ours)["turns_sampled"],
                wins_before=trained.wins_before,
                wins=trained.wins_after,
                held_out_return=trained.return_after,
                cpu_s=trained.cpu_s,
                wall_s=trained.wall_s,
                **sampled(ours),
            ),
            ours,
        ),
    ]


def run_script(
    seed: int, folder: Path, options: argparse.Namespace
) -> tuple[Rows, dict[str, float]]:
    """What the script printed of each step, and what it and its service took: they are our only
    children meanwhile.
    """
    from halteres.runs.servers import served

    assignments = {
        "model_name": NAME,
        "env_id": f"game:{options.game}",
        "seed": seed,
        "max_steps": options.steps,
        "batch_size": options.turns,
        "learning_rate": options.learning_rate,
        "lora_rank": options.rank,
        "max_tokens": options.max_tokens,
        "gamma": GAMMA,
        "save_every": 0,
    }
    command = [
        options.python,
        options.script,
        *(f"{name}={value}" for name, value in assignments.items()),
    ]
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with served(NAME, log=folder / "service.log") as service:
        variables = {
            "TINKER_BASE_URL": service.url,
            "TINKER_API_KEY": "tml-local",
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "offline",
            "TOKENIZERS_PARALLELISM": "false",
        }
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=ENDS_WITHIN_S,
            encoding="utf-8",
        )
    wall_s, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    (folder / "script.log").write_text(f"{done.stdout}\n{done.stderr}", encoding="utf-8")
    rows = printed_rows(done.stdout)
    if done.returncode or len(rows) != options.steps:
        sys.exit(
            f"error: the script ended with code {done.returncode} after {len(rows)} "
            f"steps:\n{done.stderr[-3000:]}"
        )
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return rows, {"cpu_s": round(cpu_s, 1), "wall_s": round(wall_s, 1)}


def printed_rows(printed: str) -> Rows:
    """The script's metrics of each step, steps counted from 1 as in a run of ours."""
    found = re.findall(
        r"^[{ ]'([\w/:]+)': (?:np\.float64\()?(-?[\d.]+(?:e[+-]?\d+)?)", printed, re.MULTILINE
    )
    rows: Rows = []
    for name, value in found:
        if not rows or name in rows[-1]:
            rows.append({})
        rows[-1][name] = float(value)
    return [{**row, "step": int(row["step"]) + 1} for row in rows]


def sampled(rows: Rows) -> dict[str, float]:
    """Turns and episodes of a step, in the mean."""
    episodes = [row["sampler/num_episodes"] for row in rows]
    turns = [row["sampler/num_turns_per_episode"] * row["sampler/num_episodes"] for row in rows]
    return {
        "turns_sampled": round(statistics.fmean(turns), 1),
        "episodes": round(statistics.fmean(episodes), 1),
    }


def tell(result: Result) -> None:
    print(
        f"{result.party:>9} seed {result.seed}: wins {result.wins_before:.3f} -> "
        f"{result.wins:.3f}, "
        f"{result.turns_sampled:.0f} turns a step ({result.turns_trained:.0f} trained on), "
        f"{result.cpu_s:.0f} CPU s, "
        f"{result.wall_s:.0f} s",
        flush=True,
    )


def summary(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Means over the seeds, of each party; the interval is that of 95 %."""
    found: dict[str, dict[str, float]] = {}
    for party in PARTIES:
        own = [asdict(result) for result in results if result.party == party]
        names = [name for name in own[0] if name not in ("party", "seed")]
        wins = [one["wins"] for one in own]
        found[party] = {
            "seeds": len(own),
            **{name: statistics.fmean(one[name] for one in own) for name in names},
            "wins_interval": learning_game.interval(wins),
            "wins_least": min(wins),
        }
    return found


def print_table(results: Sequence[Result]) -> None:
    print(
        f"\n{'':>9} {'seeds':>5} {'wins ± 95 %':>15} {'return':>7} {'turns a step':>12} "
        f"{'trained on':>10} "
        f"{'CPU s':>6} {'wall s':>6}"
    )
    for party, row in summary(results).items():
        print(
            f"{party:>9} {row['seeds']:>5} {row['wins']:>7.3f} ± {row['wins_interval']:.3f} "
            f"{row['held_out_return']:>7.3f} {row['turns_sampled']:>12.0f} "
            f"{row['turns_trained']:>10.0f} "
            f"{row['cpu_s']:>6.0f} {row['wall_s']:>6.0f}",
            flush=True,
        )


def verdict(results: Sequence[Result]) -> int:
    """1 where ours wins less, beyond the interval of the difference; of one seed there is no
    interval.
    """
    script, ours = (summary(results)[party] for party in PARTIES)
    difference = ours["wins"] - script["wins"]
    margin = math.hypot(script["wins_interval"], ours["wins_interval"])
    worse = difference < -margin
    print(
        f"{'FAILED' if worse else 'Passed'}: ours minus the script's {difference:+.3f} ± "
        f"{margin:.3f}."
    )
    return int(worse)


def mean_curve(curves: Sequence[Rows]) -> Rows:
    """The mean over the seeds, step by step."""
    return [
        {"step": rows[0]["step"], CURVE: statistics.fmean(row[CURVE] for row in rows)}
        for rows in zip(*curves, strict=False)
    ]


def write(
    results: Sequence[Result], curves: dict[str, list[Rows]], options: argparse.Namespace
) -> None:
    import msgspec

    from halteres.observe.plots import plot_runs

    record = {
        "what": (
            f"GEM's script and ours on halteres/tiny, game:{options.game}: held-out games won "
            "after training"
        ),
        "command": " ".join(["python", "benchmarks/gem_script.py", *sys.argv[1:]]),
        "machine": machine(),
        "script_sha256": hashlib.sha256(options.script.read_bytes()).hexdigest(),
        "steps": options.steps,
        "held_out_games": options.tasks,
        "summary": summary(results),
        "runs": [asdict(result) for result in results],
        "episode_return": {
            party: [[row[CURVE] for row in rows] for rows in curves[party]] for party in PARTIES
        },
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_bytes(
        msgspec.json.format(msgspec.json.encode(record)) + b"\n"
    )
    title = f"{options.game}, {options.turns} turns a step, mean of seeds {options.seeds}"
    plot_runs(
        {party: mean_curve(curves[party]) for party in PARTIES},
        options.out.with_suffix(".png"),
        title,
        CURVE,
    )
    print(f"Written: {options.out}.json, {options.out}.png")


if __name__ == "__main__":
    sys.exit(main())
