"""Who may start a run now: one process at a time.

Owns: the lock under which a new run is made (runs/.starting), which run a key has started.
Never: makes the run (`start`); holds the lock longer than that takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halteres.errors import NotFound
from halteres.runs import lock
from halteres.runs.directory import RunDirectory, list_runs
from halteres.runs.state import read_state

LOCK = ".starting"
WITHIN_S = 30.0
"""Making a run takes milliseconds; going on from one with large checkpoints may take seconds."""


@contextmanager
def admitting(home: Path) -> Iterator[None]:
    """Hold the lock while the block runs.

    Raises:
        NotReady: somebody else held it all the time.
        OSError: the folder of all runs cannot be made or written.
    """
    home.mkdir(parents=True, exist_ok=True)
    with lock.locked(home / LOCK, WITHIN_S, "Another run is just being started."):
        yield


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
