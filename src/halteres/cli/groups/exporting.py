"""Groups into a file: a line each, as a trainer gets them.

Owns: the file (JSONL, gzip by its name, whole or not at all), what is left out and counted.
Never: alters a group: a line is the server's element, without the white space between its tokens.
"""

from __future__ import annotations

import gzip
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import msgspec

from halteres.cli.groups.viewing import LOOK_EVERY_S, Wait, unwritable
from halteres.clients.trajectories.groups.reading import Follower, PlaceName, Reader, Told
from halteres.errors import NotReady
from halteres.files import replacing

if TYPE_CHECKING:
    from pathlib import Path


STDOUT = Path("-")


@dataclass(slots=True)
class Exported:
    """What a file holds so far."""

    num_groups: int = 0
    num_bytes: int = 0  # before compression
    num_gone: int = 0  # groups whose tokens are kept no more
    last: int = 0  # id of the last group seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which groups go into the file."""

    places: tuple[PlaceName, ...] = ()  # none: all
    env_id: int | None = None
    since: int = 0  # ids above this
    follow: bool = False


Report = Callable[[Exported], None]


def export(reader: Reader, chosen: Chosen, file: Path, report: Report, done: Exported, wait: Wait = time.sleep) -> None:
    """Write the file; `done` counts meanwhile. KeyboardInterrupt ends a following export well: what came is kept."""
    with _opened(file) as stream:
        try:
            for told in _pages(reader, chosen, wait):
                for each in told:
                    _write(stream, each, done)
                stream.flush()
                report(done)
        except KeyboardInterrupt:
            if not chosen.follow:
                raise


def _pages(reader: Reader, chosen: Chosen, wait: Wait) -> Iterator[list[Told]]:
    if not chosen.follow:
        yield from reader.pages(chosen.since, chosen.places, chosen.env_id)
        return
    follower = Follower(reader, chosen.since, chosen.places, chosen.env_id)
    yield from follower.look()  # a server that is away from the beginning is told
    while True:
        wait(LOOK_EVERY_S)
        try:
            yield from follower.look()
        except NotReady:
            continue


def _write(stream: IO[bytes], told: Told, done: Exported) -> None:
    done.last = max(done.last, told.id)
    if not told.has_tokens:
        done.num_gone += 1
        return
    line = msgspec.json.format(bytes(told.element), indent=-1) + b"\n"  # a body may have come on many lines
    stream.write(line)
    done.num_groups += 1
    done.num_bytes += len(line)


@contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    """Standard output, or a file that appears when it is whole."""
    if file == STDOUT:
        yield sys.stdout.buffer
        return
    try:
        with replacing(file) as beside, _file(beside) as stream:
            yield stream
    except OSError as error:
        raise unwritable(file, error) from error


def _file(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path, "wb", compresslevel=3))
    return path.open("wb")
