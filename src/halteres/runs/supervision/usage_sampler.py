"""What a run's processes take of the machine, measured every few seconds into RUN/usage.jsonl.

Owns: that file, and the pace: once it has `MOST_ROWS` rows, two and two become one, and rows come
half as often. Never: ends or slows a run because of what it sees, or because it cannot see it.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import psutil

from halteres.errors import HalteresError, ServerError, boundary
from halteres.files import replace_file
from halteres.observe.metrics import WriteFailed, append_row
from halteres.process import main_memory
from halteres.runs.directory import StateWriter
from halteres.runs.reading.usage import FILE, MOST_ROWS, Gpu, Usage, halved

_log = logging.getLogger(__name__)

EVERY_S = 5.0  # at first
MOST_GPUS = 16
SUPERVISOR, OTHER = "supervisor", "other"


class Gpus:
    """The GPUs of this machine by NVML; none where the extra `gpu` is not installed, or there is no
    driver.
    """

    def __init__(self, nvml: Any) -> None:
        """`nvml`: the module `pynvml` of nvidia-ml-py, or None."""
        self._nvml, self._devices = nvml, list[Any]()
        if nvml is None:
            return
        try:
            nvml.nvmlInit()
            number = min(MOST_GPUS, nvml.nvmlDeviceGetCount())
            self._devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(number)]
        except nvml.NVMLError as error:
            _log.info("GPUs are not measured: %s", error)

    @classmethod
    def of_this_machine(cls) -> Gpus:
        """Those that can be asked."""
        try:
            return cls(importlib.import_module("pynvml"))
        except ImportError:
            return cls(None)

    def look(self, own: set[int]) -> list[Gpu]:
        """Each GPU now; `own`: pids of the run. One that does not answer is left out."""
        found: list[Gpu] = []
        for index, device in enumerate(self._devices):
            with suppress(self._nvml.NVMLError):
                memory = self._nvml.nvmlDeviceGetMemoryInfo(device)
                rates = self._nvml.nvmlDeviceGetUtilizationRates(device)
                found.append(
                    Gpu(
                        index=index,
                        busy=rates.gpu / 100,
                        memory=memory.used,
                        total=memory.total,
                        own=self._held_by(device, own),
                    )
                )
        return found

    def _held_by(self, device: Any, own: set[int]) -> int | None:
        """Bytes that these processes hold; None where the driver does not know. In a container it
        may know other pids than we do.
        """
        users = self._nvml.nvmlDeviceGetComputeRunningProcesses(device)
        held = [user.usedGpuMemory for user in users if user.pid in own]
        if not held or None in held:
            return None
        return sum(held)


class UsageSampler:
    """Measures this process and all that descends from it, by role."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus, self._us = gpus, psutil.Process()
        # (pid, start) -> seconds of CPU that it had taken at the last look
        self._taken: dict[tuple[int, float], float] = {}
        self._busy_s, self._at, self._wall = _busy_seconds(), time.monotonic(), time.time()

    def look(self, roles: Mapping[str, Mapping[str, Any]]) -> Usage:
        """What was taken since the last look, or since this was made.

        Args:
            roles: the run's processes, by role: each has its pid. What descends from one belongs
                to it, but what has a role of its own.
        """
        at, wall, busy_s = time.monotonic(), time.time(), _busy_seconds()
        elapsed_s = max(1e-3, at - self._at)
        cpu, memory = dict[str, float](), dict[str, int]()
        taken, pids = dict[tuple[int, float], float](), set[int]()
        for role, process in self._by_role(roles):
            # It may have ended since it was listed: what it took last is not known.
            with suppress(psutil.Error), process.oneshot():
                times, held = process.cpu_times(), process.memory_info().rss
                key = (process.pid, process.create_time())
                taken[key] = times.user + times.system
                before = self._taken.get(key, 0.0)
                # one that is older than our last look, and was not seen then, is not ours to count
                if key not in self._taken and key[1] < self._wall:
                    before = taken[key]
                cpu[role] = cpu.get(role, 0.0) + (taken[key] - before) / elapsed_s
                memory[role] = memory.get(role, 0) + held
                pids.add(process.pid)
        used = max(0.0, busy_s - self._busy_s) / elapsed_s
        self._taken, self._busy_s, self._at, self._wall = taken, busy_s, at, wall
        return Usage(
            t=round(wall, 1),
            cpu={role: round(cores, 3) for role, cores in cpu.items()},
            memory=memory,
            busy=round(used, 3),
            cores=os.cpu_count(),
            free=main_memory().free,
            gpus=tuple(self._gpus.look(pids)),
        )

    def _by_role(
        self, roles: Mapping[str, Mapping[str, Any]]
    ) -> Iterable[tuple[str, psutil.Process]]:
        """This process and its descendants, each with its role."""
        role_of = {facts.get("pid"): role for role, facts in roles.items() if facts.get("pid")}
        descendants = self._us.children(recursive=True)
        parents = dict[int, int]()
        for process in descendants:
            with suppress(psutil.Error):
                parents[process.pid] = process.ppid()
        yield SUPERVISOR, self._us
        for process in descendants:
            pid: int | None = process.pid
            while pid is not None and pid not in role_of:
                pid = parents.get(pid)
            yield role_of.get(pid, OTHER), process


def _busy_seconds() -> float:
    """Seconds that the machine's cores have worked since it started."""
    times = psutil.cpu_times()
    return times.user + times.system + getattr(times, "nice", 0.0)


class UsageLog:
    """RUN/usage.jsonl, as one process writes it."""

    def __init__(self, writer: StateWriter) -> None:
        self._file, self._rows = writer.run.path / FILE, list[Usage]()
        self.every_s = EVERY_S

    def add(self, row: Usage) -> None:
        """Append a row; of a file that is full, make room first. A full disk loses the row."""
        with suppress(WriteFailed, OSError):
            if len(self._rows) >= MOST_ROWS:
                self._rows = halved(self._rows)
                self.every_s *= 2
                lines = [msgspec.json.encode(one) + b"\n" for one in self._rows]
                replace_file(self._file, b"".join(lines))
            self._rows.append(row)
            append_row(self._file, msgspec.to_builtins(row))


@asynccontextmanager
async def sampling_usage(writer: StateWriter) -> AsyncIterator[None]:
    """Measure what the run takes, as long as the block runs."""

    async def sample() -> None:
        log = UsageLog(writer)
        try:
            with boundary(ServerError, "Measuring what the run takes"):
                sampler = await asyncio.to_thread(lambda: UsageSampler(Gpus.of_this_machine()))
                while True:
                    await asyncio.sleep(log.every_s)
                    row = await asyncio.to_thread(sampler.look, writer.state.processes)
                    await asyncio.to_thread(log.add, row)
        except HalteresError as error:  # a run without this curve is a run
            _log.warning("%s", error)

    task = asyncio.create_task(sample(), name="usage")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
