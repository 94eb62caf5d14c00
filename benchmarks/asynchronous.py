"""What does asynchronous training gain? Whole runs with max_staleness 0 and 1, beside each other.

    python benchmarks/asynchronous.py [--seconds 1.0] [--steps 20] [--built-in-steps 10] [--only
    scripted|built-in]

scripted: every request for samples, and every training pass, takes exactly `--seconds`, whoever
else asks: an engine without weights behind the real service, as if sampling and training had a
device each. Trajectory server, trainer and environment are those of any run. Synchronous steps take
both times one after the other; the aim is a ratio of 1.6. built-in: `arithmetic` on the built-in
model, where sampling and training share the CPU: rollouts that go on meanwhile take from training
what they gain. Written: benchmarks/results/asynchronous.json. Exit code 1 where the aim is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from machine import machine

RESULT = Path(__file__).parent / "results" / "asynchronous.json"
ENVIRONMENT = Path(__file__).parent / "word_lengths.py"
AIM = 1.6
WARM_UP = 3  # steps that do not count
SIZES = ("env.group_size=8", "env.batch_size=64", "env.max_new_tokens=32", "trainer.eval_every=0")
SETTINGS = (
    *SIZES,
    "trainer.checkpoint_every=0",
    "trainer.loss=ppo",
    "env.eval_tasks=1",
    "env.eval_samples=1",
)
PARTIES = {"synchronous": 0, "asynchronous": 1}


class InProcess:
    """A service's engine without weights, in this process; nothing restarts it."""

    def __init__(self, seconds: float) -> None:
        from halteres.engine.scripted.engine import ScriptedEngine
        from halteres.models import TINY
        from halteres.service.base import base_model

        self.base = base_model(TINY)
        self.restarts, self.pid, self.state, self.failure = 0, None, "ready", None
        self.engine = ScriptedEngine(self.base.folder, self.base.name)
        self.engine.latency_s = {"sample": seconds, "forward_backward": seconds}

    async def start(self) -> None:
        """It runs from the start."""

    async def stop(self) -> None:
        self.state = "stopped"
        await self.engine.close()

    async def until(self, *states: str, restarts: int = 0) -> None:
        """It is ready, or the benchmark is over."""


@asynccontextmanager
async def scripted_service(folder: Path, seconds: float) -> AsyncIterator[str]:
    """The address of a service whose sampling and training take so long."""
    from halteres.loopback import open_listener
    from halteres.service.fleet import Fleet
    from halteres.service.gateway.gateway import gateway_over
    from halteres.service.server import ServiceServer
    from halteres.service.service import locked, opened

    host = InProcess(seconds)
    with locked(folder), open_listener(0) as bound:
        async with (
            opened(folder, host.base, Fleet.of(host)) as service,
            gateway_over(service) as gateway,
        ):
            server = ServiceServer(service, gateway)
            running = asyncio.create_task(server.serve(sockets=[bound]))
            try:
                yield f"http://127.0.0.1:{bound.getsockname()[1]}"
            finally:
                server.end()
                server.force_exit = True
                await running


def train(environment: str, staleness: int, steps: int, service_url: str | None) -> dict[str, Any]:
    """One whole run; its seconds per step after the warm-up, and how old its batches were."""
    from halteres.config.resolution import resolve_settings
    from halteres.runs.planning.plan import plan_run
    from halteres.runs.start import start_run

    edits = [*SETTINGS, f"trainer.total_steps={steps}", f"trainer.max_staleness={staleness}"]
    asked = resolve_settings(environment, None, edits)
    run = start_run(plan_run(asked, service_url=service_url))
    ends = time.monotonic() + 1800
    while not (state := run.state()).terminal:
        if time.monotonic() > ends:
            raise SystemExit(f"Run {run.run_id} is still {state.status}: {run.path}")
        time.sleep(0.5)
    if state.status != "completed":
        raise SystemExit(f"Run {run.run_id} {state.status}: {state.error} ({run.path})")
    rows = [row for row in run.metrics() if row["src"] == "trainer"]
    ended = [row["t"] for row in rows[WARM_UP - 1 :]]
    return {
        "steps_per_minute": round(60 * (len(ended) - 1) / (ended[-1] - ended[0]), 2),
        "median_step_s": round(statistics.median(b - a for a, b in pairwise(ended)), 3),
        "staleness_mean": round(
            statistics.fmean(row["policy/staleness_mean"] for row in rows[WARM_UP:]), 3
        ),
        "groups_stale": sum(row["groups/stale"] for row in rows),
    }


async def scripted(seconds: float, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="halteres-service-") as folder:
        async with scripted_service(Path(folder), seconds) as url:
            return compared(
                {
                    name: await asyncio.to_thread(train, str(ENVIRONMENT), k, steps, url)
                    for name, k in PARTIES.items()
                }
            )


def compared(parties: dict[str, dict[str, Any]]) -> dict[str, Any]:
    rates = [parties[name]["steps_per_minute"] for name in ("asynchronous", "synchronous")]
    return {**parties, "ratio": round(rates[0] / rates[1], 3)}


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of a request for samples, and of a pass"
    )
    parser.add_argument("--steps", type=int, default=20, help="of each run on the scripted engine")
    parser.add_argument("--built-in-steps", type=int, default=10)
    parser.add_argument("--only", choices=("scripted", "built-in"))
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    os.environ["HALTERES_HOME"] = home = tempfile.mkdtemp(prefix="halteres-bench-")
    report: dict[str, Any] = {
        "what": "steps per minute with max_staleness 1 and 0; ratio of the first to the second",
        "command": " ".join(["python", "benchmarks/asynchronous.py", *sys.argv[1:]]),
        "machine": machine(),
    }
    if options.only != "built-in":
        measured = asyncio.run(scripted(options.seconds, options.steps))
        report["scripted"] = {
            "seconds": options.seconds,
            "steps": options.steps,
            "aim": AIM,
            **measured,
        }
    if options.only != "scripted":
        steps = options.built_in_steps
        parties = {name: train("arithmetic", k, steps, None) for name, k in PARTIES.items()}
        report["built_in"] = {"steps": steps, **compared(parties)}
    report["load_average_after"] = [round(load, 2) for load in os.getloadavg()]
    text = json.dumps(report, indent=2)
    print(text)
    options.out.write_text(text + "\n", encoding="utf-8")
    shutil.rmtree(home)
    return 0 if report.get("scripted", {}).get("ratio", AIM) >= AIM else 1


if __name__ == "__main__":
    sys.exit(main())
