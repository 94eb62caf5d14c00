"""Training a reward model here and in TRL's `RewardTrainer`, in one invocation, on the same pairs.

Two sets of pairs of random tokens: `shared_prompts`, whose prompts are at least half of every
pair's tokens, and `short_prompts`. fp32, the same model folder, optimiser, batch size and threads.
The parties take turns, a round at a time: one round is every pair once. Useful tokens are TRL's
`num_tokens`: both sides with their prompts, no padding.

    .venv/bin/python benchmarks/reward_training.py [--threads 1] [--rounds 3]

psutil comes with peft. TRL is installed into .venvs on first use.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from machine import machine
from rl_step import TRL, Party

from halteres.models import TINY, builtin_path

HERE = Path(__file__).parent
BATCH = 8
PARTIES = {
    "trl": ("reward_training_trl.py", {}),
    "halteres": ("reward_training_halteres.py", {}),
    "halteres_separate_rows": ("reward_training_halteres.py", {"share_prefixes": False}),
}


def pairs(count: int, *, shared: bool, seed: int = 0) -> list[dict[str, Any]]:
    """Completions of log-normal lengths, median 40 tokens; a prompt is 1 to 3 times as long as its
    pair's, or 10.
    """
    drawn = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return [drawn.randrange(10, 600) for _ in range(length)]

    rows: list[dict[str, Any]] = []
    for _ in range(count):
        own = [min(300, max(4, round(drawn.lognormvariate(3.7, 0.6)))) for _ in range(2)]
        prompt = tokens(round(sum(own) / 2 * drawn.uniform(1, 3)) if shared else 10)
        rows.append(
            {
                side: prompt + tokens(length)
                for side, length in zip(("chosen_ids", "rejected_ids"), own, strict=True)
            }
        )
    return rows


def measure(
    rows: list[dict[str, Any]], options: argparse.Namespace, trl: str, scratch: Path
) -> dict[str, Any]:
    """All parties on one set of pairs, by turns."""
    work = {
        "threads": options.threads,
        "folder": str(options.model.absolute()),
        "rows": str(scratch / "rows.json"),
        "batch": BATCH,
        "round": len(rows) // BATCH,
        "learning_rate": 1e-4,
    }
    (scratch / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    parties: list[Party] = []
    try:
        for name, (script, settings) in PARTIES.items():
            python = trl if name == "trl" else sys.executable
            asked = {**work, "settings": settings, "scratch": str(scratch / name)}
            parties.append(Party.start(name, python, script, asked, scratch / f"{name}.log"))
            parties[-1].facts = parties[-1].answer()
        for number in range(1 + options.rounds):
            for party in parties:
                party.steps.append(party.step())
                if number:
                    print(
                        f"{party.name:>24} {rate(party, number):8.0f} useful tokens / CPU s",
                        flush=True,
                    )
    except BaseException:
        for log in scratch.glob("*.log"):
            print(
                f"--- end of {log.name}\n{log.read_text(encoding='utf-8')[-3000:]}", file=sys.stderr
            )
        raise
    finally:
        for party in parties:
            party.stop()
    rates = {
        party.name: median(rate(party, number) for number in range(1, len(party.steps)))
        for party in parties
    }
    return {
        "pairs": len(rows),
        "mean_tokens_of_a_side": round(sum(len(row["chosen_ids"]) for row in rows) / len(rows), 1),
        "useful_tokens_per_cpu_s": {name: round(value) for name, value in rates.items()},
        "over_trl": {name: round(value / rates["trl"], 2) for name, value in rates.items()},
        "peak_mb": {party.name: party.steps[-1]["peak_mb"] for party in parties},
        "rounds": {party.name: party.steps for party in parties},
    }


def rate(party: Party, number: int) -> float:
    """Useful tokens per CPU second of a round; the first warms up."""
    now, before = party.steps[number], party.steps[number - 1]
    return (now["tokens"] - before["tokens"]) / now["cpu_s"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1, help="of each party's numeric library")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each party")
    parser.add_argument("--pairs", type=int, default=128)
    parser.add_argument(
        "--model", type=Path, default=builtin_path(TINY), help="model folder, the same for all"
    )
    parser.add_argument("--output", type=Path, default=HERE / "results" / "reward_training.json")
    options = parser.parse_args()
    before = machine()
    trl = subprocess.check_output(
        [HERE.parent / "scripts" / "client", "trl", *TRL], text=True, encoding="utf-8"
    ).strip()
    sets: dict[str, Any] = {}
    for name, shared in (("shared_prompts", True), ("short_prompts", False)):
        print(name)
        with tempfile.TemporaryDirectory(prefix="halteres-bench-") as folder:
            sets[name] = measure(pairs(options.pairs, shared=shared), options, trl, Path(folder))
    result = {
        "what": "training a reward model, batches of 8 pairs, fp32, full fine-tuning",
        "command": (
            f"benchmarks/reward_training.py --threads {options.threads} --rounds {options.rounds}"
        ),
        "machine": {**before, "load_average_after": [round(load, 2) for load in os.getloadavg()]},
        "torch": version("torch"),
        "model": options.model.name,
        "sets": sets,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, found in sets.items():
        print(f"{name}: over TRL {found['over_trl']}, peak MB {found['peak_mb']}")


if __name__ == "__main__":
    main()
