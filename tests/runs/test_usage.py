"""What a run's processes take of the machine: measured by role, bounded on disk, whole to read."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent import run_fixtures

from halteres.observe.metrics import read_rows
from halteres.runs.directory import RunDirectory, StateWriter
from halteres.runs.reading import usage
from halteres.runs.reading.usage import FILE, Gpu, Usage, halved, read_usage, usage_columns
from halteres.runs.supervision import usage_sampler
from halteres.runs.supervision.usage_sampler import Gpus, UsageLog, UsageSampler, sampling_usage

NO_GPUS = Gpus(None)

BURNS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "x = b'x' * 50_000_000; print(1, flush=True); input()"],
                         stdin=subprocess.PIPE)
print(child.pid, flush=True)
while True: pass
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    return run_fixtures.make_run()


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """A process that keeps a core busy, and its child, which holds 50 MB: their pids."""
    with subprocess.Popen([sys.executable, "-c", BURNS], stdout=subprocess.PIPE, text=True) as busy:
        assert busy.stdout is not None
        told = {busy.stdout.readline().strip(), busy.stdout.readline().strip()}
        (child,) = told - {"1"}
        yield busy.pid, int(child)
        busy.kill()


def test_each_role_is_told_what_its_processes_took(family: tuple[int, int]) -> None:
    parent, child = family
    sampler = UsageSampler(NO_GPUS)
    roles = {"trainer": {"pid": parent}, "engine": {"pid": child}, "env": {"pid": None}}
    sampler.look(roles)
    before = _cpu_seconds(parent)
    while _cpu_seconds(parent) < before + 0.1:  # however busy the machine is
        time.sleep(0.01)
    row = sampler.look(roles)
    assert row.cpu["trainer"] > 0
    assert row.cpu["engine"] < row.cpu["trainer"]
    assert row.memory["engine"] > 50e6, "a grandchild with a role of its own"
    assert row.memory["supervisor"] > 1e6
    assert "env" not in row.cpu
    assert row.busy > 0 and row.free and row.cores


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_what_descends_from_a_role_belongs_to_it(family: tuple[int, int]) -> None:
    parent, _ = family
    sampler = UsageSampler(NO_GPUS)
    row = sampler.look({"service": {"pid": parent}})
    assert row.memory["service"] > 50e6
    assert sampler.look({}).memory["other"] > 50e6


def test_a_process_that_was_there_before_does_not_bring_its_past(family: tuple[int, int]) -> None:
    parent, _ = family
    while _cpu_seconds(parent) < 0.05:
        time.sleep(0.01)
    row = UsageSampler(NO_GPUS).look({"trainer": {"pid": parent}})
    assert row.cpu["trainer"] == 0.0


class Nvml:
    """As nvidia-ml-py has it: two GPUs, of which the second fails."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:
        if device == 1:
            raise self.NVMLError("lost")
        return SimpleNamespace(used=6_000_000_000, total=80_000_000_000)

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:
        return SimpleNamespace(gpu=75)

    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> Any:
        theirs = SimpleNamespace(pid=1, usedGpuMemory=1_000_000_000)
        return [theirs, SimpleNamespace(pid=7, usedGpuMemory=5_000_000_000)]


def test_gpus_are_told_with_what_the_run_holds_of_them() -> None:
    gpus = Gpus(Nvml())
    known = {"index": 0, "busy": 0.75, "memory": 6_000_000_000, "total": 80_000_000_000}
    assert gpus.look({7, 8}) == [Gpu(**known, own=5_000_000_000)]
    assert gpus.look({9}) == [Gpu(**known)]
    assert NO_GPUS.look({7}) == []


def test_a_driver_that_does_not_answer_is_no_gpu() -> None:
    broken = Nvml()
    broken.nvmlInit = lambda: (_ for _ in ()).throw(Nvml.NVMLError("no driver"))  # type: ignore[method-assign]
    assert Gpus(broken).look({7}) == []


def row(t: float, cpu: float, memory: int, **more: Any) -> Usage:
    return Usage(t=t, cpu={"trainer": cpu}, memory={"trainer": memory}, busy=cpu, free=9, **more)


def test_of_two_rows_the_mean_of_the_work_and_the_most_of_the_memory_are_kept() -> None:
    gpu = Gpu(index=0, busy=0.5, memory=7, total=10, own=3)
    less = Gpu(index=0, busy=1.0, memory=5, total=10)
    both = halved([row(1, 1.0, 30, gpus=(gpu,)), row(2, 3.0, 20, gpus=(less,)), row(3, 1.0, 10)])
    merged = Gpu(index=0, busy=0.75, memory=7, total=10, own=3)
    assert both == [row(2, 2.0, 30, gpus=(merged,)), row(3, 1.0, 10)]


def test_the_file_is_bounded_and_spans_the_whole_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_sampler, "MOST_ROWS", 8)
    log, t = UsageLog(StateWriter(run)), 0.0
    while t < 1000:
        log.add(row(t, 1.0, int(t)))
        t += log.every_s
    found = read_usage(run)
    assert 4 <= len(found) == len(read_rows(run.path / FILE)) <= 8
    assert log.every_s == usage_sampler.EVERY_S * 32, "200 rows at first became 4 to 8"
    assert found[0].t < 320 and found[-1].t + log.every_s >= 1000
    assert max(one.memory["trainer"] for one in found) == int(found[-1].t)


def test_a_disk_that_takes_nothing_is_no_error(run: RunDirectory) -> None:
    log = UsageLog(StateWriter(run))
    (run.path / FILE).mkdir()
    log.add(row(1, 1.0, 1))
    assert read_usage(run) == []


def test_columns_are_equally_long_and_damaged_lines_left_out(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert usage_columns(run)["seconds"] == []
    log = UsageLog(StateWriter(run))
    log.add(row(100.0, 1.0, 2_000_000_000))
    log.add(Usage(t=105.0, cpu={"env": 0.5}, memory={"env": 10**9}, cores=4))
    with (run.path / FILE).open("a") as stream:
        stream.write('{"t": "late"}\n{"t": 3')
    columns = usage_columns(run)
    assert columns["seconds"] == [0.0, 5.0]
    assert columns["cpu"] == {"trainer": [1.0, None], "env": [None, 0.5]}
    assert columns["memory"] == {"trainer": [2.0, None], "env": [None, 1.0]}
    assert columns["machine"]["cores"] == 4
    monkeypatch.setattr(usage, "MOST_SHOWN", 1)
    assert usage_columns(run)["seconds"] == [0.0]


async def test_rows_come_as_long_as_the_run_goes_on(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_sampler, "EVERY_S", 0.01)
    with run_fixtures.supervised(run):
        async with asyncio.timeout(10), sampling_usage(StateWriter(run)):
            while len(read_usage(run)) < 3:  # noqa: ASYNC110 - a file tells nobody
                await asyncio.sleep(0.01)
    last = read_usage(run)[-1]
    assert last.memory["supervisor"] > 0 and last.busy >= 0


async def test_a_measurement_that_fails_ends_no_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> Usage:
        raise RuntimeError("no /proc")

    monkeypatch.setattr(usage_sampler, "EVERY_S", 0.0)
    monkeypatch.setattr(UsageSampler, "look", fail)
    async with asyncio.timeout(10), sampling_usage(StateWriter(run)):
        while "no /proc" not in caplog.text:  # noqa: ASYNC110 - a log tells nobody
            await asyncio.sleep(0.01)
    assert read_usage(run) == []
