"""What a run is asked to do through its `control` folder: stop.json, {"mode", "t"}; and the size of its batches."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Literal

from halteres.files import replace_file

Mode = Literal["now", "after_step"]
"""`now` interrupts the step in progress, `after_step` lets it end; a checkpoint is written either way."""

LARGEST_BATCH = 2**20
"""Sequences of one batch: the trajectory server chooses it in time and memory that grow with its size."""


def write_stop_request(file: Path, mode: Mode) -> None:
    """Ask for an end. OSError where the disk will not have it."""
    replace_file(file, json.dumps({"mode": mode, "t": time.time()}).encode())


def read_stop_request(file: Path) -> Mode | None:
    """The mode asked for; None where nobody asked. Half a request, or one that is no request at all, still is one."""
    try:
        request = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return "now"
    return "after_step" if isinstance(request, dict) and request.get("mode") == "after_step" else "now"
