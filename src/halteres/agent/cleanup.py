"""What is kept how long in HALTERES_HOME, besides runs.

Owns: the bounds below; they are held whenever something new is begun.
Never: removes a run, a model, a test under way, or anything that somebody gave a name; fails anybody.

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
from halteres.runs import lock
from halteres.runs.directory import runs_home
from halteres.runs.state import read_state

DAY_S = 24 * 3600.0
TESTS, PICTURES = 50, 50
DRAFT_S, UNBORN_S = 30 * DAY_S, DAY_S

DRAFTS_OF_SERVERS, GOING = "mcp-*", ".gone-"
"""Handles that `faces/mcp/stdio` makes; the beginning of a test's name while it is removed."""


def clean_up() -> None:
    """Remove what is beyond the bounds. Safe to do at any time, by several at once."""
    for what in (_tests, _drafts, _looks, _pictures, _unborn):
        with contextlib.suppress(OSError):  # removed by somebody else, or not ours to remove
            what()


def _tests() -> None:
    old = [folder for kind in get_args(Kind) for folder in _oldest(tests_home().glob(f"{kind}-*"), beyond=TESTS)]
    for folder in old:
        if not lock.held(TestFolder(folder).lock):
            folder.rename(folder.with_name(GOING + folder.name))  # no reader sees half of it
    for folder in tests_home().glob(f"{GOING}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _drafts() -> None:
    for file in drafts_home().glob(f"{DRAFTS_OF_SERVERS}.json"):
        if _age_s(file) > DRAFT_S:
            with contextlib.suppress(Conflict), lock.taken(lock_of(file)):
                file.unlink(missing_ok=True)
                lock_of(file).unlink(missing_ok=True)


def _looks() -> None:
    for file in looks_home().glob("*.json"):
        try:
            ended = read_state(runs_home() / file.stem / "run.json").terminal
        except NotFound:
            ended = True
        if ended:
            file.unlink(missing_ok=True)


def _pictures() -> None:
    for file in _oldest((environ.home() / "cache").glob("*.png"), beyond=PICTURES):
        file.unlink(missing_ok=True)


def _unborn() -> None:
    for folder in runs_home().glob(".new-*"):
        if _age_s(folder) > UNBORN_S and not lock.held(folder / "lock"):
            shutil.rmtree(folder, ignore_errors=True)


def _oldest(paths: Iterable[Path], beyond: int) -> list[Path]:
    """Those that are not among the newest so many."""
    return sorted(paths, key=_age_s)[beyond:]


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
