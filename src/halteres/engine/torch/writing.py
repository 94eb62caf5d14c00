"""Checkpoints on their way to the disk, while training goes on.

Owns: the one thread that writes, in the order in which it was asked to; who must wait for a folder.
Never: touches weights that anybody may still change: what it writes are copies.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class Writer:
    """Writes folders in the background."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._newest: dict[Path, Future[Any]] = {}  # of each folder that is not written yet

    def write(self, folder: Path, work: Callable[[], T]) -> Future[T]:
        """Queue the writing of a folder; from the thread that also calls `wait_for`."""
        self._newest = {place: pending for place, pending in self._newest.items() if not pending.done()}
        future = self._thread.submit(work)
        self._newest[folder.absolute()] = future
        return future

    def wait_for(self, folder: Path) -> None:
        """Return once what was queued for this folder is written, or has failed."""
        if pending := self._newest.get(folder.absolute()):
            pending.exception()

    def close(self) -> None:
        """End once everything is written."""
        self._thread.shutdown(wait=True)
