"""Groups into a file, a line each as a trainer gets them, and out of one into the queue of a
server. A name that ends in .gz is compressed.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from halteres.cli.groups.view import Selection, unwritable
from halteres.clients.retries import Retries
from halteres.clients.trajectories.calls import KeyReused, NotAllowed, UnknownEnvironment
from halteres.clients.trajectories.environment import EnvironmentClient
from halteres.clients.trajectories.groups import Reader
from halteres.errors import HalteresError, InvalidData, NotFound
from halteres.files import replacing

BOM = b"\xef\xbb\xbf"
GZIP = ".gz"

# -- export


@dataclass(slots=True)
class Exported:
    """What a file holds so far."""

    num_groups: int = 0
    num_bytes: int = 0  # before compression
    num_gone: int = 0  # groups whose tokens are kept no more


def export(
    reader: Reader,
    selection: Selection,
    file: Path,
    report: Callable[[Exported], None],
    done: Exported,
) -> None:
    """Write the file, which appears when it is whole; `done` counts meanwhile."""
    with _created(file) as stream:
        for infos in reader.pages(0, selection.places, selection.env_id):
            for info in infos:
                if not info.has_tokens:
                    done.num_gone += 1
                    continue
                # The server's element, without the white space between its tokens: it may have
                # come on many lines.
                line = msgspec.json.format(bytes(info.element), indent=-1) + b"\n"
                stream.write(line)
                done.num_groups += 1
                done.num_bytes += len(line)
            report(done)


@contextmanager
def _created(file: Path) -> Iterator[IO[bytes]]:
    try:
        with replacing(file) as beside:
            if file.suffix == GZIP:
                with gzip.open(beside, "wb", compresslevel=3) as packed:
                    yield cast("IO[bytes]", packed)
            else:
                with beside.open("wb") as stream:
                    yield stream
    except OSError as error:
        raise unwritable(file, error) from error


# -- import

UNDER_WAY = 8  # posts at a time
WHILE_AWAY = Retries.for_seconds(120.0)  # how long a server may be away in the middle of a file
# ids are a server's own, and a group that is posted again is not too old for its trainer
DROPPED = ("halteres_key", "env_id", "policy_version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line that is not empty."""

    number: int  # from 1
    content: bytes

    @property
    def key(self) -> str:
        """The same for the same content at the same place of a file, and for no other."""
        return f"line-{self.number}-{hashlib.sha256(self.content).hexdigest()[:40]}"


@dataclass(slots=True)
class Imported:
    """What became of the lines so far."""

    num_posted: int = 0  # that the server took, now or before
    num_buffered: int = 0  # of those: parts of a group
    num_bad: int = 0
    set_aside: Counter[str] = field(default_factory=Counter[str])  # by why


async def import_lines(
    url: str,
    stream: IO[bytes],
    done: Imported,
    complain: Callable[[Line, HalteresError], None],
    report: Callable[[Imported], None] = lambda done: None,
    *,
    env_id: int | None = None,
) -> None:
    """Post every line; several at a time, in the order of the file as far as that allows.

    Args:
        url: of the server.
        stream: the lines.
        done: counts meanwhile.
        complain: called with each bad line.
        report: called after each post.
        env_id: whose groups they are; None: no environment's. An id counts only on the server that
            gave it.

    Raises:
        NotReady: the server stayed away. NotAllowed: it asks for a token. What was posted stays,
            and `done` counts it.
    """

    async def work() -> None:
        for line in lines:  # shared by all
            try:
                posted = await client.post(group_of(line, env_id), key=line.key)
            except (NotAllowed, UnknownEnvironment):
                raise
            except KeyReused:
                done.num_bad += 1
                complain(line, InvalidData("It was imported before, with another environment."))
                continue
            except InvalidData as error:
                done.num_bad += 1
                complain(line, error)
                continue
            done.num_posted += 1
            done.num_buffered += posted.status == "buffered"
            if posted.set_aside:
                done.set_aside[posted.set_aside] += 1
            report(done)

    lines = lines_of(stream)
    async with EnvironmentClient(url, WHILE_AWAY) as client:
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(UNDER_WAY):
                    tasks.create_task(work(), name=f"import {number}")
        except* HalteresError as several:
            first: BaseException = several
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None


def lines_of(stream: IO[bytes]) -> Iterator[Line]:
    """Lines with something in them, numbered as an editor does.

    Raises:
        InvalidData: the file is damaged from here on.
    """
    try:
        for number, raw in enumerate(stream, 1):
            # Files that were joined have a mark in the middle, too.
            content = raw.removeprefix(BOM).strip()
            if content:
                yield Line(number=number, content=content)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidData("The file is damaged.", f"{error}.") from error


class _Scored(msgspec.Struct):
    """What is asked of a line here; what else is wrong with a group, the server says."""

    scores: list[float]


def group_of(line: Line, env_id: int | None) -> dict[str, Any]:
    """The group to post.

    Raises:
        InvalidData: it is no object, or has no scores.
    """
    try:
        fields = msgspec.json.decode(line.content, type=dict[str, Any])
        msgspec.convert(fields, _Scored)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidData("It is no group in JSON.", f"{error}.") from error
    group = {name: value for name, value in fields.items() if name not in DROPPED}
    if env_id is not None:
        group["env_id"] = env_id
    return group


def opened(file: Path) -> IO[bytes]:
    """The file, unpacked where its name ends in .gz.

    Raises:
        NotFound: it cannot be opened.
    """
    try:
        if file.suffix == GZIP:
            return cast("IO[bytes]", gzip.open(file, "rb"))
        return file.open("rb")
    except OSError as error:
        raise NotFound(f"{file} cannot be read.", f"{error.strerror or error}.") from error
