"""The environments a server knows: ids, names, heartbeats, weights, minimum shares, and what each has buffered."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from halteres.trajectories.exact_sums import Room, can_add_up
from halteres.trajectories.packing import Minimum
from halteres.trajectories.records import EnvRecord, GroupRecord, Place, Tally
from halteres.trajectories.schema import EnvRegistration

LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6
"""Of an environment's weight in batches; beyond them what it was given could not be counted exactly."""

TIMEOUT_S = 60.0
"""An environment silent for longer has no weight and no minimum, until its next request."""

ADOPTED_FROM = 2**30
"""Ids from here were made up by somebody; the next one is not counted from them."""

POLLING_S = 5.0
"""An environment that was heard of within this time shares what a batch still lacks."""


class Buffer:
    """Groups in order of arrival. Everything but walking through it costs O(distinct sizes), however many are stuck."""

    def __init__(self) -> None:
        self.num_sequences = 0
        self._by_size: dict[int, OrderedDict[int, GroupRecord]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_size)

    def __iter__(self) -> Iterator[GroupRecord]:
        groups = chain.from_iterable(lane.values() for lane in self._by_size.values())
        return iter(sorted(groups, key=lambda group: group.id))

    def append(self, group: GroupRecord) -> None:
        """Let a group wait; they come in the order of their ids."""
        self._by_size.setdefault(group.size, OrderedDict())[group.id] = group
        self.num_sequences += group.size

    def remove(self, group: GroupRecord) -> None:
        """A group waits no longer."""
        lane = self._by_size[group.size]
        del lane[group.id]
        if not lane:
            del self._by_size[group.size]
        self.num_sequences -= group.size

    def completed_by(self, group: GroupRecord, group_size: int) -> list[GroupRecord]:
        """Groups of exactly `group_size` sequences, in order of arrival, where this new one makes that possible.

        Older ones are preferred: each is taken if the rest can still be completed. None where it does not add up.
        """
        num_by_size = Counter({size: len(lane) for size, lane in self._by_size.items()})
        num_by_size[group.size] += 1
        if not can_add_up(num_by_size, group_size):
            return []
        lanes = {size: iter(lane.values()) for size, lane in self._by_size.items()}
        lanes[group.size] = chain(lanes.get(group.size, ()), (group,))
        return _oldest_first(lanes, Room(num_by_size, group_size))


def _oldest_first(lanes: Mapping[int, Iterator[GroupRecord]], room: Room) -> list[GroupRecord]:
    heads, taken = {size: next(lane) for size, lane in lanes.items()}, list[GroupRecord]()
    while room.missing:
        oldest = min(heads.values(), key=lambda head: head.id)
        del heads[oldest.size]
        if room.take(oldest.size):
            taken.append(oldest)
            if following := next(lanes[oldest.size], None):
                heads[oldest.size] = following
    return taken


@dataclass(slots=True, kw_only=True)
class Environment:
    """One environment process, with its counters of this run."""

    record: EnvRecord
    seen_at: float  # unix s
    awake: dict[int, Environment] = field(repr=False, compare=False)  # it enters itself when it is heard of
    timeout_s: float = TIMEOUT_S  # of silence, after which it counts for nothing
    buffer: Buffer = field(default_factory=Buffer)
    noted_seen: float = 0.0  # unix s, when others on the same queue were last told that it was heard of
    num_accepted: int = 0
    num_set_aside: int = 0
    num_duplicates: int = 0  # groups that came again with their key
    last_rejection: str = ""  # why its last group was set aside or refused
    starving_since: float | None = None  # unix s; it asked for a share of every batch and has nothing that fits

    @property
    def id(self) -> int:
        """Its number, from 0."""
        return self.record.id

    @property
    def last_seen(self) -> float:
        """When it was heard of, unix s."""
        return self.seen_at

    @last_seen.setter
    def last_seen(self, at: float) -> None:
        self.seen_at = at
        self.awake[self.id] = self

    @property
    def group_size(self) -> int:
        """Sequences per group: as registered; as in its first group where it was adopted, 0 before that."""
        return self.record.registration.group_size if self.record.registration else self.record.adopted_size

    @property
    def min_share(self) -> float:
        """The part of every batch it asked for; 0 if it did not."""
        registration = self.record.registration
        share = registration.min_batch_allocation if registration else None
        return min(max(share or 0.0, 0.0), 1.0)

    @property
    def pull(self) -> float:
        """Context length times weight; 0 where the weight is to be ignored."""
        registration = self.record.registration
        if registration is None or registration.weight <= 0:
            return 0.0
        return max(registration.max_token_length, 0) * registration.weight

    @property
    def buffered_sequences(self) -> int:
        """Sequences of groups that wait for the rest of theirs."""
        return self.buffer.num_sequences

    def count(self, tally: Tally) -> None:
        """Count its groups of this run."""
        if tally.place is Place.SET_ASIDE:
            self.num_set_aside += tally.num_groups
        else:
            self.num_accepted += tally.num_groups

    def starve(self, now: float, nothing_fits: bool) -> None:
        """Note whether it has nothing for the next batch."""
        if not nothing_fits:
            self.starving_since = None
        elif self.starving_since is None:
            self.starving_since = now

    def starves_for(self, now: float) -> float:
        """Seconds that it has had nothing for a batch."""
        return 0.0 if self.starving_since is None else now - self.starving_since

    def is_live(self, now: float) -> bool:
        """Connected, and heard of lately."""
        return self.record.connected and now - self.last_seen <= self.timeout_s


class Environments:
    """All of them, by id. Those that are gone cost nothing: only who may be live is walked."""

    def __init__(self, timeout_s: float = TIMEOUT_S, polling_s: float = POLLING_S) -> None:
        self.timeout_s = timeout_s
        self.polling_s = polling_s
        self.by_id: dict[int, Environment] = {}
        self._awake: dict[int, Environment] = {}  # connected and heard of lately, and some that are no more
        self._num_named: Counter[str] = Counter()
        self._last_id = -1  # the largest that was not made up
        self._unknown: Counter[int] = Counter()  # groups set aside, of those that nobody knows yet

    def save(self, record: EnvRecord, now: float) -> Environment:
        """Enter a record, or the new one of an environment that is known."""
        env = self.by_id.get(record.id)
        if env is None:
            env = self._new(record, now)
        env.record = record
        if record.connected:
            self._awake[env.id] = env
        return env

    def _new(self, record: EnvRecord, now: float) -> Environment:
        env = Environment(record=record, seen_at=now, awake=self._awake, timeout_s=self.timeout_s)
        env.num_set_aside = self._unknown.pop(env.id, 0)
        self.by_id[env.id] = env
        self._num_named[record.desired_name] += 1
        if env.id < ADOPTED_FROM:
            self._last_id = max(self._last_id, env.id)
        return env

    def count(self, tally: Tally) -> None:
        """Count groups of this run with whoever sent them, known or not known yet."""
        if tally.env_id is None:
            return
        if (env := self.by_id.get(tally.env_id)) is not None:
            env.count(tally)
        elif tally.place is Place.SET_ASIDE:
            self._unknown[tally.env_id] += tally.num_groups

    def count_from_nothing(self) -> None:
        """Another run begins."""
        for env in self.by_id.values():
            env.num_accepted = env.num_set_aside = env.num_duplicates = 0
            env.last_rejection, env.starving_since = "", None
        self._unknown.clear()

    def weight(self, env_id: int | None) -> float:
        """Its weight in batches that follow weights; 1 where it has none, or one that is to be ignored."""
        env = self.by_id.get(-1 if env_id is None else env_id)
        registration = env.record.registration if env else None
        weight = registration.weight if registration and registration.weight > 0 else 1.0
        return min(max(weight, LEAST_WEIGHT), MOST_WEIGHT)

    def new_record(self, registration: EnvRegistration) -> EnvRecord:
        """The record of an environment that registers: next id, next number of its name."""
        desired = registration.desired_name or "env"
        name = f"{desired}_{self._num_named[desired]}"
        return EnvRecord(id=self._next_id(), name=name, desired_name=desired, registration=registration)

    def _next_id(self) -> int:
        """One that nobody uses, and that no environment of a lost server is likely to come back with."""
        following = self._last_id + 1
        while following in self.by_id:
            following += 1
        return following

    def live(self, now: float) -> list[Environment]:
        """Those connected and heard of lately."""
        return [env for env in self._lately(now) if env.is_live(now)]

    def polling(self, now: float) -> list[Environment]:
        """Those that ask for work now."""
        return [env for env in self._lately(now) if now - env.last_seen <= self.polling_s]

    def _lately(self, now: float) -> list[Environment]:
        """Whoever may be live or polling, by id; the others are walked no more until they are heard of again."""
        longest_s = max(self.timeout_s, self.polling_s)
        for env in list(self._awake.values()):
            if not env.record.connected or now - env.last_seen > longest_s:
                del self._awake[env.id]
        return [self._awake[env_id] for env_id in sorted(self._awake)]

    def total_pull(self, now: float) -> float:
        """What the parts of `weight_of` are parts of. Costs a walk over all that are live."""
        return sum(env.pull for env in self.live(now))

    def weight_of(self, env: Environment, now: float, total: float | None = None) -> float:
        """Its part of all requests, at least 0.01; 1 where weights are to be ignored.

        `total`: the `total_pull`, for whoever asks for many.
        """
        if total is None:
            total = self.total_pull(now)
        return max(0.01, env.pull / total) if env.pull > 0 and total > 0 else 1.0

    def minima(self, batch_size: int, now: float) -> list[Minimum]:
        """Minimum shares of live environments in sequences; scaled down together where they exceed the batch."""
        asked = [(env, int(batch_size * env.min_share)) for env in self.live(now)]
        asked = [(env, need) for env, need in asked if need > 0 and env.group_size <= batch_size]
        total = sum(need for _, need in asked)
        if total <= batch_size:
            return [Minimum(env_id=env.id, need=need) for env, need in asked]
        scale = batch_size / total
        return [Minimum(env_id=env.id, need=max(env.group_size, int(need * scale))) for env, need in asked]
