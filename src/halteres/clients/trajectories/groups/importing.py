"""Groups out of the lines of a file into the queue of a trajectory server."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from halteres.clients.trajectories.calls import KeyReused, NotAllowed, Patience, UnknownEnvironment
from halteres.clients.trajectories.environment import EnvironmentClient, Posted
from halteres.errors import HalteresError, InvalidData, NotFound

STDIN = Path("-")

BOM = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"

REQUIRED = ("tokens", "masks", "scores")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line that is not empty."""

    number: int  # from 1
    content: bytes

    @property
    def key(self) -> str:
        """The same for the same content at the same place of a file, and for no other."""
        return f"line-{self.number}-{hashlib.sha256(self.content).hexdigest()[:40]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What an import makes of each group."""

    env_id: int | None = None  # None: of no environment; an id counts only on the server that gave it
    keep_version: bool = False


def lines_of(stream: IO[bytes]) -> Iterator[Line]:
    """Lines with something in them, numbered as an editor does.

    Raises:
        InvalidData: the file is damaged from here on.
    """
    try:
        for number, raw in enumerate(stream, 1):
            content = (raw.removeprefix(BOM) if number == 1 else raw).strip()
            if content:
                yield Line(number=number, content=content)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidData("The file is damaged.", f"{error}.") from error


def group_of(line: Line, changes: Changes) -> dict[str, Any]:
    """The group to post.

    Raises:
        InvalidData: it is no group; what is wrong with its contents in detail, the server says.
    """
    group = _decoded(line.content)
    missing = [name for name in REQUIRED if group.get(name) is None]
    if missing:
        raise InvalidData(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing.")
    group["scores"] = _scores(group["scores"])
    if isinstance(group.get("messages"), list):
        group["messages"] = [_chat(each) for each in cast("list[Any]", group["messages"])]
    dropped = ("halteres_key", "env_id", *(() if changes.keep_version else ("policy_version",)))
    kept = {name: value for name, value in group.items() if name not in dropped}
    return kept if changes.env_id is None else {**kept, "env_id": changes.env_id}


def _decoded(content: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        value = _with_nan(content, error)
    if not isinstance(value, dict):
        raise InvalidData("It is no JSON object.")
    return cast("dict[str, Any]", value)


def _with_nan(content: bytes, refused: Exception) -> Any:
    """Python writes NaN, which is no JSON; the server sets such a group aside and says why."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise InvalidData("It is no JSON.", f"{refused}.") from refused


def _scores(scores: Any) -> list[float]:
    try:
        return msgspec.convert(scores, list[float], strict=False)
    except msgspec.ValidationError as error:
        raise InvalidData("scores is no list of numbers.", f"{error}.") from error


def _chat(messages: Any) -> Any:
    """The original's tools also know a whole conversation as one text."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def opened(file: Path) -> IO[bytes]:
    """Standard input, or a file, unpacked where it is gzip, whatever its name.

    Raises:
        NotFound: it cannot be opened.
    """
    if file == STDIN:
        return sys.stdin.buffer
    try:
        return _unpacked(file)
    except OSError as error:
        raise NotFound(f"{file} cannot be read.", f"{error.strerror or error}.") from error


def _unpacked(file: Path) -> IO[bytes]:
    with file.open("rb") as stream:
        is_packed = stream.read(len(GZIP)) == GZIP
    return cast("IO[bytes]", gzip.open(file, "rb")) if is_packed else file.open("rb")


UNDER_WAY = 8
"""Posts at a time."""

PATIENCE = Patience(total_s=120.0)
"""How long a server may be away in the middle of a file."""

REUSED = "It was imported before, with another environment or other versions."


@dataclass(slots=True)
class Imported:
    """What became of the lines so far."""

    num_posted: int = 0  # that the server took, now or before
    num_buffered: int = 0  # of those: parts of a group
    num_bad: int = 0
    set_aside: Counter[str] = field(default_factory=Counter[str])  # by why


Complain = Callable[[Line, HalteresError], None]
"""Told of a bad line."""

Report = Callable[[Imported], None]
"""Told of every post."""


async def import_lines(
    url: str,
    stream: IO[bytes],
    changes: Changes,
    done: Imported,
    complain: Complain,
    report: Report = lambda done: None,
) -> None:
    """Post every line; several at a time, in the order of the file as far as that allows.

    Raises:
        NotReady: the server stayed away. NotAllowed: it asks for a token. What was posted stays, and `done` counts it.
    """
    lines = lines_of(stream)
    async with EnvironmentClient(url, PATIENCE) as client:
        poster = _Poster(client, changes, done, complain, report)
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(UNDER_WAY):
                    tasks.create_task(poster.work(lines), name=f"import {number}")
        except* HalteresError as several:
            raise _first(several) from None


@dataclass(frozen=True, slots=True)
class _Poster:
    client: EnvironmentClient
    changes: Changes
    done: Imported
    complain: Complain
    report: Report

    async def work(self, lines: Iterator[Line]) -> None:
        """Post lines until there is none; the iterator is shared."""
        for line in lines:
            try:
                self._count(await self._post(line))
            except (NotAllowed, UnknownEnvironment):
                raise
            except InvalidData as error:
                self.done.num_bad += 1
                self.complain(line, error)

    async def _post(self, line: Line) -> Posted:
        try:
            return await self.client.post(group_of(line, self.changes), key=line.key)
        except KeyReused:
            raise InvalidData(REUSED) from None

    def _count(self, posted: Posted) -> None:
        self.done.num_posted += 1
        self.done.num_buffered += posted.status == "buffered"
        if posted.set_aside:
            self.done.set_aside[posted.set_aside] += 1
        self.report(self.done)


def _first(group: BaseExceptionGroup[HalteresError]) -> HalteresError:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found
