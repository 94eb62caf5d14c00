"""What a store must be able to do: remember, for a server that may be killed at any instant.

turn:  begin ── what others did meanwhile ──▶ decide in memory ── changes ──▶ commit, or abandon
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal

from sqlalchemy import Connection

from halteres.errors import NotReady
from halteres.trajectories.records import Change, Delivery, GroupRecord, News, Remembered
from halteres.trajectories.schema import GroupsRequest
from halteres.trajectories.stores import rows

Durability = Literal["process", "power"]
"""What committed data survive: the death of the process; the loss of power, too."""


class StoreFailed(NotReady):
    """Nothing was remembered, or it cannot be read; the request may succeed when it is sent again."""

    code = "store_failed"


class Store(ABC):
    """Durable memory in a database of SQL. `load` to `news` are called one after another; the others by any thread.

    Every method raises StoreFailed where the store cannot be read or written.
    """

    is_quick = False
    """A commit usually takes less than waking a thread for it."""
    is_shared = False
    """Other servers write to it too: every turn must `begin`, and followers ask for `news`."""

    @property
    def is_full(self) -> bool:
        """It takes no groups until its disk has room; what waits can be taken out."""
        return False

    def load(self) -> Remembered:
        """Everything the state needs to go on."""
        with self._reading() as connection:
            return rows.everything(connection)

    def begin(self) -> News:
        """Begin a turn: nobody else decides until it ends."""
        return News()

    @abstractmethod
    def commit(self, changes: Sequence[Change]) -> None:
        """End the turn: remember these changes, all or none. When it returns they survive the death of the process.

        A store that is not shared may be committed to without `begin`.
        """

    def abandon(self) -> None:
        """End a turn that changed nothing."""
        return

    def news(self) -> News:
        """What others changed since the last `begin` or `news`, outside a turn; nothing where nobody else writes."""
        return News()

    @abstractmethod
    def bodies(self, group_ids: Sequence[int]) -> dict[int, bytes]:
        """The JSON elements of those groups whose tokens are still kept, in this order."""

    def latest_body(self) -> bytes | None:
        """The element of the group that entered the queue last, of those still kept."""
        with self._reading() as connection:
            newest = rows.newest(connection)
        return next(iter(self.bodies(newest).values()), None)

    def delivery(self, batch_id: int) -> Delivery | None:
        """A batch by its id, also one that was settled long ago; None: there never was one."""
        with self._reading() as connection:
            return rows.delivery(connection, batch_id)

    def groups(self, query: GroupsRequest) -> list[GroupRecord]:
        """Records of groups, also of those that no longer wait."""
        with self._reading() as connection:
            return rows.listed(connection, query)

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""

    @abstractmethod
    def _reading(self) -> AbstractContextManager[Connection]:
        """A connection for whatever thread asks."""
