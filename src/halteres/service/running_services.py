"""Cards: which training services this user has, and which of them run, whatever their state
directories.

HALTERES_HOME/services/NAME.json, one for each state directory; it stays when its service has ended,
as long as the directory does. A service that another process of ours has started (a run's, an
evaluation's) leaves none: its clients know where it is, and it serves no others.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from halteres.config import environ
from halteres.files import UnreadableFile, read_json, replace_file
from halteres.process import alive, identity

LOOK_EVERY_S = 0.1

log = logging.getLogger(__name__)


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One service."""

    url: str
    state: str  # its folder
    since: float  # unix s
    process: dict[str, Any]  # as `process.identity` has it

    @property
    def is_live(self) -> bool:
        """Whether its process still runs."""
        return alive(self.process)


@contextmanager
def registered_card(url: str, state: Path) -> Iterator[None]:
    """Put a card of this process into the home; remove those whose state directory is gone, or
    this one's. A home that takes none is logged: the service itself needs no card.
    """
    if environ.lifeline_fd() is not None:
        yield
        return
    card = Card(
        url=url, state=str(state.absolute()), since=time.time(), process=identity(os.getpid())
    )
    file = _folder() / f"{hashlib.sha256(card.state.encode()).hexdigest()[:16]}.json"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for other, known in _files():
            is_kept = known.state != card.state and os.path.isdir(known.state)
            if not known.is_live and not is_kept:
                other.unlink(missing_ok=True)
        replace_file(file, msgspec.json.encode(card))
    except OSError as error:
        why = error.strerror or error
        log.warning(
            "`halteres variables` will not find this service: %s cannot be written (%s).", file, why
        )
    yield


def read_cards() -> list[Card]:
    """The services that were started under this home, newest first, whether they run or not."""
    return sorted((card for _, card in _files()), key=lambda card: card.since, reverse=True)


def state_folders() -> list[Path]:
    """The state directories of this user's services that are there, whether one runs on them or
    not: the one that `halteres serve` takes by default, then the others, newest first.
    """
    named = [environ.home() / "service", *(Path(card.state) for card in read_cards())]
    # `Path.is_dir` would raise on a network disk that is gone (Python 3.11)
    return [folder for folder in dict.fromkeys(named) if os.path.isdir(folder)]


def newest_live(within_s: float = 0.0) -> Card | None:
    """The service of this user that was started last, of those that run. Where there is none yet,
    one is waited for: that of `halteres serve &` in the line before.
    """
    ends = time.monotonic() + within_s
    while True:
        live = [card for _, card in _files() if card.is_live]
        if live or time.monotonic() >= ends:
            return max(live, key=lambda card: card.since, default=None)
        time.sleep(LOOK_EVERY_S)


def _folder() -> Path:
    return environ.home() / "services"


def _files() -> Iterator[tuple[Path, Card]]:
    """Every card of this user's that can be read; another user's service may share the home."""
    for file in _folder().glob("*.json"):
        with suppress(OSError, UnreadableFile):
            if file.stat().st_uid == os.getuid():
                yield file, read_json(file, Card, linked=False)
