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
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.text import Text

from halteres.cli.groups import group as shown
from halteres.cli.groups.group import Group, counted
from halteres.clients.trajectories.groups import Follower, GroupInfo, PlaceName, Reader
from halteres.errors import InvalidConfig, NotReady

if TYPE_CHECKING:  # whoever names no tokenizer need not wait for its libraries
    from halteres.text import Tokenizer

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
    """Which groups are to be shown or written."""

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
    """Show the newest groups, and what comes where that is selected; how many groups were shown."""
    names, num_shown = dict[int | None, str]({None: ""}), 0

    def show(infos: list[GroupInfo]) -> None:
        nonlocal num_shown
        for info in infos:
            if info.env_id not in names:
                try:
                    names.update(reader.environment_names().items())
                    names.setdefault(info.env_id, "")
                except NotReady:  # the next one asks for them
                    pass
            display.show(Group(info, names.get(info.env_id, "")))
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
    found = list[GroupInfo]()
    for infos in reader.pages(listed[0].id - 1, places, env_id) if listed else ():
        found += infos
        if len(found) >= limit:
            break
    return found[:limit]


class Terminal:
    """Prints groups; `full`: every sequence, whole."""

    def __init__(self, console: Console, tokenizer: Tokenizer | None, *, full: bool) -> None:
        self._console, self._tokenizer, self._full = console, tokenizer, full

    def show(self, group: Group) -> None:
        """One block, and an empty line."""
        for line in self._lines(group):
            self._console.print(line, soft_wrap=True)
        self._console.print()

    def rest(self, reader: Reader) -> None:
        """Nothing more is to be done."""

    def _lines(self, group: Group) -> Iterator[Text]:
        info = group.info
        place = info.place.replace("_", " "), STYLES.get(info.place, "dim")
        heading = Text.assemble((f"group {info.id}", "bold"), "  ", group.owner, "  ", place)
        heading.append(f"  {shown.clock(info.received_at)}")
        yield heading.append(f"  {shown.version(info)}" if info.policy_version else "", "dim")
        if info.why:
            yield Text(
                f"  {shown.reason(info)}", style="red" if info.place == "set_aside" else "yellow"
            )
        if not info.has_tokens:
            yield Text(f"  {shown.no_tokens(info)}", style="dim")
            return
        mean, lengths = (shown.number(group.mean), "bold"), (f"  {group.lengths}", "dim")
        yield Text.assemble(("  scores ", "dim"), group.scores, ("  mean ", "dim"), mean, lengths)
        alike = (
            ", as all"
            if len(group.extremes) == 1 and group.num_sequences > 1 and group.element.scores
            else ""
        )
        for at in range(group.num_sequences) if self._full else group.extremes:
            rank = f"{group.rank(at)}: " if group.rank(at) else ""
            yield Text(
                f"  {rank}sequence {at}, {group.score(at)}{alike if at in group.extremes else ''}",
                style="bold",
            )
            yield from self._texts(group, at)

    def _texts(self, group: Group, at: int) -> Iterator[Text]:
        parts = group.parts(at, self._tokenizer)
        if not self._full and len(parts) > MOST_PARTS:
            yield Text.assemble(
                CONTEXT_BAR, (f"… {counted(len(parts) - MOST_PARTS, 'earlier part')}", "dim")
            )
            parts = parts[-MOST_PARTS:]
        for part in parts:
            bar, style = SAMPLED_BAR if part.is_sampled else CONTEXT_BAR
            text = Text(
                f"{part.label}: " if part.label else "", style="" if part.is_sampled else "dim"
            )
            text.append((part if self._full else part.shortened(SHORT)).text)
            for line in text.wrap(self._console, max(20, self._console.width - len(bar))):
                line.rstrip()
                yield Text.assemble((bar, style), line)


def unwritable(file: Path, error: OSError) -> InvalidConfig:
    """The error for a file that cannot be written."""
    why = f"{error.strerror or error}."
    return InvalidConfig(f"{file} cannot be written.", why, "Name a file in a folder of yours.")
