"""What does the trajectory server cost, beside the unmodified `run-api` of atroposlib 0.4.0, in the
same invocation?

    .venv/bin/python benchmarks/trajectories/run.py [--out FILE]
    .venv/bin/python benchmarks/trajectories/run.py --quick --only ingest mixed      # a quick look

Both are processes on this machine with their default options; ours writes to a database and answers
when what it was given survives kill -9. They take turns, round by round, each time from the start
and warmed up; figures are medians of the rounds, ratios those of the medians.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# the benchmarks are no installed package
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.machine import machine
from benchmarks.trajectories import batches, ingest, mixed, polls, report, restarts
from benchmarks.trajectories.parties import PARTIES, Server, peer_python
from benchmarks.trajectories.wire import CUT_OFF_S, CutOff


class Case(Protocol):
    """One setting of a scenario; its string names it in the results."""

    def round(self, server: Server) -> Mapping[str, float]:
        """Figures of one round against a server that has just started."""
        ...


@dataclass(frozen=True, slots=True)
class Scenario:
    """Cases under one name, and who takes part."""

    cases: Callable[[bool], Sequence[Case]]
    parties: tuple[str, ...] = tuple(PARTIES)


SCENARIOS: dict[str, Scenario] = {
    "ingest": Scenario(ingest.settings),
    "batches": Scenario(batches.settings),
    "batches_throughout": Scenario(batches.throughout, ("halteres",)),
    "drain": Scenario(batches.drains),
    "polls": Scenario(polls.settings),
    "mixed": Scenario(mixed.settings),
    "restart": Scenario(restarts.settings, ("halteres",)),
    "lost": Scenario(restarts.lost),
}


def measured(case: Case, parties: Sequence[str], rounds: int, scratch: Path) -> dict[str, Any]:
    """The figures of a case by party, which take turns; whoever exceeds the client's patience is
    not asked again.
    """
    figures: dict[str, list[Mapping[str, float]]] = {party: [] for party in parties}
    cut_off: set[str] = set()
    for number in range(rounds):
        for party in parties:
            if party in cut_off:
                continue
            try:
                figures[party].append(_round(case, party, scratch))
            except CutOff:
                cut_off.add(party)
            print(f"{case}, round {number + 1}: {party}", file=sys.stderr, flush=True)
    answer = report.told({party: each for party, each in figures.items() if each})
    return answer | {party: {"cut_off": f"longer than {CUT_OFF_S:.0f} s"} for party in cut_off}


def _round(case: Case, party: str, scratch: Path) -> Mapping[str, float]:
    server = PARTIES[party](party, scratch / party)
    try:
        server.start()
        return case.round(server)
    finally:
        server.close()


def packages(python: Path) -> dict[str, str]:
    """What the original runs on."""
    names = ("atroposlib", "fastapi", "pydantic", "starlette", "uvicorn", "uvloop", "httptools")
    program = (
        "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in "
        f"{names!r}}}))"
    )
    return json.loads(subprocess.check_output([python, "-c", program], text=True, encoding="utf-8"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument(
        "--party",
        nargs="+",
        choices=PARTIES,
        default=list(PARTIES),
        help="leave one out: no ratios",
    )
    parser.add_argument("--case", default="", help="only cases whose name holds this")
    parser.add_argument(
        "--quick", action="store_true", help="one round, few requests, short queues: a try"
    )
    parser.add_argument("--out", type=Path, help="also write the figures there")
    options = parser.parse_args()
    before, results = machine(), {}
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory(prefix="halteres-bench-") as scratch:
        for name in options.only:
            scenario = SCENARIOS[name]
            parties = [party for party in scenario.parties if party in options.party]
            cases = [case for case in scenario.cases(options.quick) if options.case in str(case)]
            results[name] = {
                str(case): measured(case, parties, rounds, Path(scratch))
                for case in cases
                if parties
            }
    told = {
        "command": " ".join(["benchmarks/trajectories/run.py", *sys.argv[1:]]),
        "machine": {**before, "load_average_after": machine()["load_average"]},
        "original": packages(peer_python()),
        "aims": report.aims(results),
        **results,
    }
    text = json.dumps(told, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
