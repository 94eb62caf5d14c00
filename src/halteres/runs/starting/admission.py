"""Who may start a run now: one process at a time.

Owns: the lock under which a new run is made (runs/.starting), which run a key has started.
Never: makes the run (`start`); holds the lock longer than that takes.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halteres.errors import NotFound, NotReady
from halteres.runs.directory import RunDirectory, list_runs
from halteres.runs.state import read_state

LOCK = ".starting"
WITHIN_S, LOOK_EVERY_S = 30.0, 0.01
"""Making a run takes milliseconds; going on from one with large checkpoints may take seconds."""


@contextmanager
def admitting(home: Path) -> Iterator[None]:
    """Hold the lock while the block runs.

    Raises:
        NotReady: somebody else held it all the time.
        OSError: the folder of all runs cannot be made or written.
    """
    home.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(home / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _take(descriptor, home)
        yield
    finally:
        os.close(descriptor)


def run_of_key(key: str | None) -> RunDirectory | None:
    """The run that was started with this key; None where there is none, or no key."""
    if not key:
        return None
    return next((run for run in list_runs() if _key(run) == key), None)


def _key(run: RunDirectory) -> str | None:
    try:
        return read_state(run.path / "run.json").idempotency_key
    except NotFound:  # removed while we looked
        return None


def _take(descriptor: int, home: Path) -> None:
    ends = time.monotonic() + WITHIN_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > ends:
                raise NotReady(
                    "Another run is just being started.", f"{home / LOCK} is held.", "Try again in a moment."
                ) from None
            time.sleep(LOOK_EVERY_S)
