"""What a run costs: the CPU seconds of its processes, followed until it ends."""

from __future__ import annotations

import json
import math
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")


def follow(run: Any, within_s: float = math.inf) -> float:
    """CPU seconds of a run's processes until it has ended; of its evaluations what they cost the
    engine.
    """
    ends = time.monotonic() + within_s
    seconds: dict[int, float] = {}
    while not (state := run.state()).terminal:
        if time.monotonic() > ends:
            raise SystemExit(
                f"Run {run.run_id} is still {state.status} after {within_s:.0f} s: {run.path}"
            )
        for pid, spent in processes_of(run.run_id):
            seconds[pid] = max(spent, seconds.get(pid, 0.0))
        time.sleep(0.5)
    if state.status == "failed":
        raise SystemExit(f"Run {run.run_id} failed: {state.error} ({run.path})")
    return sum(seconds.values())


def recorded(run: Any) -> tuple[float, float]:
    """CPU seconds of a run's processes and seconds that they were there, by the run's own record:
    also of one that nobody has followed.
    """
    cpu_s = 0.0
    rows = [json.loads(line) for line in (run.path / "usage.jsonl").open(encoding="utf-8")]
    for before, row in pairwise(rows):
        cpu_s += sum(row["cpu"].values()) * (row["t"] - before["t"])
    return cpu_s, rows[-1]["t"] - rows[0]["t"]


def processes_of(run_id: str) -> list[tuple[int, float]]:
    """Processes that belong to a run by their command line or their parent, and the CPU seconds of
    each so far.
    """
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    spent: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                commands[int(entry.name)] = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                )
            except OSError:
                continue  # it has ended
            parents[int(entry.name)] = int(fields[1])
            spent[int(entry.name)] = (int(fields[11]) + int(fields[12])) / TICKS
    roots = {
        pid for pid, command in commands.items() if run_id in command and "supervisor" in command
    }
    found = [pid for pid in spent if roots & {*lineage(pid, parents)}]
    evaluating = {pid for pid in found if " evaluate " in commands[pid]}
    return [(pid, spent[pid]) for pid in found if not evaluating & {*lineage(pid, parents)}]


def lineage(pid: int, parents: dict[int, int]) -> list[int]:
    line = [pid]
    while (parent := parents.get(line[-1], 0)) > 1 and parent not in line:
        line.append(parent)
    return line
