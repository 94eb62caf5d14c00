"""What the trajectory server remembers: frozen records, and the changes that bring one state to the next.

Owns: the nouns shared by the state, which is decided upon in memory, and the store, which remembers it.
Never: decides, reads a wire, touches a disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from halteres.trajectories.schema import EnvRegistration, Registration

Versions = tuple[int, int]
"""Smallest and largest policy version of a group's tokens."""


class Place(StrEnum):
    """Where a group is."""

    QUEUED = "queued"  # waits for a batch
    BUFFERED = "buffered"  # smaller than its environment's group; waits for the rest of it
    DELIVERED = "delivered"
    SET_ASIDE = "set_aside"  # never delivered; the reason is kept
    ARCHIVED = "archived"  # of a run that was reset or replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """One accepted group, without its tokens."""

    id: int  # order of arrival
    env_id: int | None
    size: int  # sequences
    num_bytes: int  # of the JSON element
    received_at: float  # unix s
    place: Place
    position: int = 0  # order in the queue
    versions: Versions | None = None  # None: untagged
    reason: str | None = None  # code, where set aside
    why: str | None = None  # one sentence, where set aside
    delivery: int | None = None  # id of the delivery it went into
    key: str | None = None  # Idempotency-Key
    fingerprint: int = 0  # of the body that came with the key
    verdict: bytes = b""  # first verdict on that key, JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One batch that was served."""

    id: int
    step: int  # the run's step once it was delivered; the batch's number
    version: int | None  # the trainer's policy version when it asked
    groups: tuple[int, ...]  # ids, in order
    num_sequences: int
    delivered_at: float  # unix s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The run being served. `registration` is None before /register and after /reset_data."""

    registration: Registration | None = None
    uuid: str = ""  # decimal digits of a 128-bit integer
    started: bool = False  # a trainer has asked for a batch, so environments may register
    step: int = 0  # batches delivered, plus the starting step
    first_group: int = 0  # smallest group id that belongs to this run
    asked_version: int | None = None  # what the trainer last said
    last: Delivery | None = None
    parked: bool = False  # delivered on-policy; nothing to do until the trainer moves on

    @property
    def max_staleness(self) -> int | None:
        """Versions a group may lag behind the trainer; None: unbounded."""
        return self.registration.max_staleness if self.registration else None

    @property
    def batch_size(self) -> int:
        """Sequences in a batch; 0 before /register."""
        return self.registration.batch_size if self.registration else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvRecord:
    """One environment process that registered, or was adopted by its id."""

    id: int
    name: str  # unique: desired name and a number
    desired_name: str
    registration: EnvRegistration | None  # None: adopted, nothing known but its groups
    connected: bool = True


@dataclass(frozen=True, slots=True)
class RunSaved:
    """The run's record became this."""

    run: RunRecord


@dataclass(frozen=True, slots=True)
class EnvSaved:
    """An environment's record became this."""

    env: EnvRecord


@dataclass(frozen=True, slots=True)
class GroupArrived:
    """A group was accepted."""

    group: GroupRecord
    body: bytes


@dataclass(frozen=True, slots=True)
class GroupMoved:
    """A group's place became that of this record."""

    group: GroupRecord


@dataclass(frozen=True, slots=True)
class Delivered:
    """A batch was served; the tokens of the batch before it are no longer wanted."""

    delivery: Delivery
    before: tuple[int, ...]


Change = RunSaved | EnvSaved | GroupArrived | GroupMoved | Delivered


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Groups of the run in one place, per environment and reason."""

    env_id: int | None
    place: Place
    reason: str | None
    num_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """Everything a store knows that the state needs to go on."""

    run: RunRecord = field(default_factory=RunRecord)
    envs: tuple[EnvRecord, ...] = ()
    waiting: tuple[GroupRecord, ...] = ()  # queued and buffered, by position, then id
    keyed: tuple[GroupRecord, ...] = ()  # the newest groups that came with a key
    tallies: tuple[Tally, ...] = ()
    first_group_at: float | None = None  # unix s, of this run
    last_group: int = 0  # largest id ever given
    last_position: int = 0
    last_delivery: int = 0
