"""What a store must be able to do: remember, for a server that may be killed at any instant.

Owns: the protocol, and the error of a store that cannot write or be read.
Never: decides anything. SQLite is one store (`sqlite`); another database is another class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from halteres.errors import NotReady
from halteres.trajectories.records import Change, Remembered


class StoreFailed(NotReady):
    """Nothing was remembered, or it cannot be read; the request may succeed when it is sent again."""

    code = "store_failed"


class Store(Protocol):
    """Durable memory. `commit` is called by one thread; the readers by any."""

    def load(self) -> Remembered:
        """Everything the state needs to go on.

        Raises:
            StoreFailed: it cannot be read.
        """
        ...

    def commit(self, changes: Sequence[Change]) -> None:
        """Remember these changes, all or none; when it returns they survive the death of the process.

        Raises:
            StoreFailed: they are not remembered.
        """
        ...

    def bodies(self, group_ids: Sequence[int]) -> list[bytes]:
        """The JSON elements of these groups, in this order.

        Raises:
            StoreFailed: they cannot be read, or are not kept any more.
        """
        ...

    def latest_body(self) -> bytes | None:
        """The element of the group that entered the queue last, of those still kept.

        Raises:
            StoreFailed: it cannot be read.
        """
        ...

    def close(self) -> None:
        """Let go of it."""
        ...
