"""One whole on-policy RL step, here and in TRL's `GRPOTrainer`, in one invocation.

8 prompts x 16 samples x 64 tokens, rank-16 LoRA on the attention and MLP projections, fp32, the same model folder and
threads. Both parties are started and warmed up first, then take turns step by step; the driver measures both from
outside: wall clock, and CPU seconds of the party's whole process tree (for Halteres: trainer, service and engine).

    .venv/bin/python benchmarks/rl_step.py [--threads 1] [--steps 7]

Needs the `dev` extra (psutil comes with peft). TRL is installed into .venvs on first use.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from machine import machine

from halteres.environments.problems import draw_problem
from halteres.models import TINY, builtin_path

HERE = Path(__file__).parent
TRL = ("torch", "trl==1.16.*", "peft", "datasets")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(slots=True)
class Party:
    """One contestant: a process that makes a step when told."""

    name: str
    process: subprocess.Popen[str]
    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def start(cls, name: str, python: str, script: str, work: dict[str, Any], log: Path) -> Party:
        threads = str(work["threads"])
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0", "TOKENIZERS_PARALLELISM": "false"}
        variables |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": ""}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [python, str(HERE / script), json.dumps(work)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=variables,
                text=True,
            )
        return cls(name, process)

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"error: {self.name} ended with exit code {self.process.wait()}; see its log.")
        return json.loads(line)

    def step(self) -> dict[str, Any]:
        """One step, measured from outside."""
        assert self.process.stdin is not None
        cpu, started = self.cpu_s(), time.perf_counter()
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        said = self.answer()
        return {**said, "wall_s": time.perf_counter() - started, "cpu_s": self.cpu_s() - cpu}

    def cpu_s(self) -> float:
        """User and system seconds of the process and all below it."""
        root = psutil.Process(self.process.pid)
        times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def summary(self) -> dict[str, Any]:
        keys = [key for key in self.steps[0] if key.endswith("_s")]
        return {f"median_{key}": round(median(step[key] for step in self.steps), 4) for key in keys}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="of each party's numeric library")
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each party, at least 5")
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--model", type=Path, default=builtin_path(TINY), help="model folder, the same for both")
    parser.add_argument("--output", type=Path, help="result file")
    return parser.parse_args()


def the_work(options: argparse.Namespace) -> dict[str, Any]:
    generator = random.Random(0)
    return {
        "threads": options.threads,
        "folder": str(options.model.absolute()),
        "prompts": [draw_problem(generator, "train").question for _ in range(8)],
        "group_size": 16,
        "max_tokens": 64,
        "rank": 16,
        "targets": TARGETS,
        "learning_rate": 1e-4,
    }


def run(options: argparse.Namespace, scratch: Path) -> list[Party]:
    """Both parties, started, warmed up, and measured in turns."""
    work = the_work(options)
    trl = subprocess.check_output([HERE.parent / "scripts" / "client", "trl", *TRL], text=True).strip()
    parties = []
    try:
        for name, python, script in (
            ("halteres", sys.executable, "rl_step_halteres.py"),
            ("trl", trl, "rl_step_trl.py"),
        ):
            party = Party.start(name, python, script, {**work, "scratch": str(scratch / name)}, scratch / f"{name}.log")
            parties.append(party)
            party.facts = party.answer()
        for number in range(options.warmups + options.steps):
            for party in parties:
                measured = party.step()
                assert measured["tokens"] == 8 * 16 * 64, f"{party.name} sampled {measured['tokens']} tokens"
                if number >= options.warmups:
                    party.steps.append(measured)
                    print(f"{party.name:>9} wall {measured['wall_s']:.2f} s, cpu {measured['cpu_s']:.2f} s", flush=True)
    except BaseException:
        for log in scratch.glob("*.log"):
            print(f"--- end of {log.name}\n{log.read_text()[-3000:]}", file=sys.stderr)
        raise
    finally:
        for party in parties:
            party.stop()
    return parties


def main() -> None:
    options = parse()
    before = machine()
    with tempfile.TemporaryDirectory(prefix="halteres-bench-") as folder:
        ours, theirs = run(options, Path(folder))
    ratios = {
        key: round(median(step[key] for step in theirs.steps) / median(step[key] for step in ours.steps), 2)
        for key in ("cpu_s", "wall_s")
    }
    result = {
        "what": "one on-policy RL step: 8 prompts x 16 samples x 64 tokens, LoRA r16, fp32",
        "command": f"benchmarks/rl_step.py --threads {options.threads} --steps {options.steps}",
        "machine": {**before, "load_average_after": [round(load, 2) for load in os.getloadavg()]},
        "torch": version("torch"),
        "model": str(options.model.name),
        "trl_over_halteres": ratios,
        "parties": {
            party.name: {"facts": party.facts, **party.summary(), "steps": party.steps} for party in (ours, theirs)
        },
    }
    output = options.output or HERE / "results" / f"rl_step_{options.threads}_threads.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    for party in (ours, theirs):
        print(f"{party.name}: {party.summary()}")
    print(f"TRL / Halteres: {ratios['cpu_s']:.2f} in CPU seconds, {ratios['wall_s']:.2f} in wall clock -> {output}")


if __name__ == "__main__":
    main()
