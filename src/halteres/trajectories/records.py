"""What the trajectory server remembers: frozen records, and the changes that bring one state to the
next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from halteres.trajectories.schema import EnvRegistration, Registration

# smallest and largest policy version of a group's tokens, or of a batch's
Versions = tuple[int, int]


class Place(StrEnum):
    """Where a group is."""

    QUEUED = "queued"  # waits for a batch
    BUFFERED = "buffered"  # smaller than its environment's group; waits for the rest of it
    OUT = "out"  # in a batch that is offered, leased or has come back whole
    DELIVERED = "delivered"
    SET_ASIDE = "set_aside"  # never delivered; the reason is kept
    ARCHIVED = "archived"  # of a run that was reset or replaced


# places of groups whose tokens will be asked for
WAITING = (Place.QUEUED, Place.BUFFERED, Place.OUT)


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
    reason: str | None = None  # code, where set aside, or served with a flaw
    why: str | None = None  # one sentence, as well
    delivery: int | None = None  # id of the delivery it went into
    key: str | None = None  # Idempotency-Key
    fingerprint: int = 0  # of the body that came with the key
    verdict: bytes = b""  # first verdict on that key, JSON


class Standing(StrEnum):
    """Where a batch is on its way to a trainer."""

    OFFERED = "offered"  # its reply is being written
    LEASED = "leased"  # with a trainer that promised to acknowledge it before `expires_at`
    RETURNED = "returned"  # came back whole; answers the next question
    DELIVERED = "delivered"  # with a trainer for good; counted in the step
    REPLACED = "replaced"  # handed out again: its groups belong to a batch with another id
    BROKEN = "broken"  # dissolved: its groups queue again, or are set aside


# not settled: their groups are `Place.OUT`
OPEN = (Standing.OFFERED, Standing.LEASED, Standing.RETURNED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One batch, each time it is handed out."""

    id: int
    standing: Standing
    step: int | None = None  # the run's step once it was delivered
    version: int | None  # the trainer's policy version when it asked
    groups: tuple[int, ...]  # ids, in order
    num_sequences: int
    made_at: float  # unix s
    expires_at: float | None = None  # unix s, of an offer or a lease
    versions: Versions | None = None  # of its groups; None: all are untagged
    # what its asker held: a batch's id, 0: it named none; None: this one is acknowledged
    held: int | None = None

    @property
    def is_back(self) -> bool:
        """It answers the next question."""
        return self.standing is Standing.RETURNED


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The run being served. `registration` is None before /register and after /reset_data."""

    registration: Registration | None = None
    uuid: str = ""  # decimal digits of a 128-bit integer
    started: bool = False  # a trainer has asked for a batch, so environments may register
    step: int = 0  # batches delivered, plus the starting step
    first_group: int = 0  # smallest group id that belongs to this run
    # the trainer's, with its question for the next batch; None: it has not asked yet
    asked_version: int | None = None
    last: Delivery | None = None
    parked: bool = False  # delivered on-policy; nothing to do until the trainer moves on

    @property
    def known_version(self) -> int | None:
        """The newest version that the trainer is known to have."""
        return (
            self.last.version
            if self.asked_version is None and self.last is not None
            else self.asked_version
        )

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
    connected: bool = True  # False: it said goodbye, or was not heard of since this run began
    adopted_size: int = 0  # sequences of its first group, where it was adopted


@dataclass(frozen=True, slots=True)
class GroupArrived:
    """A group was accepted."""

    group: GroupRecord
    body: bytes


@dataclass(frozen=True, slots=True)
class EnvSeen:
    """An environment was heard of; kept coarsely, for other servers on the same queue."""

    env_id: int
    at: float  # unix s


Change = RunRecord | EnvRecord | EnvSeen | GroupArrived | GroupRecord | Delivery
"""A record is what it became. The groups of a batch that is OFFERED or LEASED are out, in this
batch; of one that is DELIVERED they are delivered, and the tokens of the batches delivered before
are not needed any more; where those of one that is REPLACED or BROKEN are, other changes say.
"""


@dataclass(frozen=True, slots=True)
class Tally:
    """Groups of the run in one place, per environment and reason."""

    env_id: int | None
    place: Place
    reason: str | None
    num_groups: int


class KnownKey(NamedTuple):
    """An Idempotency-Key that was used, and what was answered."""

    key: str
    fingerprint: int  # of the body that came with it
    verdict: bytes  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """Everything a store knows that the state needs to go on."""

    run: RunRecord = field(default_factory=RunRecord)
    envs: tuple[EnvRecord, ...] = ()
    waiting: tuple[GroupRecord, ...] = ()  # queued, buffered and out, by position, then id
    deliveries: tuple[Delivery, ...] = ()  # the open ones, by id
    settled: tuple[Delivery, ...] = ()  # the newest that are not open, by id (some hundreds)
    keyed: tuple[KnownKey, ...] = ()  # the keys of the run
    seen: tuple[EnvSeen, ...] = ()  # when environments were last heard of
    tallies: tuple[Tally, ...] = ()
    first_group_at: float | None = None  # unix s, of this run
    last_group: int = 0  # largest id ever given
    last_position: int = 0  # of what waits
    last_delivery: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What other servers on the same queue did since the last turn here."""

    changes: Sequence[Change] = ()  # in order; bodies are left out (b"")
    afresh: Remembered | None = None  # instead of changes: too much was missed, begin from this
