"""Looking at groups until somebody stops: what is there, then what comes; and how a terminal shows
them.

In a terminal a group is a block: one line of facts, one of figures, then the best and the worst
sequence. Context is quiet, and sampled text has a thick bar before it, so that it can be told apart
without colours too. Markup in what a model wrote stays text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.text import Text

from halteres.clients.trajectories.groups import (
    Follower,
    GroupInfo,
    PlaceName,
    Reader,
    on_one_line,
)
from halteres.errors import InvalidConfig, NotReady
from halteres.groups.group import ScoredGroup, counted, number, read_group
from halteres.groups.page import Standing, no_tokens

if TYPE_CHECKING:  # a user who names no tokenizer need not wait for its libraries
    from halteres.tokenizer import Tokenizer

POLL_S = 0.5  # pause between two questions while following
SHORT = 480  # characters of one part where not all is wanted
MOST_PARTS = 6  # parts of one sequence where not all is wanted: the last ones
STYLES = {
    "queued": "cyan",
    "buffered": "cyan",
    "out": "yellow",
    "delivered": "green",
    "set_aside": "bold red",
}
CONTEXT_BAR, SAMPLED_BAR = ("  ┊ ", "dim"), ("  ┃ ", "bold green")
Wait = Callable[[float], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which groups are shown or written."""

    places: tuple[PlaceName, ...] = ()  # none: all
    env_id: int | None = None
    limit: int = 20  # the newest so many, to begin with; of a view
    follow: bool = False


@dataclass(frozen=True)
class ListedGroup:
    """A group on a server, and whose it is."""

    info: GroupInfo
    env_name: str  # harmless; "" where it has none, or an unknown one

    @cached_property
    def content(self) -> ScoredGroup:
        """Read when it is looked at; an empty one where no tokens are kept."""
        if not self.info.has_tokens:
            return ScoredGroup(scores=[])
        return read_group(self.info.element)

    @property
    def owner(self) -> str:
        """Its environment."""
        if self.info.env_id is None:
            return "no environment"
        if not self.env_name:
            return f"environment {self.info.env_id}"
        return f"{self.env_name} ({self.info.env_id})"


def standing_of(info: GroupInfo) -> Standing:
    """Where it is, in words."""
    words = [info.why or ""]
    if info.reason:
        words.append(f"({info.reason})")
    version = ""
    if info.policy_version is not None:
        low, high = info.policy_version
        version = f"versions {low}–{high}"
        if low == high:
            version = f"version {low}"
    return Standing(
        place=info.place,
        why=on_one_line(" ".join(filter(None, words))),
        version=version,
        received=time.strftime("%H:%M:%S", time.localtime(info.received_at)),
    )


class Display(Protocol):
    """Where groups are shown."""

    def show(self, group: ListedGroup) -> None:
        """One more."""
        ...

    def rest(self, reader: Reader) -> None:
        """All that is there now was shown."""
        ...


def view(reader: Reader, selection: Selection, display: Display, wait: Wait = time.sleep) -> int:
    """Show the newest groups, and what comes where that is selected; how many groups were shown."""
    names: dict[int | None, str] = {None: ""}
    num_shown = 0

    def show(infos: list[GroupInfo]) -> None:
        nonlocal num_shown
        for info in infos:
            if info.env_id not in names:
                try:
                    names.update(reader.environment_names().items())
                    names.setdefault(info.env_id, "")
                except NotReady:  # the next one asks for them
                    pass
            display.show(ListedGroup(info, names.get(info.env_id, "")))
            num_shown += 1

    follower = Follower(reader, 0, selection.places, selection.env_id)
    if selection.follow:
        follower.skip()
    first = _newest(reader, selection)
    follower.saw(info.id for info in first)
    show(first)
    display.rest(reader)
    while selection.follow:
        wait(POLL_S)
        try:
            for infos in follower.look():
                show(infos)
        except NotReady:  # a server that is away meanwhile is waited for
            pass
        display.rest(reader)
    return num_shown


def _newest(reader: Reader, selection: Selection) -> list[GroupInfo]:
    """The last `limit` of those selected, the oldest first; as many questions as their size asks
    for.
    """
    places, env_id, limit = selection.places, selection.env_id, selection.limit
    listed = reader.page(
        newest=True, limit=limit, places=places, env_id=env_id, bodies=False
    ).groups
    found: list[GroupInfo] = []
    if not listed:
        return found
    for infos in reader.pages(listed[0].id - 1, places, env_id):
        found += infos
        if len(found) >= limit:
            break
    return found[:limit]


class Terminal:
    """Prints groups; `full`: every sequence, whole."""

    def __init__(self, console: Console, tokenizer: Tokenizer | None, *, full: bool) -> None:
        self._console = console
        self._tokenizer = tokenizer
        self._full = full

    def show(self, group: ListedGroup) -> None:
        """One block, and an empty line."""
        for line in self._lines(group):
            self._console.print(line, soft_wrap=True)
        self._console.print()

    def rest(self, reader: Reader) -> None:
        """Nothing more is to be done."""

    def _lines(self, listed: ListedGroup) -> Iterator[Text]:
        yield _heading(listed)
        standing = standing_of(listed.info)
        if listed.info.why:
            style = "yellow"
            if standing.place == "set_aside":
                style = "red"
            yield Text(f"  {standing.why}", style=style)
        if not listed.info.has_tokens:
            yield Text(f"  {no_tokens(listed.info.size)}", style="dim")
            return
        group = listed.content
        yield Text.assemble(
            ("  scores ", "dim"),
            group.listed_scores,
            ("  mean ", "dim"),
            (number(group.mean), "bold"),
            (f"  {group.lengths}", "dim"),
        )
        shown = group.extremes
        if self._full:
            shown = tuple(range(group.num_sequences))
        for at in shown:
            yield _title(group, at)
            yield from self._texts(group, at)

    def _texts(self, group: ScoredGroup, at: int) -> Iterator[Text]:
        parts = group.parts(at, self._tokenizer)
        if not self._full and len(parts) > MOST_PARTS:
            earlier = f"… {counted(len(parts) - MOST_PARTS, 'earlier part')}"
            yield Text.assemble(CONTEXT_BAR, (earlier, "dim"))
            parts = parts[-MOST_PARTS:]
        for part in parts:
            bar, style = CONTEXT_BAR
            text = Text(style="dim")
            if part.is_sampled:
                bar, style = SAMPLED_BAR
                text = Text()
            if part.label:
                text.append(f"{part.label}: ")
            if not self._full:
                part = part.shortened(SHORT)
            text.append(part.text)
            for line in text.wrap(self._console, max(20, self._console.width - len(bar))):
                line.rstrip()
                yield Text.assemble((bar, style), line)


def _heading(listed: ListedGroup) -> Text:
    """Whose it is, where, since when, of which version."""
    standing = standing_of(listed.info)
    heading = Text.assemble((f"group {listed.info.id}", "bold"), "  ", listed.owner, "  ")
    heading.append(standing.place.replace("_", " "), STYLES.get(standing.place, "dim"))
    heading.append(f"  {standing.received}")
    if standing.version:
        heading.append(f"  {standing.version}", "dim")
    return heading


def _title(group: ScoredGroup, at: int) -> Text:
    """Of one sequence: its rank and its score."""
    title = f"sequence {at}, {group.score(at)}"
    rank = group.rank(at)
    if rank:
        title = f"{rank}: {title}"
    are_alike = len(group.extremes) == 1 and group.num_sequences > 1 and bool(group.scores)
    if are_alike and at in group.extremes:
        title += ", as all"
    return Text(f"  {title}", style="bold")


def unwritable(file: Path, error: OSError) -> InvalidConfig:
    """The error for a file that cannot be written."""
    why = f"{error.strerror or error}."
    return InvalidConfig(f"{file} cannot be written.", why, "Name a file in a folder of yours.")
