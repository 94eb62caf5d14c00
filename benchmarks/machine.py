"""On what a figure was measured: a result without its machine and date is left out."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from halteres.process import usable_cores


def machine() -> dict[str, Any]:
    """Processor, cores, system, Python, commit; the load average as it is now."""
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "commit": commit(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> str:
    """The commit that is measured, shortened, with "+" where files differ from it; empty outside of
    a checkout.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        found = subprocess.run(command, capture_output=True, check=True, encoding="utf-8")
        return found.stdout.strip()

    try:
        head = git("rev-parse", "--short", "HEAD")
        is_dirty = bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return ""
    if is_dirty:
        return f"{head}+"
    return head


def _cpu_model() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
