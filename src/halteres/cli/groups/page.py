"""The HTML file of `view --html`: the newest groups, written anew after every look that brought a
change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from halteres.cli.groups.view import ListedGroup, standing_of, unwritable
from halteres.clients.trajectories.groups import Reader
from halteres.errors import NotReady
from halteres.files import replace_file
from halteres.groups.page import Entry, render

if TYPE_CHECKING:  # a user who names no tokenizer need not wait for its libraries
    from halteres.tokenizer import Tokenizer


class PageFile:
    """Keeps the newest groups, and writes them to the file."""

    def __init__(
        self,
        file: Path,
        tokenizer: Tokenizer | None,
        *,
        source: str,  # the server's address, without its token
        limit: int,
        written: Callable[[], object] = lambda: None,  # called once: the file is there
    ) -> None:
        self._file = file
        self._tokenizer = tokenizer
        self._source = source
        self._entries: deque[Entry] = deque(maxlen=limit)
        self._written = written
        self._is_there = False
        self._is_written = False

    def show(self, group: ListedGroup) -> None:
        """One more; the oldest goes where there are enough."""
        entry = Entry.of(
            group.content,
            self._tokenizer,
            id=group.info.id,
            owner=group.owner,
            size=group.info.size,
            standing=standing_of(group.info),
        )
        self._entries.append(entry)
        self._is_written = False

    def rest(self, reader: Reader) -> None:
        """Note where the groups are by now, and write."""
        if self._is_written and self._entries:
            try:
                self._look_again(reader)
            except NotReady:
                return
        if self._is_written:
            return
        try:
            replace_file(self._file, render(tuple(self._entries), self._source).encode())
        except OSError as error:
            raise unwritable(self._file, error) from error
        self._is_written = True
        if not self._is_there:
            self._is_there = True
            self._written()

    def _look_again(self, reader: Reader) -> None:
        """What moved meanwhile."""
        first = min(entry.id for entry in self._entries)
        page = reader.page(after=first - 1, limit=len(self._entries), bodies=False)
        now = {info.id: standing_of(info) for info in page.groups}
        moved = [
            replace(entry, standing=now.get(entry.id, entry.standing)) for entry in self._entries
        ]
        self._is_written = moved == list(self._entries)
        self._entries = deque(moved, maxlen=self._entries.maxlen)
