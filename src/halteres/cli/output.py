"""What verbs print: tables for people, one JSON object for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from halteres.redaction import printable

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")]

PIPE_WIDTH = 1000
"""Columns where there is no terminal: a row is one line, and nothing of it is folded."""


def print_json(value: Mapping[str, Any]) -> None:
    """Print an object on one line; a number that is NaN or infinite, which JSON has no word for, is
    null.
    """
    from halteres.observe.metrics import encoded_row

    typer.echo(encoded_row(value).decode())


def tool_answer(tool: str, **arguments: Any) -> dict[str, Any]:
    """What a tool answers an agent.

    Raises:
        ProcessFailed: the tool refused; its own sentence is in the error.
    """
    # .3 s: only where a tool is called
    from halteres.agent.tool import Caller
    from halteres.agent.transports.command_line import answer
    from halteres.errors import ProcessFailed

    reply = answer(tool, arguments, Caller.own(has_no_host=True))
    if reply.failed:
        raise ProcessFailed(str(reply.body["error"]))
    return reply.for_agents


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under the names of their columns, without colours or lines in a pipe.

    Args:
        columns: names; one that begins with `>` stands at the right, as numbers do.
        rows: a text for each column; what others wrote may be in it.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = PIPE_WIDTH
    if sys.stdout.isatty():
        width = None
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in columns:
        justify = "left"
        if name.startswith(">"):
            justify = "right"
        table.add_column(name.removeprefix(">"), justify=justify, overflow="fold")
    for row in rows:
        # a cell stays within its row, whatever is written in it
        table.add_row(*(Text(" ".join(printable(cell).split())) for cell in row))
    console = Console(highlight=False, width=width)
    with console.capture() as page:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in page.get().splitlines()))
