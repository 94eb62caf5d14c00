"""Cards: which training services this user has running, whatever their state directories.

HALTERES_HOME/services/PID.json, there while its service is. A service that another process of ours
has started (a run's, an evaluation's) leaves none: its clients know where it is, and it serves no
others.
"""

from __future__ import annotations

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
    """Keep a card of this process in the home while the block runs; remove cards of services that
    have ended. A home that takes none is logged: the service itself needs no card.
    """
    if environ.lifeline_fd() is not None:
        yield
        return
    card = Card(
        url=url, state=str(state.absolute()), since=time.time(), process=identity(os.getpid())
    )
    file = _folder() / f"{os.getpid()}.json"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for gone in (other for other, known in _cards() if not known.is_live):
            gone.unlink(missing_ok=True)
        replace_file(file, msgspec.json.encode(card))
    except OSError as error:
        why = error.strerror or error
        log.warning(
            "`halteres variables` will not find this service: %s cannot be written (%s).", file, why
        )
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def newest_live(within_s: float = 0.0) -> Card | None:
    """The service of this user that was started last, of those that run. Where there is none yet,
    one is waited for: that of `halteres serve &` in the line before.
    """
    ends = time.monotonic() + within_s
    while True:
        live = [card for _, card in _cards() if card.is_live]
        if live or time.monotonic() >= ends:
            return max(live, key=lambda card: card.since, default=None)
        time.sleep(LOOK_EVERY_S)


def _folder() -> Path:
    return environ.home() / "services"


def _cards() -> Iterator[tuple[Path, Card]]:
    """Every card of this user's that can be read; another user's service may share the home."""
    for file in _folder().glob("*.json"):
        with suppress(OSError, UnreadableFile):
            if file.stat().st_uid == os.getuid():
                yield file, read_json(file, Card, linked=False)
