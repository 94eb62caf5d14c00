"""Folders that workers outside cages write to, among the temporary files; a folder's name holds the
process that made it, so that those of processes that were killed are found and removed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from halteres import process

__all__ = ["make_folder", "remove_abandoned", "remove_folder"]


def make_folder() -> str:
    """A new folder of this process."""
    pid = os.getpid()
    started = process.start_time(pid) or 0
    return tempfile.mkdtemp(prefix=f"{_prefix()}{pid}-{started}-")


def remove_abandoned() -> None:
    """Remove the folders of this boot's processes that are gone.

    Others are left: their processes may be another machine's, or another container's.
    """
    prefix = _prefix()
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        named = re.match(r"(\d+)-(\d+)-", folder.name.removeprefix(prefix))
        if named is None:
            continue
        pid, started = map(int, named.groups())
        if not process.alive({"pid": pid, "start_time": started}):
            remove_folder(folder)


def remove_folder(folder: str | Path) -> None:
    """Remove all of it that this user may."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:  # Python before 3.13, at folders a thousand deep in each other
        subprocess.run(("rm", "-rf", "--", str(folder)), check=False, stderr=subprocess.DEVNULL)


def _prefix() -> str:
    """Of this boot, and of those processes that are seen from here (a namespace of pids)."""
    boot = (process.boot_id() or "0").partition("-")[0]
    namespace = "0"
    if os.path.exists("/proc/self/ns/pid"):
        namespace = "".join(re.findall(r"\d+", os.readlink("/proc/self/ns/pid")))
    return f"halteres-worker-{boot}-{namespace}-"
