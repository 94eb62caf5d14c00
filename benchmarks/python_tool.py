"""How long does a use of the Python tool take, and how late does its time-out come?

Trivial scripts one after the other, and as many as there are cores at once; scripts that never end,
by several ways of not ending, each against a limit of one second. Starting a cage is the tool's
time, not the script's.

    .venv/bin/python benchmarks/python_tool.py [--uses 50]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from statistics import median

from machine import machine

from halteres.environments.python_tool import PythonTool
from halteres.process import usable_cores

LIMIT_S = 1.0

ENDLESS = {
    "busy": "while True: pass",
    "asleep": "import time; time.sleep(60)",
    "big number": "10**10**10",
    "signals blocked": "import signal\nsignal.pthread_sigmask(0, range(1, 64))\nwhile True: pass",
    "output": "while True: print('x' * 1000)",
    "forks": "import os\nwhile True: os.fork()",
    "worker stopped": "import os, time\nos.kill(os.getppid(), 19)\ntime.sleep(60)",
}


async def use(tool: PythonTool, code: str) -> tuple[float, str | None]:
    """Seconds from the call to the result, and the reason of its failure."""
    began = time.monotonic()
    result = await tool.run(code)
    return time.monotonic() - began, result.failure


async def main(uses: int) -> dict[str, object]:
    tool, limited = PythonTool(), PythonTool(timeout_s=LIMIT_S)
    tool.check()
    one_by_one = [(await use(tool, "print(1)"))[0] for _ in range(uses)]
    began = time.monotonic()
    free = asyncio.Semaphore(usable_cores())

    async def among_others() -> None:
        async with free:
            await use(tool, "print(1)")

    await asyncio.gather(*(among_others() for _ in range(uses)))
    at_once_s = (time.monotonic() - began) / uses
    ends = {name: [await use(limited, code) for _ in range(5)] for name, code in ENDLESS.items()}
    ranked = sorted(one_by_one)
    return {
        "trivial use, ms": {
            "median": round(1000 * median(ranked), 1),
            "p90": round(1000 * ranked[int(0.9 * uses)], 1),
            "each of as many at once as there are cores": round(1000 * at_once_s, 1),
        },
        "endless script with a limit of 1 s: slowest of five, s": {
            name: [round(max(took for took, _ in found), 2), found[0][1]]
            for name, found in ends.items()
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uses", type=int, default=50)
    found = asyncio.run(main(parser.parse_args().uses))
    print(json.dumps({"machine": machine(), **found}, indent=1, default=str))
