"""What do TRL's `GRPOTrainer` and a run of ours make of the same model in the same number of steps,
and what does each cost? SmolLM2-135M-Instruct on the sums of recipes/smollm2.

TRL gets what the recipe has: its prompts, its reward, LoRA of its rank on the attention and MLP
projections (alpha 32), its rate, groups, answers per step and steps, in fp32, one thread, no KL
term. Left as TRL has it: the loss (dapo, scaled by the group's deviation), AdamW's second decay
(0.999; ours 0.95), the gradient clipped at norm 1 (ours is not). A group whose answers are all
right or all wrong is trained on there, and replaced here by another that costs its sampling. Ours
also adapts the unembedding. Training draws its questions from the recipe's training split, by the
seed; both answer the same held-out questions.

Our side is what `benchmarks/smollm2.py --tasks sums` left in --home; it is run now where it is
missing. TRL's goes on from its newest checkpoint, one every 5 steps; what is complete is not done
again, steps that were done twice are counted twice in the costs. TRL is installed into .venvs on
first use. Written: benchmarks/results/smollm2_trl.json, smollm2_trl.png.

    .venv/bin/python benchmarks/smollm2_trl.py [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from machine import machine
from rl_step import HERE, TARGETS, TRL
from smollm2 import RECIPE, ROOT, measured

SCORE = "rollouts/score"
PARTY_WITHIN_S = 6 * 3600.0


def main() -> None:
    options = parse()
    options.home = options.home.absolute()
    options.home.mkdir(parents=True, exist_ok=True)
    os.environ["HALTERES_HOME"] = str(options.home)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    before = machine()
    subprocess.run([RECIPE / "get-model"], check=True)
    trl, trl_curve = of_trl(options)
    found = {"machine": before, "trl": trl}
    # of all answers: TRL trains on every group
    curves = {"TRL": [{**row, SCORE: row["reward/mean"]} for row in trl_curve]}
    if not options.trl_alone:
        ours, curve = measured("sums", options.seed, options)
        found["halteres"], curves["Halteres"] = ours, curve
    write(found, curves, options.out)
    print(json.dumps(found))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=int, default=256, help="held-out questions")
    parser.add_argument("--steps", type=int, help="of TRL; default: the recipe's")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--trl-alone", action="store_true", help="no run of ours beside it")
    parser.add_argument("--set", dest="edits", action="append", default=[])
    parser.add_argument("--home", type=Path, default=ROOT / "data" / "smollm2")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "smollm2_trl")
    return parser.parse_args()


def of_trl(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """TRL's figures and curve: from its folder, or trained now."""
    folder = options.home / f"trl-sums-{options.seed}-{options.dtype}"
    folder.mkdir(exist_ok=True)
    facts = folder / "facts.json"
    if not facts.exists():
        requirements = ["trl", *TRL]
        python = subprocess.check_output(
            [ROOT / "scripts" / "client", *requirements], text=True, encoding="utf-8"
        ).strip()
        work = json.dumps(the_work(folder, options))
        with (folder / "log").open("ab") as log:
            subprocess.run(
                [python, str(HERE / "smollm2_trl_party.py"), work],
                check=True,
                stdout=log,
                stderr=log,
                timeout=PARTY_WITHIN_S,
            )
    rows = read_lines(folder / "curve.jsonl")
    # of a step that was done twice, the last row
    curve = list({row["step"]: row for row in rows}.values())
    before, after = read(folder / "before.json"), read(folder / "after.json")
    return {
        "dtype": options.dtype,
        "seed": options.seed,
        "steps": len(curve),
        "before": before["sampled"],
        "after": after["sampled"],
        "before_greedy": before["greedy"],
        "after_greedy": after["greedy"],
        "gain": after["sampled"] - before["sampled"],
        "cpu_s": round(sum(row["cpu_s"] for row in rows), 1),
        "wall_s": round(sum(row["wall_s"] for row in rows), 1),
        **read(facts),
    }, curve


def the_work(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The recipe's sums as another program can take them."""
    sys.path.insert(0, str(RECIPE))
    import sums

    config, servers = sums.Sums.config_init()
    trainer = yaml.safe_load((RECIPE / "sums.yaml").read_text(encoding="utf-8"))["trainer"]
    config = config.model_copy(update={"eval_tasks": options.held_out})
    environment = sums.Sums(config, servers)
    steps = options.steps or trainer["total_steps"]
    groups = steps * config.batch_size // config.group_size
    rng = random.Random(options.seed)
    training = [sums.draw(rng, held_out=False) for _ in range(groups)]

    def row(item: tuple[int, int]) -> dict[str, Any]:
        return {"prompt": environment.prompt(item), "right": str(sum(item))}

    return {
        "folder": str(folder),
        "model": str(options.home / "models" / "smollm2-135m"),
        "dtype": options.dtype,
        "threads": 1,
        "seed": options.seed,
        "steps": steps,
        "answers": config.batch_size,
        "group_size": config.group_size,
        "max_tokens": config.max_new_tokens,
        "rank": trainer["lora_rank"],
        "learning_rate": trainer["learning_rate"],
        "targets": TARGETS,
        "training": [row(item) for item in training],
        "held_out": [row(item) for item in environment.eval_items()],
    }


def write(found: dict[str, Any], curves: dict[str, list[dict[str, Any]]], out: Path) -> None:
    from halteres.observe.plots import plot_runs

    text = json.dumps({**found, "curves": curves}, indent=1) + "\n"
    out.with_suffix(".json").write_text(text, encoding="utf-8")
    title = "SmolLM2-135M-Instruct on sums, TRL and Halteres"
    plot_runs(curves, out.with_suffix(".png"), title, SCORE)


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
