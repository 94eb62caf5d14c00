"""Answers for people who read them in a terminal.

Owns: how an answer looks: one line per key, tables for lists of things, blocks where texts are long.
Never: leaves anything out, knows one tool from another.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from halteres.agent.call import Reply
from halteres.agent.faces.commands import as_commands
from halteres.redaction import printable

LONG = 60
"""Characters from which a text has a line of its own instead of a table's cell."""

PIPE_WIDTH = 1000
"""Columns where there is no terminal: paths and log lines stay whole."""

_GAP = 2


def show(reply: Reply) -> None:
    """Print an answer: on stderr where the call failed."""
    stream = sys.stderr if reply.failed else sys.stdout
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else PIPE_WIDTH)
    with console.capture() as page:
        for part in _parts(reply, console.width):
            console.print(part, soft_wrap=isinstance(part, Text))
    stream.write("".join(f"{line.rstrip()}\n" for line in page.get().splitlines()))


def _parts(reply: Reply, width: int) -> Iterator[RenderableType]:
    body = dict(reply.body)
    following = body.pop("next", "")
    if "error" in body:
        yield Text(f"error: {_word(body.pop('error'))}", style="red")
    if body:
        yield _grid(body, width)
    for image in reply.images:
        if str(image) not in body.values():
            yield Text(f"picture: {image}")
    if following:
        yield Text(f"next: {_word(following)}", style="bold")


def _grid(body: Mapping[str, Any], width: int) -> Table:
    """One line per key, within so many columns."""
    left = width - max(map(len, body)) - _GAP
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in body.items():
        grid.add_row(name, _shown(value, left))
    return grid


def _shown(value: Any, width: int) -> RenderableType:
    if isinstance(value, Mapping) and value:
        return _grid(value, width) if _is_deep(value) else Text(_inline(value))
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and item for item in value):
        return _things(value, width)
    if isinstance(value, list):
        return _list(value)
    return Text(_word(value))


def _is_deep(value: Mapping[str, Any]) -> bool:
    """Whether a mapping wants lines of its own: it holds more mappings, or much."""
    return any(isinstance(item, Mapping) for item in value.values()) or len(_inline(value)) > 2 * LONG


def _inline(value: Mapping[str, Any]) -> str:
    return "  ".join(f"{name}={_bracketed(item)}" for name, item in value.items())


def _bracketed(item: Any) -> str:
    return f"[{_word(item)}]" if isinstance(item, list) and item else _word(item)


def _list(items: Sequence[Any]) -> Text:
    """Names and figures side by side, sentences on one line each."""
    words = [_word(item) for item in items]
    is_prose = any(len(word.split()) > 1 or len(word) > LONG for word in words)
    return Text(("\n" if is_prose else ", ").join(words) or "–")


def _things(items: Sequence[Mapping[str, Any]], width: int) -> RenderableType:
    """A table, or blocks where a cell would be long or the columns too many."""
    names = list(dict.fromkeys(name for item in items for name in item))
    columns = [[name, *(_word(item[name]) for item in items if name in item)] for name in names]
    widths = [max(map(len, column)) for column in columns]
    has_breaks = any("\n" in cell for column in columns for cell in column)
    if has_breaks or max(widths) > LONG or sum(widths) + _GAP * len(widths) > width:
        return Group(*[part for item in items for part in (Text(), _grid(item, width))][1:])
    return _table(items, names)


def _table(items: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for name in names:
        figures = all(isinstance(item.get(name), int | float | None) for item in items)
        table.add_column(name, justify="right" if figures else "left")
    for item in items:
        table.add_row(*(_word(item[name]) if name in item else "" for name in names))
    return table


def _word(value: Any) -> str:
    """One value as people write it; calls become commands."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return _inline(value) or "–"
    if isinstance(value, list):
        return ", ".join(map(_word, value)) or "–"
    return printable(as_commands(str(value)))
