"""What a store must be able to do: remember, for a server that may be killed at any instant.

turn:  begin ── what others did meanwhile ──▶ decide in memory ── changes ──▶ commit, or abandon
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from halteres.errors import NotReady
from halteres.trajectories.records import Change, Delivery, GroupRecord, KnownKey, Place, Remembered

Durability = Literal["process", "power"]
"""What committed data survive: the death of the process; the loss of power, too."""


class StoreFailed(NotReady):
    """Nothing was remembered, or it cannot be read; the request may succeed when it is sent again."""

    code = "store_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a turn begins with."""

    changes: Sequence[Change] = ()  # of other servers on the same queue, in order; bodies are left out (b"")
    afresh: Remembered | None = None  # instead of changes: too much was missed, begin from this
    known: Sequence[KnownKey] = ()  # of the keys asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsQuery:
    """Which groups to list: the oldest first, by id."""

    after: int = 0  # ids above this
    limit: int = 100
    places: tuple[Place, ...] = ()  # empty: all
    env_id: int | None = None
    newest: bool = False  # the last `limit` of them instead of the first; the order stays


class Store(Protocol):
    """Durable memory. `begin`, `commit` and `abandon` are called by one thread, in turns; the readers by any."""

    @property
    def is_shared(self) -> bool:
        """Other servers write to it too: every turn must `begin`, and followers ask for `news`."""
        ...

    @property
    def is_quick(self) -> bool:
        """A commit waits for no disk and no network: it ends with memory that the kernel will write."""
        ...

    @property
    def is_full(self) -> bool:
        """It takes no groups until its disk has room; what waits can be taken out."""
        ...

    def load(self) -> Remembered:
        """Everything the state needs to go on.

        Raises:
            StoreFailed: it cannot be read.
        """
        ...

    def begin(self, keys: Sequence[str] = ()) -> News:
        """Begin a turn: nobody else decides until it ends. `keys` are Idempotency-Keys that memory does not know.

        Raises:
            StoreFailed: the turn cannot be had; nothing began.
        """
        ...

    def commit(self, changes: Sequence[Change]) -> None:
        """End the turn: remember these changes, all or none. When it returns they survive the death of the process.

        A store that is not shared may be committed to without `begin`.

        Raises:
            StoreFailed: they are not remembered; the turn has ended.
        """
        ...

    def abandon(self) -> None:
        """End a turn that changed nothing."""
        ...

    def news(self) -> News:
        """What others changed since the last `begin` or `news`, outside a turn; nothing where the store is not shared.

        Called by the thread of `begin`.

        Raises:
            StoreFailed: it cannot be read.
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

    def delivery(self, batch_id: int) -> Delivery | None:
        """A batch by its id, also one that was settled long ago; None: there never was one.

        Raises:
            StoreFailed: it cannot be read.
        """
        ...

    def groups(self, query: GroupsQuery) -> list[GroupRecord]:
        """Records of groups, also of those that no longer wait.

        Raises:
            StoreFailed: they cannot be read.
        """
        ...

    def find_bodies(self, group_ids: Sequence[int]) -> dict[int, bytes]:
        """As `bodies`, without those that are not kept any more.

        Raises:
            StoreFailed: they cannot be read.
        """
        ...

    def num_bytes(self) -> int:
        """Bytes that it takes on its disk, about."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...
