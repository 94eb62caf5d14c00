"""What is said on stderr while groups go into a file, or out of one.

Owns: the words, and the line of progress that is written over where stderr is a terminal.
Never: writes to standard output, which may be the file.
"""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import typer

from halteres.cli.groups.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from halteres.cli.groups.exporting import Exported
    from halteres.clients.trajectories.groups.importing import Imported, Line
    from halteres.errors import HalteresError

IMPORTED_EVERY = 50
"""Lines between two words of progress."""

MOST_BAD = 5
"""Bad lines that are named; of a file of another kind every line is one."""


def say(text: str) -> None:
    """One line."""
    progress("")
    typer.echo(text, err=True)


def progress(text: str) -> None:
    """The line that is written over; "" makes room for another."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def exporting(done: Exported) -> None:
    """So far."""
    progress(f"{counted(done.num_groups, 'group')}, {done.num_bytes / 1e6:.1f} MB")


def page(file: Path, follows: bool) -> None:
    """It is there."""
    say(f"{file}: open it in a browser{'; reload it to see what came' if follows else ''}.")


def exported(file: Path, done: Exported, since: int, options: Sequence[str]) -> None:
    """What the file holds, what is not in it, and how it would go on."""
    gone = f"; {counted(done.num_gone, 'group')} left out: no tokens are kept of them" if done.num_gone else ""
    say(f"{file}: {counted(done.num_groups, 'group')}, {done.num_bytes / 1e6:.1f} MB{gone}")
    if done.last > since:
        say(f"What comes later: halteres groups export {shlex.join([*options, '--since', str(done.last)])} FILE")


def importing(done: Imported) -> None:
    """So far."""
    if done.num_posted % IMPORTED_EVERY == 0:
        progress(f"{counted(done.num_posted, 'group')} posted")


def bad_line(done: Imported, line: Line, error: HalteresError) -> None:
    """Which, and why; of many, the first ones."""
    from halteres.clients.trajectories.groups.reading import on_one_line

    if done.num_bad <= MOST_BAD:
        say(f"line {line.number}: {on_one_line(str(error))}")


def imported(file: Path, done: Imported) -> None:
    """What became of the file's lines. The server does not say of a post whether it had come before."""
    from halteres.clients.trajectories.groups.reading import on_one_line

    if done.num_bad > MOST_BAD:
        say(f"{counted(done.num_bad - MOST_BAD, 'more bad line')}.")
    once = " What was there already counts once." if done.num_posted else ""
    say(f"{file}: {counted(done.num_posted, 'group')} posted, {counted(done.num_bad, 'bad line')}.{once}")
    if done.num_buffered:
        rest = "waits for the rest of its group" if done.num_buffered == 1 else "wait for the rest of their groups"
        say(f"{done.num_buffered} of them {rest}.")
    for why, count in done.set_aside.most_common():
        say(f"{count} of them set aside, never to be delivered: {on_one_line(why)}")
