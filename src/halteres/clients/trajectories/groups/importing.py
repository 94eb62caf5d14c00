"""Groups out of a file into the queue.

Owns: how many posts are under way, what became of each line.
Never: posts a line twice: its key is made of its number and its content, and a key counts once in a run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO

from halteres.clients.trajectories.calls import KeyReused, NotAllowed, Patience, UnknownEnvironment
from halteres.clients.trajectories.environment import EnvironmentClient, Posted
from halteres.clients.trajectories.groups.lines import Changes, Line, group_of, lines_of
from halteres.errors import HalteresError, InvalidData

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
