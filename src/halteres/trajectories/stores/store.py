"""What a store must be able to do: remember, for a server that may be killed at any instant.

turn:  begin ── what others did meanwhile ──▶ decide in memory ── changes ──▶ commit, or abandon
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from halteres.errors import NotReady
from halteres.trajectories.records import Change, Delivery, GroupRecord, Place, Remembered

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsQuery:
    """Which groups to list: the oldest first, by id."""

    after: int = 0  # ids above this
    limit: int = 100
    places: tuple[Place, ...] = ()  # empty: all
    env_id: int | None = None
    newest: bool = False  # the last `limit` of them instead of the first; the order stays


class Store(Protocol):
    """Durable memory. `load` to `news` are called by one thread, in turns; the others by any.

    Every method raises StoreFailed where the store cannot be read or written.
    """

    @property
    def is_shared(self) -> bool:
        """Other servers write to it too: every turn must `begin`, and followers ask for `news`."""
        ...

    @property
    def is_full(self) -> bool:
        """It takes no groups until its disk has room; what waits can be taken out."""
        ...

    def load(self) -> Remembered:
        """Everything the state needs to go on."""
        ...

    def begin(self) -> News:
        """Begin a turn: nobody else decides until it ends."""
        ...

    def commit(self, changes: Sequence[Change]) -> None:
        """End the turn: remember these changes, all or none. When it returns they survive the death of the process.

        A store that is not shared may be committed to without `begin`.
        """
        ...

    def abandon(self) -> None:
        """End a turn that changed nothing."""
        ...

    def news(self) -> News:
        """What others changed since the last `begin` or `news`, outside a turn; nothing where nobody else writes."""
        ...

    def bodies(self, group_ids: Sequence[int]) -> dict[int, bytes]:
        """The JSON elements of those groups whose tokens are still kept, in this order."""
        ...

    def latest_body(self) -> bytes | None:
        """The element of the group that entered the queue last, of those still kept."""
        ...

    def delivery(self, batch_id: int) -> Delivery | None:
        """A batch by its id, also one that was settled long ago; None: there never was one."""
        ...

    def groups(self, query: GroupsQuery) -> list[GroupRecord]:
        """Records of groups, also of those that no longer wait."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...
