"""Which process a pid means: pids are used again, pid and start time together are not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which the process began; None where it is gone, a zombie, or there is no /proc."""
    state, started = _stat(pid)
    return None if state in ("", "Z", "X") else started


def boot_id() -> str | None:
    """Names this boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def identity(pid: int) -> dict[str, Any]:
    """What tells this process from a later one of the same pid."""
    return {"pid": pid, "start_time": start_time(pid), "boot_id": boot_id()}


def alive(who: Mapping[str, Any] | None) -> bool:
    """Whether the process of this identity still runs."""
    if not who or not who.get("pid"):
        return False
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(who["pid"], 0)
        except OSError:
            return False
        return True
    now = start_time(who["pid"])
    same_boot = who.get("boot_id") in (None, boot_id())
    return now is not None and same_boot and now == who.get("start_time", now)


def is_stopped(who: Mapping[str, Any]) -> bool:
    """Whether a signal (SIGSTOP) has stopped the process of this identity; False where there is no /proc to tell."""
    state, started = _stat(who.get("pid"))
    return state in ("T", "t") and started == who.get("start_time", started)


def _stat(pid: int | None) -> tuple[str, int]:
    """State and start time by /proc; an empty state where it has no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[19])
