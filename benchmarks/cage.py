"""What does a cage cost: to start a worker, to ask one, and to ask 64 at once?

Workers that answer at once, with and without a cage. The start is until the first answer, of a
pool that has none, one after the other; next to it stands Python's own start. A worker that runs is
asked one question after the other (aim: at most 1 ms), then as many workers by as many callers,
each of which goes on with its next question as soon as it is answered. Memory is what the workers'
processes hold, their share of what is held in common counted (PSS).

    .venv/bin/python benchmarks/cage.py [--starts 20] [--questions 5000] [--workers 64] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from halteres.environments.cage import WORKER_LOOP, WorkerLimits, WorkerPool, cage_missing

WORKER = f"""
import sys
sys.path.insert(0, {str(WORKER_LOOP.parent)!r})
from worker_loop import serve
serve(lambda opening: lambda question: {{"score": 1.0}})
"""

WITHIN_S = 60.0
AIM_MS = 1.0
RESULTS = Path(__file__).parent / "results"


def pool(script: Path, *, caged: bool, size: int) -> WorkerPool:
    return WorkerPool(
        (sys.executable, str(script)),
        size=size,
        limits=WorkerLimits(calls=None),
        caged=caged,
        readable=(script, WORKER_LOOP),
        start_within_s=WITHIN_S,
    )


def spread(seconds: list[float]) -> dict[str, float]:
    """Milliseconds."""
    return {
        name: round(1000 * float(np.percentile(seconds, percent)), 3)
        for name, percent in (("p50", 50), ("p99", 99))
    }


def cpu_s() -> float:
    """Of this process, which asks."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def python_starts(count: int) -> dict[str, float]:
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", ""], check=True)
        taken.append(time.perf_counter() - began)
    return spread(taken)


def memory_mb(script: Path) -> float:
    """PSS of every process whose command line names the script."""
    total = 0
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        if str(script).encode() in file.read_bytes():
            rows = (file.parent / "smaps_rollup").read_text(encoding="ascii").splitlines()
            total += sum(int(row.split()[1]) for row in rows if row.startswith("Pss:"))
    return total / 1024


async def measure(script: Path, caged: bool, args: argparse.Namespace) -> dict[str, Any]:
    starts = []
    for _ in range(args.starts):
        workers = pool(script, caged=caged, size=1)
        began = time.perf_counter()
        await workers.ask({}, WITHIN_S)
        starts.append(time.perf_counter() - began)
        workers.close()
    workers = pool(script, caged=caged, size=1)
    await workers.ask({}, WITHIN_S)
    asked = []
    for _ in range(args.questions):
        began = time.perf_counter()
        await workers.ask({}, WITHIN_S)
        asked.append(time.perf_counter() - began)
    workers.close()
    return {
        "start_ms": spread(starts),
        "question_ms": spread(asked),
        "at_once": await many(script, caged, args),
    }


async def many(script: Path, caged: bool, args: argparse.Namespace) -> dict[str, float]:
    workers = pool(script, caged=caged, size=args.workers)
    began = time.perf_counter()
    held = [await workers.take() for _ in range(args.workers)]
    await asyncio.gather(*(worker.start() for worker in held))
    started_s = time.perf_counter() - began
    memory = memory_mb(script)
    for worker in held:
        workers.give_back(worker)
    waits: list[float] = []

    async def caller() -> None:
        for _ in range(args.questions // args.workers):
            began = time.perf_counter()
            await workers.ask({}, WITHIN_S)
            waits.append(time.perf_counter() - began)

    began, used = time.perf_counter(), cpu_s()
    await asyncio.gather(*(caller() for _ in range(args.workers)))
    took, used = time.perf_counter() - began, cpu_s() - used
    workers.close()
    return {
        "workers": args.workers,
        "all_started_s": round(started_s, 3),
        "memory_mb_per_worker": round(memory / args.workers, 2),
        "questions_per_s": round(len(waits) / took),
        "cpu_ms_per_question_of_the_asker": round(1000 * used / len(waits), 3),
        **{f"wait_ms_{name}": value for name, value in spread(waits).items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--questions", type=int, default=5000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS / "cage.json")
    args = parser.parse_args()
    missing = cage_missing()
    if missing:
        sys.exit(missing)
    on = machine()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "worker.py"
        script.write_text(WORKER, encoding="utf-8")
        found = {
            "python_start_ms": python_starts(args.starts),
            "without_cage": asyncio.run(measure(script, False, args)),
            "caged": asyncio.run(measure(script, True, args)),
        }
    result = {"machine": on, **found, "load_average_after": machine()["load_average"]}
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    asked_ms = found["caged"]["question_ms"]["p50"]
    print(f"a question in a cage: {asked_ms} ms; the aim is at most {AIM_MS} ms")


if __name__ == "__main__":
    main()
