"""RLHF in one piece on SmolLM2-135M-Instruct: chats, preferences, a reward model, RL on its scores,
the best of several, a panel. Does what never entered the reward rise, and does length explain it?

A seed is the chain of recipes/rlhf: `halteres sft` on its chats, and the adapter merged; two sets
of pairs of that model's own answers; a reward model of each, calibrated; a run for each settings
file of --algorithms, on the scores of the first. On the panel: the exact verifier, and the second
reward model. Every stage that is complete is left as it is, a run that was cut off is resumed.
Written: benchmarks/results/smollm2_rlhf.json and its table, smollm2_rlhf.md. Exit code 1 where a
run raises the verifier or the panel's reward model by less than the 95 % interval of the
difference, or where length explains more than half of the verifier's gain.

Length: what the verifier's gain would be if it were that of the change of length alone, by the
slope of the first weights' answers within their prompts.

    .venv/bin/python benchmarks/smollm2_rlhf.py [--seeds 0] [--algorithms grpo ppo]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from machine import machine
from rlhf import change, halteres, samples_of, slope
from smollm2 import ROOT, completed_run, once

RECIPE = ROOT / "recipes" / "rlhf"
MODEL = "smollm2-135m"
BEST_OF = 4
SFT = ("batch_size=16", "trainer.max_token_trainer_length=128")
REWARD = ("--lora", "--set", "learning_rate=3e-4", "--set", "max_length=128")


def main() -> int:
    options = parse()
    options.home = options.home.absolute()
    options.home.mkdir(parents=True, exist_ok=True)
    os.environ["HALTERES_HOME"] = str(options.home)
    os.environ["HF_HUB_OFFLINE"] = "1"
    subprocess.run([ROOT / "recipes" / "smollm2" / "get-model"], check=True)
    seeds: list[dict[str, Any]] = []
    for seed in options.seeds:
        seeds.append(chain(seed, options))
        print(json.dumps(seeds[-1]), flush=True)
        write(seeds, options)
    faults = [fault for one in seeds for fault in faults_of(one)]
    print("\n".join(faults) or "Passed: the gain is real.")
    return int(bool(faults))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--algorithms", nargs="+", default=["grpo", "ppo"], help="settings of the recipe"
    )
    parser.add_argument("--chats", type=int, default=192)
    parser.add_argument("--prompts", type=int, default=150, help="of each set, answered 8 times")
    parser.add_argument("--tasks", type=int, default=64, help="held-out tasks of an evaluation")
    parser.add_argument("--set", dest="edits", action="append", default=[], help="of the RL runs")
    parser.add_argument("--home", type=Path, default=ROOT / "data" / "smollm2-rlhf")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "smollm2_rlhf"
    )
    return parser.parse_args()


def chain(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """All stages of a seed, each in its place below the seed's folder."""
    folder = options.home / f"seed-{seed}"
    folder.mkdir(exist_ok=True)
    base = once(folder / "base.json", partial(base_figures, options))
    chats = folder / "chats.jsonl"
    if not chats.exists():
        make_data("chats", chats, "--rows", options.chats, "--seed", seed)
    sft_run, sft_costs = completed_run(folder / "sft.lives.jsonl", partial(sft, chats, seed))
    model = folder / "sft-model"
    if not model.exists():
        halteres("export", sft_run.run_id, "--format", "merged", "--out", str(model))
    models = {
        name: reward_model(folder / name, model, 2 * seed + number, options)
        for number, name in enumerate(("reward-model", "panel-model"))
    }
    runs: dict[str, Any] = {}
    for algorithm in options.algorithms:
        start = partial(rl, algorithm, folder, seed, options)
        run, costs = completed_run(folder / f"{algorithm}.lives.jsonl", start)
        runs[algorithm] = {**figures_of(run, options), **costs}
    return {
        "seed": seed,
        "base": base,
        "sft": {"loss": losses_of(sft_run), **sft_costs},
        "reward_models": models,
        "runs": runs,
    }


def base_figures(options: argparse.Namespace) -> dict[str, Any]:
    """The model that nothing was done to, on the held-out tasks."""
    asked = ["--model", MODEL, "--tasks", str(options.tasks), "--samples", str(BEST_OF), "--json"]
    return json.loads(halteres("env", "eval", str(RECIPE / "largest.py"), *asked))


def make_data(verb: str, *arguments: Any) -> None:
    command = [sys.executable, str(RECIPE / "data.py"), verb, *map(str, arguments)]
    subprocess.run(command, check=True)


def sft(chats: Path, seed: int, resume: Any) -> Any:
    """A run on the chats, or one that goes on from `resume`."""
    from halteres.config.file_training import resolve_file_training
    from halteres.runs.planning.file_plan import plan_file_run
    from halteres.runs.start import start_run

    edits = [f"inference.model={MODEL}", f"run.seed={seed}", *SFT]
    asked = resolve_file_training("sft", str(chats), edits)
    return start_run(plan_file_run(asked, resume=resume))


def reward_model(
    folder: Path, base: Path, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Trained on pairs of answers of `base` and calibrated; its accuracy on held-out pairs."""
    pairs = folder.with_name(f"{folder.name}-pairs.jsonl")
    held_out = folder.with_name(f"{folder.name}-held-out.jsonl")
    if not held_out.exists():
        sampling = ("--model", base, "--prompts", options.prompts, "--seed", seed)
        make_data("pairs", pairs, held_out, *sampling)
    return once(folder.with_suffix(".json"), partial(trained, folder, base, pairs, held_out))


def trained(folder: Path, base: Path, pairs: Path, held_out: Path) -> dict[str, Any]:
    if not (folder / "halteres_reward.json").exists():
        arguments = ("--model", str(base), "--data", str(pairs), "--out", str(folder))
        halteres("reward", "train", *arguments, *REWARD, "--resume")
    halteres("reward", "calibrate", str(folder), str(held_out))
    said = halteres("reward", "eval", str(folder), str(held_out), "--no-probes", "--json")
    accuracy = json.loads(said)["overall"]["accuracy"]
    return {"accuracy": accuracy, "pairs": count(pairs), "held_out_pairs": count(held_out)}


def count(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def rl(algorithm: str, folder: Path, seed: int, options: argparse.Namespace, resume: Any) -> Any:
    """A run on the reward model's scores alone, or one that goes on from `resume`."""
    from halteres.config.resolution import resolve_settings
    from halteres.runs.planning.plan import plan_run
    from halteres.runs.start import start_run

    rewards = [{"name": "preferred", "model": str(folder / "reward-model")}]
    panel = [
        {"name": "verifier", "environment": True},
        {"name": "other", "model": str(folder / "panel-model")},
    ]
    edits = [
        f"run.seed={seed}",
        f"inference.model={folder / 'sft-model'}",
        f"env.eval_tasks={options.tasks}",
        f"env.rewards={json.dumps(rewards)}",
        f"env.panel={json.dumps(panel)}",
    ]
    if algorithm == "ppo":
        edits.append(f"trainer.critic={folder / 'reward-model'}")
    edits += options.edits
    settings = RECIPE / f"{algorithm}.yaml"
    asked = resolve_settings(str(RECIPE / "largest.py"), settings, edits)
    return start_run(plan_run(asked, resume=resume))


def losses_of(run: Any) -> list[float]:
    """Held-out nats per token, before and after."""
    rows = [row for row in run.metrics() if "eval/loss_per_token" in row]
    return [rows[0]["eval/loss_per_token"], rows[-1]["eval/loss_per_token"]]


def figures_of(run: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Before and after, each with half of the difference's 95 % interval."""
    rows = [row for row in run.metrics() if "eval/percent_correct" in row]
    first, last = rows[0], rows[-1]
    lengths = [row["eval/completion_lengths"] for row in (first, last)]
    best = f"eval/percent_correct_best_of_{BEST_OF}"
    return {
        "run_id": run.run_id,
        "steps": last["step"],
        "verifier": change(first, last, "eval/percent_correct", options),
        "reward": change(first, last, "eval/reward/total", options),
        "panel": change(first, last, "eval/panel/other", options),
        "best_of": [first[best], last[best]],
        "tokens": lengths,
        "by_length_alone": slope(samples_of(run.path, 0)) * (lengths[1] - lengths[0]),
        "alerts": [event["rule"] for event in run.events() if event.get("type") == "alert"],
    }


def faults_of(seed: dict[str, Any]) -> list[str]:
    faults: list[str] = []
    for algorithm, run in seed["runs"].items():
        who = f"FAILED: {algorithm}, seed {seed['seed']}"
        for name in ("verifier", "panel"):
            gain, interval = run[name]["gain"], run[name]["interval"]
            if gain <= interval:
                faults.append(f"{who}: {name} gained {gain:.3f}, within ± {interval:.3f}.")
        if abs(run["by_length_alone"]) > abs(run["verifier"]["gain"]) / 2:
            faults.append(f"{who}: by length alone {run['by_length_alone']:+.3f}.")
    return faults


def write(seeds: list[dict[str, Any]], options: argparse.Namespace) -> None:
    record = {
        "what": "RLHF on SmolLM2-135M-Instruct: held-out figures of what never entered the reward",
        "command": " ".join(["python", "benchmarks/smollm2_rlhf.py", *sys.argv[1:]]),
        "machine": machine(),
        "seeds": seeds,
    }
    text = json.dumps(record, indent=2) + "\n"
    options.out.with_suffix(".json").write_text(text, encoding="utf-8")
    options.out.with_suffix(".md").write_text(table(seeds), encoding="utf-8")


def table(seeds: list[dict[str, Any]]) -> str:
    """The seeds as a table in Markdown."""
    lines = [
        f"| seed | weights | right | best of {BEST_OF} | reward | panel's model | tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in seeds:
        base = one["base"]
        right, tokens = base["eval/percent_correct"], base["eval/completion_lengths"]
        lines.append(f"| {one['seed']} | base | {right:.1%} | | | | {tokens:.1f} |")
        for number, (algorithm, run) in enumerate(one["runs"].items()):
            for moment, weights in enumerate(("sft", algorithm)):
                # the runs begin with the same weights
                if number == 0 or moment == 1:
                    lines.append(line(one["seed"], weights, run, moment))
    return "\n".join(lines) + "\n"


def line(seed: int, weights: str, run: dict[str, Any], moment: int) -> str:
    name = ("before", "after")[moment]
    figures = " | ".join(
        [
            f"{run['verifier'][name]:.1%}",
            f"{run['best_of'][moment]:.1%}",
            f"{run['reward'][name]:.2f}",
            f"{run['panel'][name]:.2f}",
            f"{run['tokens'][moment]:.1f}",
        ]
    )
    return f"| {seed} | {weights} | {figures} |"


if __name__ == "__main__":
    sys.exit(main())
