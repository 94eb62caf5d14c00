"""Looking at groups until somebody stops: what is there, then what comes; in a terminal, or as a page's file."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from halteres.cli.groups import page
from halteres.clients.trajectories.groups import Follower, Group, GroupInfo, PlaceName, Reader
from halteres.errors import InvalidConfig, NotReady
from halteres.files import replace_file

if TYPE_CHECKING:  # whoever names no tokenizer need not wait for its libraries
    from halteres.text import Tokenizer

LOOK_EVERY_S = 0.5  # pause between two questions while following
Wait = Callable[[float], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which groups somebody wants."""

    places: tuple[PlaceName, ...] = ()  # none: all
    env_id: int | None = None
    limit: int = 20  # the newest so many, to begin with; of a view
    since: int = 0  # ids above this; of an export
    follow: bool = False


class Display(Protocol):
    """Where groups are shown."""

    def show(self, group: Group) -> None:
        """One more."""
        ...

    def rest(self, reader: Reader) -> None:
        """All that is there now was shown."""
        ...


def view(reader: Reader, selection: Selection, display: Display, wait: Wait = time.sleep) -> int:
    """Show the newest groups, and what comes where that is wanted; how many groups were shown."""
    names, shown = Names(reader), 0

    def show(infos: list[GroupInfo]) -> None:
        nonlocal shown
        for info in infos:
            display.show(Group(info, names.of(info.env_id)))
            shown += 1

    follower = Follower(reader, 0, selection.places, selection.env_id)
    if selection.follow:
        follower.skip()
    first = newest(reader, selection)
    follower.saw(info.id for info in first)
    show(first)
    display.rest(reader)
    while selection.follow:
        wait(LOOK_EVERY_S)
        try:
            for infos in follower.look():
                show(infos)
        except NotReady:  # a server that is away meanwhile is waited for
            pass
        display.rest(reader)
    return shown


def newest(reader: Reader, selection: Selection) -> list[GroupInfo]:
    """The last `limit` of the wanted ones, the oldest first; as many questions as their size asks for."""
    places, env_id, limit = selection.places, selection.env_id, selection.limit
    listed = reader.page(newest=True, limit=limit, places=places, env_id=env_id, bodies=False).groups
    found = list[GroupInfo]()
    pages: Iterator[list[GroupInfo]] = reader.pages(listed[0].id - 1, places, env_id) if listed else iter(())
    for infos in pages:
        found += infos
        if len(found) >= limit:
            break
    return found[:limit]


class Names:
    """Names of environments, asked for again where an id is new."""

    def __init__(self, reader: Reader) -> None:
        self._reader, self._names = reader, dict[int, str]()

    def of(self, env_id: int | None) -> str:
        """Its name; "" where it has none."""
        if env_id is None:
            return ""
        if env_id not in self._names:
            try:
                self._names.update(self._reader.environment_names())
            except NotReady:
                return ""
        return self._names.setdefault(env_id, "")


class PageFile:
    """The HTML file: the newest groups, written anew after every look that brought a change."""

    def __init__(
        self,
        file: Path,
        tokenizer: Tokenizer | None,
        *,
        source: str,
        limit: int,
        written: Callable[[], object] = lambda: None,  # called once: the file is there
    ) -> None:
        self._file, self._tokenizer, self._source = file, tokenizer, source
        self._entries: deque[page.Entry] = deque(maxlen=limit)
        self._written, self._is_there, self._is_written = written, False, False

    def show(self, group: Group) -> None:
        """One more; the oldest goes where there are enough."""
        self._entries.append(page.Entry.of(group, self._tokenizer))
        self._is_written = False

    def rest(self, reader: Reader) -> None:
        """Note where the groups are by now, and write."""
        if self._is_written:
            self._move(reader)
        if not self._is_written:
            self._write()

    def _move(self, reader: Reader) -> None:
        if not self._entries:
            return
        after, many = min(entry.info.id for entry in self._entries) - 1, len(self._entries)
        try:
            now = {info.id: info for info in reader.page(after=after, limit=many, bodies=False).groups}
        except NotReady:
            return
        moved = [entry.moved(now.get(entry.info.id, entry.info)) for entry in self._entries]
        if moved != list(self._entries):
            self._entries = deque(moved, maxlen=self._entries.maxlen)
            self._is_written = False

    def _write(self) -> None:
        text = page.render(tuple(self._entries), source=self._source, written_at=time.time())
        try:
            replace_file(self._file, text.encode())
        except OSError as error:
            raise unwritable(self._file, error) from error
        self._is_written = True
        if not self._is_there:
            self._is_there = True
            self._written()


def unwritable(file: Path, error: OSError) -> InvalidConfig:
    """The error for a file that cannot be written."""
    return InvalidConfig(
        f"{file} cannot be written.", f"{error.strerror or error}.", "Name a file in a folder of yours."
    )
