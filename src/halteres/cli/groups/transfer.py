"""Groups into a file, a line each as a trainer gets them, and out of one into the queue of a
server.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from halteres.cli.groups.view import POLL_S, Selection, Wait, unwritable
from halteres.clients.retries import Retries
from halteres.clients.trajectories.calls import KeyReused, NotAllowed, UnknownEnvironment
from halteres.clients.trajectories.environment import EnvironmentClient
from halteres.clients.trajectories.groups import Follower, GroupInfo, Reader
from halteres.errors import HalteresError, InvalidData, NotFound, NotReady
from halteres.files import replacing

STANDARD = Path("-")  # standard output, or input
BOM = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"

# -- export
# --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Exported:
    """What a file holds so far."""

    num_groups: int = 0
    num_bytes: int = 0  # before compression
    num_gone: int = 0  # groups whose tokens are kept no more
    last: int = 0  # id of the last group seen


def export(
    reader: Reader,
    selection: Selection,
    file: Path,
    report: Callable[[Exported], None],
    done: Exported,
    wait: Wait = time.sleep,
) -> None:
    """Write the file; `done` counts meanwhile. KeyboardInterrupt ends a following export well: what
    came is kept.
    """
    with _opened(file) as stream:
        try:
            for infos in _pages(reader, selection, wait):
                for info in infos:
                    done.last = max(done.last, info.id)
                    if not info.has_tokens:
                        done.num_gone += 1
                        continue
                    # The server's element, without the white space between its tokens: it may have
                    # come on many lines.
                    line = msgspec.json.format(bytes(info.element), indent=-1) + b"\n"
                    stream.write(line)
                    done.num_groups += 1
                    done.num_bytes += len(line)
                stream.flush()
                report(done)
        except KeyboardInterrupt:
            if not selection.follow:
                raise


def _pages(reader: Reader, selection: Selection, wait: Wait) -> Iterator[list[GroupInfo]]:
    if not selection.follow:
        yield from reader.pages(selection.since, selection.places, selection.env_id)
        return
    follower = Follower(reader, selection.since, selection.places, selection.env_id)
    yield from follower.look()  # a server that is away from the beginning is an error at once
    while True:
        wait(POLL_S)
        try:
            yield from follower.look()
        except NotReady:
            continue


@contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    """Standard output, or a file that appears when it is whole: gzip by its name."""
    if file == STANDARD:
        yield sys.stdout.buffer
        return
    try:
        with replacing(file) as beside:
            if beside.suffix == ".gz":
                with gzip.open(beside, "wb", compresslevel=3) as stream:
                    yield cast("IO[bytes]", stream)
            else:
                with beside.open("wb") as stream:
                    yield stream
    except OSError as error:
        raise unwritable(file, error) from error


# -- import
# --------------------------------------------------------------------------------------------------

UNDER_WAY = 8  # posts at a time
WHILE_AWAY = Retries.for_seconds(120.0)  # how long a server may be away in the middle of a file


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
    keep_version: bool = False,
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
        keep_version: their policy versions stay.

    Raises:
        NotReady: the server stayed away. NotAllowed: it asks for a token. What was posted stays,
            and `done` counts it.
    """

    async def work() -> None:
        for line in lines:  # shared by all
            try:
                posted = await client.post(
                    group_of(line, env_id, keep_version=keep_version), key=line.key
                )
            except (NotAllowed, UnknownEnvironment):
                raise
            except InvalidData as error:
                done.num_bad += 1
                reused = InvalidData(
                    "It was imported before, with another environment or other versions."
                )
                complain(line, reused if isinstance(error, KeyReused) else error)
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


def group_of(line: Line, env_id: int | None, *, keep_version: bool) -> dict[str, Any]:
    """The group to post.

    Raises:
        InvalidData: it is no group; what is wrong with its contents in detail, the server says.
    """
    try:
        group: Any = msgspec.json.decode(line.content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        try:  # Python writes NaN, which is no JSON; the server sets such a group aside and says why
            group = json.loads(line.content)
        except (ValueError, RecursionError):
            raise InvalidData("It is no JSON.", f"{error}.") from error
    if not isinstance(group, dict):
        raise InvalidData("It is no JSON object.")
    group = cast("dict[str, Any]", group)
    missing = [name for name in ("tokens", "masks", "scores") if group.get(name) is None]
    if missing:
        raise InvalidData(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing."
        )
    try:
        group["scores"] = msgspec.convert(group["scores"], list[float], strict=False)
    except msgspec.ValidationError as error:
        raise InvalidData("scores is no list of numbers.", f"{error}.") from error
    # the original's tools also know a whole conversation as one text
    if isinstance(group.get("messages"), list):
        group["messages"] = [
            [{"role": "user", "content": each}] if isinstance(each, str) else each
            for each in cast("list[Any]", group["messages"])
        ]
    dropped = ("halteres_key", "env_id", *(() if keep_version else ("policy_version",)))
    group = {name: value for name, value in group.items() if name not in dropped}
    return group if env_id is None else {**group, "env_id": env_id}


def opened(file: Path) -> IO[bytes]:
    """Standard input, or a file, unpacked where it is gzip, whatever its name.

    Raises:
        NotFound: it cannot be opened.
    """
    if file == STANDARD:
        return sys.stdin.buffer
    try:
        with file.open("rb") as stream:
            is_packed = stream.read(len(GZIP)) == GZIP
        return cast("IO[bytes]", gzip.open(file, "rb")) if is_packed else file.open("rb")
    except OSError as error:
        raise NotFound(f"{file} cannot be read.", f"{error.strerror or error}.") from error
