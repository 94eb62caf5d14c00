"""What a run's processes take of the machine, over its time: RUN/usage.jsonl, as rows and columns.

The supervisor writes the rows (`runs.supervision.usage_sampler`); a run of an earlier version has
none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import msgspec

from halteres.observe.metrics import decoded, read_lines
from halteres.runs.directory import RunDirectory

FILE = "usage.jsonl"
MOST_ROWS = 2000  # then two and two become one: a run of any length has 1,000 to 2,000
MOST_SHOWN = 500  # points of a column


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU at a time."""

    index: int
    busy: float  # share of the time in which it computed, 0 to 1, for any process
    memory: int  # bytes in use, by any process
    total: int  # bytes that it has
    own: int | None = None  # bytes in use by the run's processes; None: the driver does not say


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """One row: what the processes took since the row before it."""

    t: float  # unix seconds
    cpu: dict[str, float]  # role -> cores, mean over the time since the row before
    # role -> bytes that are resident; pages that processes share count for each of them
    memory: dict[str, int]
    busy: float = 0.0  # cores of the machine that anything used
    cores: int | None = None  # that the machine has
    free: int | None = None  # bytes of its memory
    gpus: tuple[Gpu, ...] = ()


_decoder = msgspec.json.Decoder(Usage)


def read_usage(run: RunDirectory) -> list[Usage]:
    """All rows, oldest first; none where there is no file. Damaged lines are left out."""
    found = (decoded(_decoder, line) for line in read_lines(run.path / FILE))
    return [row for row in found if row is not None]


def halved(rows: Sequence[Usage]) -> list[Usage]:
    """Two and two of the rows as one: the mean of what was used, the most that was held."""
    pairs = [rows[at : at + 2] for at in range(0, len(rows), 2)]
    return [_merged(pair) for pair in pairs]


def _merged(rows: Sequence[Usage]) -> Usage:
    last = rows[-1]
    gpus: list[Gpu] = []
    for gpu in last.gpus:
        same = [one for row in rows for one in row.gpus if one.index == gpu.index]
        most = max(one.memory for one in same)
        own = max((one.own for one in same if one.own is not None), default=None)
        busy = fmean(one.busy for one in same)
        gpus.append(msgspec.structs.replace(gpu, busy=round(busy, 3), memory=most, own=own))
    free = [row.free for row in rows if row.free is not None]
    return msgspec.structs.replace(
        last,
        cpu={role: round(_mean_of(rows, role), 3) for role in _roles(rows, _cpu)},
        memory={
            role: max(row.memory.get(role, 0) for row in rows) for role in _roles(rows, _memory)
        },
        busy=round(fmean(row.busy for row in rows), 3),
        free=min(free, default=None),
        gpus=tuple(gpus),
    )


def _mean_of(rows: Sequence[Usage], role: str) -> float:
    return fmean(row.cpu.get(role, 0.0) for row in rows)


def _cpu(row: Usage) -> dict[str, Any]:
    return row.cpu


def _memory(row: Usage) -> dict[str, Any]:
    return row.memory


def _roles(rows: Sequence[Usage], of: Callable[[Usage], dict[str, Any]]) -> list[str]:
    """The roles of all of these rows, in the order in which they came."""
    return list(dict.fromkeys(role for row in rows for role in of(row)))


def usage_columns(run: RunDirectory) -> dict[str, Any]:
    """The rows as equally long columns, null where a process was not there.

    Returns:
        {seconds: since the first row, cpu: {ROLE: cores}, memory: {ROLE: GB}, machine: {cores,
        busy: cores, free: GB}, gpus: [{index, total: GB, busy: 0 to 1, memory: GB, own: GB}]}; GB
        are 10^9 bytes.
    """
    rows = read_usage(run)
    while len(rows) > MOST_SHOWN:
        rows = halved(rows)
    indexes = sorted({gpu.index for row in rows for gpu in row.gpus})
    cores = None
    if rows:
        cores = rows[-1].cores
    return {
        "seconds": [round(row.t - rows[0].t, 1) for row in rows],
        "cpu": {role: [row.cpu.get(role) for row in rows] for role in _roles(rows, _cpu)},
        "memory": {
            role: [_gigabytes(row.memory.get(role)) for row in rows]
            for role in _roles(rows, _memory)
        },
        "machine": {
            "cores": cores,
            "busy": [row.busy for row in rows],
            "free": [_gigabytes(row.free) for row in rows],
        },
        "gpus": [_gpu_columns(rows, index) for index in indexes],
    }


def _gpu_columns(rows: Sequence[Usage], index: int) -> dict[str, Any]:
    found = [next((gpu for gpu in row.gpus if gpu.index == index), None) for row in rows]
    total = next(gpu.total for gpu in found if gpu is not None)
    return {
        "index": index,
        "total": _gigabytes(total),
        "busy": [gpu and gpu.busy for gpu in found],
        "memory": [gpu and _gigabytes(gpu.memory) for gpu in found],
        "own": [gpu and _gigabytes(gpu.own) for gpu in found],
    }


def _gigabytes(size: int | None) -> float | None:
    if size is None:
        return None
    return round(size / 1e9, 3)
