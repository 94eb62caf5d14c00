"""How well does a reward model tell generated pairs apart that it has not seen, kind by kind, for
every seed?

    python benchmarks/reward_accuracy.py [--model halteres/tiny] [--seeds 0 1 2 3 4] [--pairs 600]
        [--epochs 2] [--set NAME=VALUE]

Each seed is a training with pairs of its own, in a process of its own, then a look from another
process: 300 held-out pairs, whose problems are in no training set. What that process reads back
from the folder must give the very scores that the training process had in memory. Seconds are those
of the training, loading of the model included. Written: benchmarks/results/reward_accuracy.json (of
another model: reward_accuracy_<model>.json). Exit code 1 where a seed's accuracy is not above 0.80,
*polite* or *complete* not above 0.95, or a score has changed on its way through the folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from machine import machine

RESULTS = Path(__file__).parent / "results"
LEAST = {"overall": 0.80, "polite": 0.95, "complete": 0.95}
HELD_OUT = 300
ENDS_WITHIN_S = 3600.0


def main() -> int:
    options = parse()
    if options.work is not None:
        json.dump(train(options) if options.work == "train" else look(options), sys.stdout)
        return 0
    name = "reward_accuracy" + (
        "" if options.model == "halteres/tiny" else f"_{Path(options.model).name}"
    )
    record: dict[str, Any] = {
        "what": (
            "held-out accuracy of reward models trained on generated pairs, each with its 95 "
            "% Wilson interval"
        ),
        "command": " ".join(["python", "benchmarks/reward_accuracy.py", *sys.argv[1:]]),
        "machine": machine(),
        "seeds": [],
    }
    for seed in options.seeds:
        with tempfile.TemporaryDirectory(prefix="halteres-bench-") as folder:
            trained = process("train", seed, folder)
            looked = process("look", seed, folder)
        exact = trained.pop("scores") == looked.pop("scores")
        record["seeds"].append({"seed": seed, **trained, **looked, "reloaded_exactly": exact})
        print(json.dumps(record["seeds"][-1]), flush=True)
        record["load_average_after"] = machine()["load_average"]
        (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for kind in (*LEAST, "correct"):
        values = [one["accuracy"][kind]["value"] for one in record["seeds"]]
        print(f"{kind:10} mean {fmean(values):.3f}, least {min(values):.3f}")
    faults = [
        f"FAILED: seed {one['seed']}: {kind} {one['accuracy'][kind]['value']:.3f}."
        for one in record["seeds"]
        for kind, least in LEAST.items()
        if one["accuracy"][kind]["value"] <= least
    ]
    faults += [
        f"FAILED: seed {one['seed']}: scores differ."
        for one in record["seeds"]
        if not one["reloaded_exactly"]
    ]
    print("\n".join(faults) or "Passed.")
    return 1 if faults else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Accuracy of reward models on generated held-out pairs."
    )
    parser.add_argument("--model", default="halteres/tiny", help="base model: a name or a folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--pairs", type=int, default=600)
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of RewardConfig"
    )
    parser.add_argument("--work", choices=("train", "look"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def process(work: str, seed: int, folder: str) -> dict[str, Any]:
    command = [sys.executable, *sys.argv, "--work", work, "--folder", folder, "--seeds", str(seed)]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        timeout=ENDS_WITHIN_S,
        check=True,
        encoding="utf-8",
    )
    return json.loads(done.stdout.splitlines()[-1])


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train; the scores of the held-out texts as the weights in memory give them."""
    from halteres.environments.arithmetic_pairs import preference_pairs
    from halteres.rewards import RewardConfig, RewardTrainer
    from halteres.rewards.training_plan import parse_settings

    (seed,) = options.seeds
    settings = parse_settings(options.set)
    config = RewardConfig(
        output_dir=str(options.folder / "model"),
        num_train_epochs=options.epochs,
        seed=seed,
        disable_tqdm=True,
        save_strategy="no",
        **settings,
    )
    began, cpu = time.monotonic(), time.process_time()
    rows = list(preference_pairs(options.pairs, seed=seed))
    trainer = RewardTrainer(model=options.model, args=config, train_dataset=rows)
    trainer.train()
    spent = {
        "cpu_s": round(time.process_time() - cpu, 1),
        "wall_s": round(time.monotonic() - began, 1),
    }
    return {
        **spent,
        "tokens": trainer.num_tokens,
        "scores": [score.value for score in trainer.model.score(texts(seed))],
    }


def look(options: argparse.Namespace) -> dict[str, Any]:
    """The same texts and the table by kind, from the folder."""
    from halteres.rewards import RewardModel
    from halteres.rewards.metrics import share

    (seed,) = options.seeds
    model = RewardModel.load(options.folder / "model")
    scores = [score.value for score in model.score(texts(seed))]
    kinds = [row["kind"] for row in held_out(seed)]
    right = [chosen > rejected for chosen, rejected in zip(scores[::2], scores[1::2], strict=True)]
    by_kind = {
        kind: [r for r, k in zip(right, kinds, strict=True) if k == kind]
        for kind in sorted(set(kinds))
    }
    shares = {
        kind: share(sum(found), len(found)) for kind, found in {"overall": right, **by_kind}.items()
    }
    return {"accuracy": {kind: asdict(found) for kind, found in shares.items()}, "scores": scores}


def held_out(seed: int) -> list[dict[str, Any]]:
    from halteres.environments.arithmetic_pairs import preference_pairs

    return list(preference_pairs(HELD_OUT, seed=seed, split="eval"))


def texts(seed: int) -> list[Any]:
    """Chosen and rejected side of each held-out pair, in turn, as chats."""
    return [row["prompt"] + row[side] for row in held_out(seed) for side in ("chosen", "rejected")]


if __name__ == "__main__":
    sys.exit(main())
