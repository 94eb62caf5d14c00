"""What does the training service cost: with an engine that costs nothing, with the built-in model,
beside a peer?

The real SDK against servers on this machine: one-token samples one after the other, a trivial
forward_backward with its optim_step, a publish with its first sample, and many samples in flight at
once, each of which must be answered with the tokens that its seed gives alone. Three contests, each
in rounds:

    scripted   our service with the scripted engine, this environment's SDK; aims: sample p50 <= 5
               ms, p99 <= 25 ms
    built-in   our service with the built-in model, the same SDK; aim: sample p50 <= 10 ms
    peer       our service and SkyRL's Tinker server (JAX backend), the built-in model in float32,
               the newest SDK that SkyRL takes; they take turns, round by round

    .venv/bin/python benchmarks/service_overhead.py [--rounds 5] [--contest scripted ...] [--out
    FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import servers
from machine import machine

from halteres.models import TINY, builtin_path

CONTESTS = ("scripted", "built-in", "peer")
OFTEN = {"samples": 100, "steps": 40, "publishes": 15, "together": 1000}
SELDOM = {"samples": 50, "steps": 20, "publishes": 8, "together": 64}
"""Of a round; the second where a peer takes part, whose calls take a tenth of a second each."""

AIMS = {"scripted": {"p50": 5.0, "p99": 25.0}, "built-in": {"p50": 10.0}}
"""Milliseconds of a one-token sample."""


@dataclass(slots=True)
class Caller:
    """The SDK before one server: a process that makes a round when told."""

    server: str
    process: subprocess.Popen[str]
    sdk: str = ""
    rounds: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def start(cls, server: str, python: str, work: dict[str, Any]) -> Caller:
        variables = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TINKER_TELEMETRY": "0",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [
            python,
            str(Path(__file__).with_name("service_calls.py")),
            json.dumps({"rank": 8, **work}),
        ]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        caller = cls(
            server, subprocess.Popen(command, env=variables, text=True, **pipes, encoding="utf-8")
        )
        caller.sdk = caller._answer()["sdk"]
        return caller

    def round(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"error: the caller of {self.server} ended with exit code {self.process.wait()}."
            )
        return json.loads(line)

    def figures(self) -> dict[str, Any]:
        """Of all rounds: median and tail of each call, and whether anything in flight was lost."""
        told: dict[str, Any] = {"sdk": self.sdk}
        for name in (name for name in self.rounds[0] if name.endswith("_ms")):
            took = [each for measured in self.rounds for each in measured[name]]
            told[name] = {
                f"p{share}": round(float(np.percentile(took, share)), 2) for share in (50, 90, 99)
            }
        rates = [measured["together"] / measured["together_s"] for measured in self.rounds]
        told["in_flight"] = {
            "at_once": self.rounds[0]["together"],
            "answered": sum(measured["together"] for measured in self.rounds),
            "wrong": sum(measured["together_wrong"] for measured in self.rounds),
            "samples_per_second": round(float(np.median(rates))),
        }
        return told


def float32(scratch: Path) -> str:
    """The built-in model in a folder whose config.json says float32, so that every server computes
    in it.
    """
    source = builtin_path(TINY)
    assert source is not None
    folder = Path(shutil.copytree(source, scratch / "model"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps({**config, "dtype": "float32"}), encoding="utf-8"
    )
    return str(folder)


def started(contest: str, scratch: Path, stack: ExitStack) -> list[Caller]:
    """The servers of a contest, each with its caller, warmed up by one round."""
    if contest == "peer":
        model, python = float32(scratch), servers.peer_python()
        urls = {
            "halteres": stack.enter_context(servers.halteres(scratch / "halteres", model, "torch")),
            "skyrl": stack.enter_context(servers.skyrl(scratch / "skyrl", model, python)),
        }
        work = {"model": model, **SELDOM}
    else:
        engine = "scripted" if contest == "scripted" else "torch"
        urls = {
            "halteres": stack.enter_context(servers.halteres(scratch / "halteres", TINY, engine))
        }
        python, work = sys.executable, {"model": TINY, **OFTEN}
    callers = []
    for server, url in urls.items():
        callers.append(Caller.start(server, python, {"url": url, **work}))
        stack.callback(callers[-1].stop)
        callers[-1].round()
    return callers


def measured(contest: str, rounds: int, scratch: Path) -> dict[str, Any]:
    """The figures of a contest, by server."""
    with ExitStack() as stack:
        callers = started(contest, scratch, stack)
        for number in range(rounds):
            for caller in callers:
                caller.rounds.append(caller.round())
                print(
                    f"{contest}, round {number + 1}: {caller.server}", file=sys.stderr, flush=True
                )
        told = {caller.server: caller.figures() for caller in callers}
    for server, figures in told.items():
        assert not figures["in_flight"]["wrong"] or server != "halteres", figures["in_flight"]
    return told | (
        {"skyrl_over_halteres": ratios(told)}
        if contest == "peer"
        else aimed(contest, told["halteres"])
    )


def ratios(told: dict[str, Any]) -> dict[str, float]:
    """How many times as long the peer's median takes."""
    ours, theirs = told["halteres"], told["skyrl"]
    slower = {
        name: round(theirs[name]["p50"] / ours[name]["p50"], 1)
        for name in ours
        if name.endswith("_ms")
    }
    rate = ours["in_flight"]["samples_per_second"] / max(
        theirs["in_flight"]["samples_per_second"], 1
    )
    return {**slower, "in_flight": round(rate, 1)}


def aimed(contest: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Each aim with whether it is met."""
    aims = AIMS[contest]
    return {
        "aims": {
            f"sample {share} <= {most} ms": figures["sample_ms"][share] <= most
            for share, most in aims.items()
        }
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contest", nargs="+", choices=CONTESTS, default=CONTESTS)
    parser.add_argument("--out", type=Path, help="also write the figures there")
    options = parser.parse_args()
    before, figures = machine(), {}
    with tempfile.TemporaryDirectory(prefix="halteres-bench-") as scratch:
        os.environ["HALTERES_HOME"] = scratch
        for contest in options.contest:
            (Path(scratch) / contest).mkdir()
            figures[contest] = measured(contest, options.rounds, Path(scratch) / contest)
    report = {
        "command": f"benchmarks/service_overhead.py --rounds {options.rounds}",
        "machine": {**before, "load_average_after": machine()["load_average"]},
        **figures,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
