"""How long does an agent's host wait for the tools?

Fresh interpreters, one after the other: importing the package, one function, the tool server;
`halteres mcp` from its start until its first request is answered, in both revisions. The aims are
0.3 s for the package, 1.5 s for the tool server without torch, 3 s until it is ready.

    .venv/bin/python benchmarks/tools_import.py [--repeat 7] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import machine

NOTHING = "pass"
IMPORTS = {
    "interpreter": NOTHING,
    "package": "import halteres.agent",
    "one_function": "from halteres.agent import rl_check_status",
    "table": "import halteres.agent.table",
    "tool_server": "import halteres.agent.transports.mcp.server",
}
HEAVY = ("torch", "transformers", "tinker", "matplotlib")

_WHO = {"name": "benchmark", "version": "1"}
FIRST_REQUESTS = {
    "2025-11-25": {
        "method": "initialize",
        "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": _WHO},
    },
    "2026-07-28": {
        "method": "server/discover",
        "params": {
            "_meta": {
                "io.modelcontextprotocol/protocolVersion": "2026-07-28",
                "io.modelcontextprotocol/clientCapabilities": {},
                "io.modelcontextprotocol/clientInfo": _WHO,
            }
        },
    },
}


def imported(code: str) -> None:
    """Run the code in a fresh interpreter."""
    subprocess.run([sys.executable, "-c", code], check=True)


def ready(request: dict[str, Any]) -> None:
    """Start `halteres mcp`, wait for the answer to its first request, end it."""
    program = Path(sys.executable).with_name("halteres")
    with subprocess.Popen(
        [program, "mcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdin and server.stdout
        server.stdin.write(json.dumps({"jsonrpc": "2.0", "id": 1, **request}).encode() + b"\n")
        server.stdin.flush()
        answer = json.loads(server.stdout.readline())
        assert "result" in answer, answer
        server.kill()


def seconds(action: Callable[[], None], repeat: int) -> dict[str, float]:
    """Median and extremes; once more at first, for caches."""
    took = []
    for _ in range(1 + repeat):
        began = time.perf_counter()
        action()
        took.append(time.perf_counter() - began)
    took = took[1:]
    figures = {"median": statistics.median(took), "least": min(took), "most": max(took)}
    return {name: round(value, 3) for name, value in figures.items()}


def heavy() -> list[str]:
    """What the tool server must not load, and does."""
    ask = (
        f"{IMPORTS['tool_server']}; import sys; print(*(n for n in {HEAVY!r} if "
        "sys.modules.get(n)))"
    )
    return subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, check=True, encoding="utf-8"
    ).stdout.split()


def measure(repeat: int) -> dict[str, Any]:
    """Every figure, in seconds."""
    return {
        "import_s": {
            name: seconds(lambda code=code: imported(code), repeat)
            for name, code in IMPORTS.items()
        },
        "ready_s": {
            revision: seconds(lambda request=request: ready(request), repeat)
            for revision, request in FIRST_REQUESTS.items()
        },
        "heavy_modules": heavy(),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--out", type=Path, help="also write the figures there")
    options = parser.parse_args()
    before = machine()
    with tempfile.TemporaryDirectory() as home:
        os.environ["HALTERES_HOME"] = home
        figures = measure(options.repeat)
    report = {
        "machine": before,
        "load_average_after": machine()["load_average"],
        "repeat": options.repeat,
        **figures,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
