"""What is kept how long in HALTERES_HOME, besides runs; it is held whenever something new is begun.

Runs, models, tests under way and whatever somebody gave a name always stay.

    tests/             the newest TESTS of tests, and of evaluations, and those under way
    drafts/mcp-*       of stdio servers, which make one each: so long after the last edit
    looks/             as long as their run goes on
    cache/*.png        the newest PICTURES; they are drawn again when asked for
    runs/.new-*        of a start that was killed: a day
    cache/environments see config/program.py
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from halteres.agent.drafting.drafts import drafts_home, lock_of
from halteres.agent.trial.folder import Kind, TestFolder, tests_home
from halteres.agent.watching.status import looks_home
from halteres.config import environ
from halteres.errors import Conflict, NotFound
from halteres.runs.directory import runs_home
from halteres.runs.state import is_locked, lock_taken, read_state

DAY_S = 24 * 3600.0
TESTS, PICTURES = 50, 50

REMOVING = ".gone-"
"""How the name of a test begins while it is removed."""


def clean_up() -> None:
    """Remove what is beyond the bounds. Safe to do at any time, by several at once."""
    for remove in (_old_tests, _old_drafts, _status_files, _old_pictures, _unfinished_starts):
        with contextlib.suppress(OSError):  # removed by somebody else, or not ours to remove
            remove()


def _old_tests() -> None:
    for kind in get_args(Kind):
        for folder in _oldest(tests_home().glob(f"{kind}-*"), beyond=TESTS):
            if not is_locked(TestFolder(folder).lock):
                folder.rename(folder.with_name(REMOVING + folder.name))  # no reader sees half of it
    for folder in tests_home().glob(f"{REMOVING}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _old_drafts() -> None:
    for file in drafts_home().glob("mcp-*.json"):
        if _age_s(file) > 30 * DAY_S:
            with contextlib.suppress(Conflict), lock_taken(lock_of(file)):
                file.unlink(missing_ok=True)
                lock_of(file).unlink(missing_ok=True)


def _status_files() -> None:
    for file in looks_home().glob("*.json"):
        try:
            ended = read_state(runs_home() / file.stem / "run.json").terminal
        except NotFound:
            ended = True
        if ended:
            file.unlink(missing_ok=True)


def _old_pictures() -> None:
    for file in _oldest((environ.home() / "cache").glob("*.png"), beyond=PICTURES):
        file.unlink(missing_ok=True)


def _unfinished_starts() -> None:
    for folder in runs_home().glob(".new-*"):
        if _age_s(folder) > DAY_S and not is_locked(folder / "lock"):
            shutil.rmtree(folder, ignore_errors=True)


def _oldest(paths: Iterable[Path], beyond: int) -> list[Path]:
    """All but the newest `beyond`."""
    return sorted(paths, key=_age_s)[beyond:]


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
