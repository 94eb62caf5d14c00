"""One whole on-policy RL step, here and in TRL's `GRPOTrainer`, each in fp32 and in bfloat16, in
one invocation.

8 prompts x 16 samples x 64 tokens (or --size, --tokens), rank-16 LoRA on the attention and MLP
projections, the same model folder and threads. All parties are started and warmed up first, then
take turns step by step; the driver measures them from outside: wall clock, and CPU seconds of the
party's whole process tree (for Halteres: trainer, service and engine). Ours are compared with TRL's
faster setting. Beside that: what the step's matmuls alone would take, by their operations and the
speed of a matmul of that many rows, measured between the steps.

    .venv/bin/python benchmarks/rl_step.py [--threads 1] [--steps 7]
    .venv/bin/python benchmarks/rl_step.py --model FOLDER --size 8 --tokens 24

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
import torch
from machine import machine

from halteres.engine.torch.projections import linear
from halteres.environments.problems import draw_problem
from halteres.models import TINY, builtin_path
from halteres.models.shape import ModelShape, read_shape

HERE = Path(__file__).parent
ROWS = 1024  # of the matmul whose speed is measured
TRL = ("torch", "trl==1.16.*", "peft", "datasets")
PARTIES = ["halteres-float32", "halteres-bfloat16", "trl-float32", "trl-bfloat16"]
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
        variables = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TINKER_TELEMETRY": "0",
            "TOKENIZERS_PARALLELISM": "false",
        }
        variables |= {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "CUDA_VISIBLE_DEVICES": "",
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                [python, str(HERE / script), json.dumps(work)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=variables,
                text=True,
                encoding="utf-8",
            )
        return cls(name, process)

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"error: {self.name} ended with exit code {self.process.wait()}; see its log."
            )
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1, help="of each party's numeric library")
    parser.add_argument(
        "--steps", type=int, default=7, help="measured steps of each party, at least 5"
    )
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument(
        "--model", type=Path, default=builtin_path(TINY), help="model folder, the same for both"
    )
    parser.add_argument("--size", type=int, default=16, help="samples of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of each sample")
    parser.add_argument("--parties", nargs="+", default=PARTIES, choices=PARTIES)
    parser.add_argument("--output", type=Path, help="result file")
    return parser.parse_args()


def the_work(options: argparse.Namespace) -> dict[str, Any]:
    generator = random.Random(0)
    return {
        "threads": options.threads,
        "folder": str(options.model.absolute()),
        "prompts": [draw_problem(generator, "train").question for _ in range(8)],
        "group_size": options.size,
        "max_tokens": options.tokens,
        "rank": 16,
        "targets": TARGETS,
        "learning_rate": 1e-4,
    }


def run(options: argparse.Namespace, scratch: Path) -> list[Party]:
    """Both parties, started, warmed up, and measured in turns."""
    work = the_work(options)
    trl = subprocess.check_output(
        [HERE.parent / "scripts" / "client", "trl", *TRL], text=True, encoding="utf-8"
    ).strip()
    parties = []
    try:
        for name in options.parties:
            kind, _, dtype = name.partition("-")
            python, script = (
                (trl, "rl_step_trl.py")
                if kind == "trl"
                else (sys.executable, "rl_step_halteres.py")
            )
            own = {**work, "dtype": dtype, "scratch": str(scratch / name)}
            party = Party.start(name, python, script, own, scratch / f"{name}.log")
            parties.append(party)
            party.facts = party.answer()
        for number in range(options.warmups + options.steps):
            for party in parties:
                measured = party.step()
                expected = 8 * options.size * options.tokens
                assert measured["tokens"] == expected, (
                    f"{party.name} sampled {measured['tokens']} tokens"
                )
                if number >= options.warmups:
                    measured["gflops"] = round(
                        matmul_gflops(party.name.partition("-")[2], options.model), 1
                    )
                    party.steps.append(measured)
                    print(
                        f"{party.name:>17} wall {measured['wall_s']:.2f} s, cpu "
                        f"{measured['cpu_s']:.2f} s",
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
    return parties


def matmul_gflops(dtype: str, model: Path) -> float:
    """Operations per CPU nanosecond of one matmul of the model's MLP, now, on one thread; the best
    of five.
    """
    torch.set_num_threads(1)
    shape = read_shape(model)
    x = torch.randn(ROWS, shape.width).to(getattr(torch, dtype))
    weight = torch.randn(2 * shape.feed, shape.width).to(x.dtype)
    times = []
    for _ in range(5):
        started = time.process_time()
        linear(x, weight)
        times.append(time.process_time() - started)
    return 2 * ROWS * weight.numel() / min(times) / 1e9


def layer_weights(shape: ModelShape) -> int:
    """Base weights that each token meets in the layers."""
    return (
        shape.layers * shape.width * (shape.qkv + shape.heads * shape.head_width + 3 * shape.feed)
    )


def step_gflop(model: Path, samples: int, tokens: int, prompt_tokens: int) -> float:
    """Operations of a step's matmuls with base weights, prompts computed once; without adapters and
    attention.
    """
    shape = read_shape(model)
    head = shape.width * shape.vocabulary
    layers = layer_weights(shape)
    answers = samples * tokens
    sampled = layers * (prompt_tokens + answers - samples) + head * answers
    trained = 2 * layers * (prompt_tokens + answers) + head * (prompt_tokens + 2 * answers)
    return 2 * (sampled + trained) / 1e9


def typical(party: Party, key: str) -> float:
    return median(step[key] for step in party.steps)


def compared(parties: list[Party], options: argparse.Namespace) -> dict[str, Any]:
    """Ours beside TRL's faster setting and beside the matmuls alone."""
    theirs = [party for party in parties if party.name.startswith("trl")]
    found: dict[str, Any] = {}
    for party in parties:
        if party not in theirs:
            cpu_s, prompts = typical(party, "cpu_s"), party.steps[-1]["prompt_tokens"]
            gflop = step_gflop(options.model, 8 * options.size, options.tokens, prompts)
            floor_s = gflop / typical(party, "gflops")
            found[party.name] = {"step_gflop": round(gflop, 1), "floor_cpu_s": round(floor_s, 3)}
            found[party.name]["share_of_floor"] = round(floor_s / cpu_s, 2)
            if theirs:
                for key in ("cpu_s", "wall_s"):
                    fastest = min(typical(other, key) for other in theirs)
                    found[party.name][f"trl_over_halteres_{key}"] = round(
                        fastest / typical(party, key), 2
                    )
    return found


def main() -> None:
    options = parse()
    before = machine()
    with tempfile.TemporaryDirectory(prefix="halteres-bench-") as folder:
        parties = run(options, Path(folder))
    ratios = compared(parties, options)
    work = f"8 prompts x {options.size} samples x {options.tokens} tokens"
    result = {
        "what": f"one on-policy RL step: {work}, LoRA r16",
        "command": f"benchmarks/rl_step.py --threads {options.threads} --steps {options.steps}"
        f" --size {options.size} --tokens {options.tokens}",
        "machine": {**before, "load_average_after": [round(load, 2) for load in os.getloadavg()]},
        "torch": version("torch"),
        "model": str(options.model.name),
        "compared": ratios,
        "parties": {
            party.name: {"facts": party.facts, **party.summary(), "steps": party.steps}
            for party in parties
        },
    }
    output = (
        options.output
        or HERE / "results" / f"rl_step_{options.model.name}_{options.threads}_threads.json"
    )
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for party in parties:
        print(f"{party.name}: {party.summary()}")
    for name, figures in ratios.items():
        print(f"{name}: {figures}")
    print(f"-> {output}")


if __name__ == "__main__":
    main()
