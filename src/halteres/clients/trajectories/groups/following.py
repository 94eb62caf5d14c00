"""What has come since the last look.

Owns: which groups are new, each told once.
Never: waits, or shows anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from halteres.clients.trajectories.groups.reading import MOST, Reader
from halteres.clients.trajectories.groups.told import WAITING, PlaceName, Told


class Follower:
    """What has come to the wanted places since the last look, each group once.

    Groups come to a place in another order than to the server, so what still waits is looked at again: a look begins at
    the oldest group that could move since.
    """

    def __init__(self, reader: Reader, after: int, places: Sequence[PlaceName], env_id: int | None) -> None:
        self._reader, self._places, self._env_id = reader, tuple(places), env_id
        self._after = after  # nothing up to this id is news
        self._seen: set[int] = set()  # of those behind it

    def skip(self) -> None:
        """What is there by now is no news."""
        self._settle(self._settled())
        self.saw(self._listed())

    def saw(self, group_ids: Iterable[int]) -> None:
        """These are no news: they were shown by other means."""
        self._seen.update(group_ids)

    def look(self) -> Iterator[list[Told]]:
        """Pages of what is new, with tokens. A look that failed may be repeated: what it told is not told again."""
        yield from self._by_place() if self._places else self._by_arrival()

    def _by_arrival(self) -> Iterator[list[Told]]:
        for groups in self._reader.pages(self._after, (), self._env_id):
            fresh = [told for told in groups if told.id not in self._seen]
            if fresh:
                yield fresh
            self._settle(max([self._after, *(told.id for told in groups)]))

    def _by_place(self) -> Iterator[list[Told]]:
        settled = self._settled()  # asked before the list: what moves in between is found now or at the next look
        for group_id in [group_id for group_id in self._listed() if group_id not in self._seen]:
            told = self._reader.group(group_id)
            yield [told]
            self._seen.add(group_id)
        self._settle(settled)

    def _settle(self, upto: int) -> None:
        self._after = max(self._after, upto)
        self._seen = {group_id for group_id in self._seen if group_id > self._after}

    def _settled(self) -> int:
        """Up to which id no group can come to another place any more (those archived aside)."""
        newest = self._reader.page(limit=1, newest=True, bodies=False).groups
        waiting = self._reader.page(after=self._after, limit=1, places=WAITING, bodies=False).groups
        if waiting:
            return waiting[0].id - 1
        return newest[0].id if newest else 0

    def _listed(self) -> Iterator[int]:
        at: int | None = self._after
        while at is not None:
            page = self._reader.page(after=at, limit=MOST, places=self._places, env_id=self._env_id, bodies=False)
            yield from (told.id for told in page.groups)
            at = page.next
