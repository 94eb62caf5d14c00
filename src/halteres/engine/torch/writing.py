"""Checkpoints on their way to the disk and back, while training goes on.

Owns: the one thread that writes, in the order in which it was asked to; the threads that read; who must wait for a
folder.
Never: touches weights that anybody may still change: what it writes are copies.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

READERS = 4
"""Folders that are read at a time: a disk that hangs under one need not stop the others."""


class Files:
    """Writes and reads folders in the background; called from one thread."""

    def __init__(self) -> None:
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._readers = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="reading")
        self._newest: dict[Path, Future[Any]] = {}  # of each folder that is not written yet

    def write(self, folder: Path, work: Callable[[], T]) -> Future[T]:
        """Queue the writing of a folder."""
        self._newest = {place: pending for place, pending in self._newest.items() if not pending.done()}
        future = self._writer.submit(work)
        self._newest[folder.absolute()] = future
        return future

    def pending(self, folder: Path) -> Future[Any] | None:
        """Done once what was queued for this folder is written, or has failed; None if nothing was."""
        return self._newest.get(folder.absolute())

    def read(self, work: Callable[[], T]) -> Future[T]:
        """Queue the reading of a folder."""
        return self._readers.submit(work)

    def close(self) -> None:
        """End once everything is written; nobody waits any more for what is being read."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=True)
