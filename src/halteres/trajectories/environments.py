"""The environments a server knows: ids, names, heartbeats, weights, minimum shares, and what each
has buffered.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from halteres.trajectories.batch_selection import Minimum, RemainingCapacity, can_add_up
from halteres.trajectories.records import EnvRecord, GroupRecord, Place, Tally
from halteres.trajectories.schema import EnvRegistration

# in batches; beyond them what it was given could not be counted exactly
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6
# an environment silent for longer has no weight and no minimum, until its next request
TIMEOUT_S = 60.0
# ids from here were made up by somebody; the next one is not counted from them
ADOPTED_FROM = 2**30
POLLING_S = 5.0  # an environment that was heard of within this time shares what a batch still lacks


class Buffer:
    """Groups smaller than their environment's, in order of arrival."""

    def __init__(self) -> None:
        self.groups: dict[int, GroupRecord] = {}  # by id
        self._num_by_size: Counter[int] = Counter()

    @property
    def num_sequences(self) -> int:
        """In all of them."""
        return sum(size * num for size, num in self._num_by_size.items())

    def append(self, group: GroupRecord) -> None:
        """Let a group wait; they come in the order of their ids."""
        self.groups[group.id] = group
        self._num_by_size[group.size] += 1

    def remove(self, group: GroupRecord) -> None:
        """A group waits no longer."""
        del self.groups[group.id]
        self._num_by_size[group.size] -= 1

    def completed_by(self, group: GroupRecord, group_size: int) -> list[GroupRecord]:
        """Groups of exactly `group_size` sequences, in order of arrival, where this new one makes
        that possible.

        Older ones are preferred: each is taken if the rest can still be completed. None where it
        does not add up.
        """
        num_by_size = self._num_by_size + Counter([group.size])
        if not can_add_up(num_by_size, group_size):
            return []
        room = RemainingCapacity(num_by_size, group_size)
        return [
            each for each in (*self.groups.values(), group) if room.missing and room.take(each.size)
        ]


@dataclass(slots=True, kw_only=True)
class Environment:
    """One environment process, with its counters of this run."""

    record: EnvRecord
    last_seen: float  # unix s
    timeout_s: float = TIMEOUT_S  # of silence, after which it counts for nothing
    buffer: Buffer = field(default_factory=Buffer)
    # unix s, when others on the same queue were last told that it was heard of
    noted_seen: float = 0.0
    num_accepted: int = 0
    num_set_aside: int = 0
    num_duplicates: int = 0  # groups that came again with their key
    last_rejection: str = ""  # why its last group was set aside or refused
    # unix s; it asked for a share of every batch and has nothing that fits
    starving_since: float | None = None

    @property
    def id(self) -> int:
        """Its number, from 0."""
        return self.record.id

    @property
    def group_size(self) -> int:
        """Sequences per group: as registered; as in its first group where it was adopted, 0 before
        that.
        """
        if self.record.registration is None:
            return self.record.adopted_size
        return self.record.registration.group_size

    @property
    def min_share(self) -> float:
        """The part of every batch it asked for; 0 if it did not."""
        registration = self.record.registration
        if registration is None or registration.min_batch_allocation is None:
            return 0.0
        return min(max(registration.min_batch_allocation, 0.0), 1.0)

    @property
    def pull(self) -> float:
        """Context length times weight; 0 where the weight is to be ignored."""
        registration = self.record.registration
        if registration is None or registration.weight <= 0:
            return 0.0
        return max(registration.max_token_length, 0) * registration.weight

    def starves_for(self, now: float) -> float:
        """Seconds that it has had nothing for a batch."""
        if self.starving_since is None:
            return 0.0
        return now - self.starving_since

    def is_live(self, now: float) -> bool:
        """Connected, and heard of lately."""
        return self.record.connected and now - self.last_seen <= self.timeout_s


class Environments:
    """All of them, by id."""

    def __init__(self, timeout_s: float = TIMEOUT_S, polling_s: float = POLLING_S) -> None:
        self.timeout_s, self.polling_s = timeout_s, polling_s
        self.by_id: dict[int, Environment] = {}
        self._num_by_name: Counter[str] = Counter()
        self._last_id = -1  # the largest that was not made up
        self._unknown: Counter[int] = Counter()  # groups set aside, of those that nobody knows yet

    def save(self, record: EnvRecord, now: float) -> None:
        """Enter a record, or the new one of an environment that is known."""
        env = self.by_id.get(record.id)
        if env is not None:
            env.record = record
            return
        env = Environment(record=record, last_seen=now, timeout_s=self.timeout_s)
        env.num_set_aside = self._unknown.pop(env.id, 0)
        self.by_id[env.id] = env
        self._num_by_name[record.desired_name] += 1
        if env.id < ADOPTED_FROM:
            self._last_id = max(self._last_id, env.id)

    def get(self, env_id: int | None) -> Environment | None:
        """The one of this id, if it is known."""
        if env_id is None:
            return None
        return self.by_id.get(env_id)

    def count(self, tally: Tally) -> None:
        """Count groups of this run with whoever sent them, known or not known yet."""
        env = self.get(tally.env_id)
        if tally.place is Place.SET_ASIDE and env is not None:
            env.num_set_aside += tally.num_groups
        elif tally.place is Place.SET_ASIDE and tally.env_id is not None:
            self._unknown[tally.env_id] += tally.num_groups
        elif env is not None:
            env.num_accepted += tally.num_groups

    def count_from_nothing(self) -> None:
        """Another run begins."""
        for env in self.by_id.values():
            env.num_accepted = env.num_set_aside = env.num_duplicates = 0
            env.last_rejection, env.starving_since = "", None
        self._unknown.clear()

    def weight(self, env_id: int | None) -> float:
        """Its weight in batches that follow weights; 1 where it has none, or one that is to be
        ignored.
        """
        env = self.get(env_id)
        if env is None or env.record.registration is None:
            return 1.0
        weight = env.record.registration.weight
        if not weight > 0:
            return 1.0
        return min(max(weight, LEAST_WEIGHT), MOST_WEIGHT)

    def new_record(self, registration: EnvRegistration) -> EnvRecord:
        """The record of an environment that registers: next id, next number of its name.

        The id is one that no environment of a lost server is likely to come back with.
        """
        desired = registration.desired_name or "env"
        env_id = self._last_id + 1
        while env_id in self.by_id:
            env_id += 1
        name = f"{desired}_{self._num_by_name[desired]}"
        return EnvRecord(id=env_id, name=name, desired_name=desired, registration=registration)

    def live(self, now: float) -> list[Environment]:
        """Those connected and heard of lately, by id."""
        return sorted(
            (env for env in self.by_id.values() if env.is_live(now)), key=lambda env: env.id
        )

    def polling(self, now: float) -> list[Environment]:
        """Those that ask for work now."""
        return [
            env
            for env in self.by_id.values()
            if env.record.connected and now - env.last_seen <= self.polling_s
        ]

    def weight_of(self, env: Environment, now: float) -> float:
        """Its part of all requests, at least 0.01; 1 where weights are to be ignored."""
        total = sum(each.pull for each in self.live(now))
        if env.pull > 0 and total > 0:
            return max(0.01, env.pull / total)
        return 1.0

    def minima(self, batch_size: int, now: float) -> list[Minimum]:
        """Minimum shares of live environments in sequences; scaled down together where they exceed
        the batch.
        """
        needs = [(env, int(batch_size * env.min_share)) for env in self.live(now)]
        needs = [(env, need) for env, need in needs if need > 0 and env.group_size <= batch_size]
        total = sum(need for _, need in needs)
        if total <= batch_size:
            return [Minimum(env_id=env.id, need=need) for env, need in needs]
        scale = batch_size / total
        return [
            Minimum(env_id=env.id, need=max(env.group_size, int(need * scale)))
            for env, need in needs
        ]
