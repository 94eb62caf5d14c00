"""Ten steps of `halteres train arithmetic`, sampled by the engine and by a real vLLM on this CPU.

    VLLM="$(scripts/vllm-environment)/vllm" .venv/bin/python benchmarks/vllm_arithmetic.py

Writes both curves to benchmarks/results/vllm_arithmetic.json. The unembedding is left out of both
adapters, so that they are alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "vllm_arithmetic.json"
KEPT = ("reward/mean", "eval/percent_correct", "kl_sample_train_v2", "logprobs/absdiff_max")


def run(samplers: str, steps: int, vllm: str) -> dict[str, Any]:
    """One run in a home of its own: its curve, and how long it took with its start."""
    with tempfile.TemporaryDirectory(prefix="halteres-vllm-") as home:
        changes = {
            "inference.samplers": samplers,
            "inference.vllm": f"{vllm} --enforce-eager",
            "trainer.train_unembed": "false",
            "trainer.total_steps": str(steps),
            "trainer.eval_every": "0",
        }
        words = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
        began = time.monotonic()
        subprocess.run(
            [str(Path(sys.executable).with_name("halteres")), "train", "arithmetic", *words],
            env={**os.environ, "HALTERES_HOME": home},
            check=True,
            stdout=sys.stderr,
        )
        seconds = time.monotonic() - began
        (metrics,) = Path(home).glob("runs/*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    curve = [
        {"step": row.get("step"), **{name: row[name] for name in KEPT if name in row}}
        for row in rows
        if any(name in row for name in KEPT)
    ]
    return {"samplers": samplers, "seconds": round(seconds, 1), "curve": curve}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    steps, vllm = parser.parse_args().steps, os.environ["VLLM"]
    found = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "steps": steps,
        "runs": [run(samplers, steps, vllm) for samplers in ("[vllm]", "0")],
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found["runs"], indent=1))


if __name__ == "__main__":
    main()
