"""The state of the trajectory server in memory, made of nothing but the changes that a store
remembers.

decide ── do(change) ──▶ apply, and note it for the store          another server's change ── apply
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from halteres.trajectories.batch_selection import Queue, Shares
from halteres.trajectories.environments import POLLING_S, Buffer, Environment, Environments
from halteres.trajectories.options import Rules
from halteres.trajectories.posted_group import Problem
from halteres.trajectories.records import (
    OPEN,
    Change,
    Delivery,
    EnvRecord,
    EnvSeen,
    GroupArrived,
    GroupRecord,
    KnownKey,
    Place,
    Remembered,
    RunRecord,
    Standing,
    Tally,
)

Clock = Callable[[], float]  # gives the time in unix s
# batches that are known by their ids after they are settled; the store knows all
KEPT_SETTLED = 256
NOTED_S = 10.0  # how exactly other servers on the same queue know when an environment was heard of


class State:
    """Everything the server decides upon. Whoever changes it has what `drain` gives committed
    before anyone is told.
    """

    def __init__(
        self,
        remembered: Remembered,
        clock: Clock,
        rules: Rules | None = None,
        *,
        shared: bool = False,
    ) -> None:
        self.clock = clock
        self.rules = rules or Rules()
        self._shared = shared
        self.run: RunRecord = remembered.run
        self.durable_step = remembered.run.step  # the run's, as a restart would find it
        self.queue = Queue()
        polling_s = POLLING_S
        if shared:
            polling_s += NOTED_S
        self.envs = Environments(self.rules.env_timeout_s, polling_s)
        self.shares = Shares(self.envs.weight)
        self.waiting: dict[int, GroupRecord] = {}  # queued, buffered or out, by id
        self.out: dict[int, Delivery] = {}  # open batches, by id
        # those that are not, the newest
        self.settled = {delivery.id: delivery for delivery in remembered.settled}
        self.num_out: Counter[int | None] = Counter()  # sequences of open batches, per environment
        self.sizes_out: Counter[int] = Counter()  # groups of open batches, per size
        self.num_bytes = 0  # of everything that waits
        self.set_aside: Counter[str] = Counter()  # groups of this run, per reason
        # groups of this run that are served with a flaw, per reason
        self.flagged: Counter[str] = Counter()
        self.num_accepted = 0  # groups of this run that were not set aside
        self.num_duplicates = 0  # groups that came again with their key, since this server started
        self.first_group_at = remembered.first_group_at  # unix s
        self.last_group = remembered.last_group
        self.last_position = 0
        self.last_delivery = remembered.last_delivery
        self._keys = {known.key: known for known in remembered.keyed}
        self._noted: list[Change] = []
        for record in remembered.envs:
            self.envs.save(record, clock())
        if shared:
            for seen in remembered.seen:
                self.envs.by_id[seen.env_id].last_seen = seen.at
        for group in remembered.waiting:
            self._enter(group)
        self.last_position = remembered.last_position
        self.out.update((delivery.id, delivery) for delivery in remembered.deliveries)
        for tally in remembered.tallies:
            self._count(tally)

    def do(self, change: Change) -> None:
        """Apply a change that was decided here, and note it for the store."""
        self.apply(change)
        self._noted.append(change)

    def keep(self) -> None:
        """Everything that was decided is on disk: environments may count by it."""
        self.durable_step = self.run.step

    def drain(self) -> list[Change]:
        """What was decided here since the last call."""
        noted, self._noted = self._noted, []
        return noted

    def apply(self, change: Change) -> None:
        """Apply a change, whoever decided it."""
        match change:
            case RunRecord() as run:
                if run.first_group != self.run.first_group:  # another run begins
                    self.envs.count_from_nothing()
                    for counts in (self.set_aside, self.flagged, self._keys):
                        counts.clear()
                    self.num_accepted = 0
                    self.first_group_at = None
                self.run = run
            case EnvRecord() as record:
                self.envs.save(record, self.clock())
            case EnvSeen(env_id, at):
                env = self.envs.get(env_id)
                if env is not None:
                    env.last_seen = max(env.last_seen, at)
            case GroupArrived(group, _):
                self.last_group = max(self.last_group, group.id)
                if group.key is not None:
                    self._keys[group.key] = KnownKey(group.key, group.fingerprint, group.verdict)
                self._count(Tally(group.env_id, group.place, group.reason, 1))
                if group.place is not Place.SET_ASIDE:
                    self.first_group_at = self.first_group_at or group.received_at
                self._enter(group)
            case GroupRecord() as group:
                before = self.waiting.get(group.id)
                flaw = None
                if before is not None:
                    flaw = before.reason
                    self._leave(before)
                self._enter(group)
                if group.place is Place.SET_ASIDE:
                    self._count(Tally(group.env_id, Place.QUEUED, flaw, -1))
                    self._count(Tally(group.env_id, group.place, group.reason, 1))
            case Delivery() as delivery:
                self._deliver(delivery)

    def _deliver(self, delivery: Delivery) -> None:
        self.last_delivery = max(self.last_delivery, delivery.id)
        if delivery.standing not in OPEN:
            self.out.pop(delivery.id, None)
            self.settled[delivery.id] = delivery
            while len(self.settled) > KEPT_SETTLED:
                del self.settled[next(iter(self.settled))]
        else:
            self.out[delivery.id] = delivery
            queued = [
                self.queue.groups[group_id]
                for group_id in delivery.groups
                if group_id in self.queue.groups
            ]
            self.shares.formed((group.env_id, group.size) for group in queued)
        for group in map(self.waiting.get, delivery.groups):
            if group is None:
                continue
            if delivery.standing is Standing.DELIVERED:
                self._leave(group)
            elif delivery.standing in OPEN and (
                group.place is not Place.OUT or group.delivery != delivery.id
            ):
                self._leave(group)
                self._enter(replace(group, place=Place.OUT, delivery=delivery.id))

    def _enter(self, group: GroupRecord) -> None:
        """Put a group where its record says it waits."""
        match group.place:
            case Place.QUEUED if group.position > self.last_position:
                self.queue.add(group)
                self.last_position = group.position
            case Place.QUEUED:
                self.queue.put_back(group)
            case Place.BUFFERED:
                self._buffer_of(group).append(group)
            case Place.OUT:
                self.num_out[group.env_id] += group.size
                self.sizes_out[group.size] += 1
            case _:
                return
        self.waiting[group.id] = group
        self.num_bytes += group.num_bytes

    def _leave(self, group: GroupRecord) -> None:
        """The place where a group waits lets go of it."""
        match group.place:
            case Place.QUEUED:
                self.queue.remove(group)
            case Place.BUFFERED:
                self._buffer_of(group).remove(group)
            case _:
                self.num_out[group.env_id] -= group.size
                self.sizes_out[group.size] -= 1
        del self.waiting[group.id]
        self.num_bytes -= group.num_bytes

    def _count(self, tally: Tally) -> None:
        if tally.place is Place.SET_ASIDE:
            self.set_aside[tally.reason or "other"] += tally.num_groups
        else:
            self.num_accepted += tally.num_groups
            if tally.reason:
                self.flagged[tally.reason] += tally.num_groups
        self.envs.count(tally)

    def _buffer_of(self, group: GroupRecord) -> Buffer:
        env_id = -1
        if group.env_id is not None:
            env_id = group.env_id
        return self.envs.by_id[env_id].buffer

    def save_run(self, run: RunRecord) -> None:
        """Make this the run's record."""
        if run != self.run:
            self.do(run)

    def save_env(self, record: EnvRecord) -> Environment:
        """Make this the record of an environment, new or known."""
        env = self.envs.by_id.get(record.id)
        if env is None or env.record != record:
            self.do(record)
        return self.envs.by_id[record.id]

    def note_seen(self, env_id: int, *, polls: bool = True) -> Environment:
        """An environment was heard of; one that nobody knows is adopted under the id it uses.

        A poll also brings back one that had said goodbye, or is of an earlier run; its last groups
        do not.
        """
        env = self.envs.by_id.get(env_id)
        if env is None:
            name = f"adopted_{env_id}"
            env = self.save_env(
                EnvRecord(id=env_id, name=name, desired_name=name, registration=None)
            )
        if polls:
            self.save_env(replace(env.record, connected=True))
        now = self.clock()
        if self._shared and now - env.noted_seen > NOTED_S:
            env.noted_seen = now
            self.do(EnvSeen(env_id, now))
        env.last_seen = now
        return env

    def is_seen_lately(self, env_id: int) -> bool:
        """Whether there is nothing to change when this environment is heard of."""
        env = self.envs.by_id.get(env_id)
        if env is None or not env.record.connected:
            return False
        return not self._shared or self.clock() - env.noted_seen <= NOTED_S

    def put(self, group: GroupRecord, place: Place, problem: Problem | None = None) -> None:
        """Put a group that waits somewhere else."""
        position = group.position
        if place is Place.QUEUED and group.place is Place.BUFFERED:
            position = self.last_position + 1
        moved = replace(self.waiting[group.id], place=place, position=position, delivery=None)
        if problem is not None:
            moved = replace(moved, reason=problem.code, why=problem.why)
        self.do(moved)

    @property
    def max_staleness(self) -> int | None:
        """Versions a group may lag behind the trainer; None: unbounded. The trainer's word goes
        before the server's.
        """
        registration = self.run.registration
        if registration is None or registration.max_staleness is None:
            return self.rules.max_staleness
        return registration.max_staleness

    def known(self, key: str | None) -> KnownKey | None:
        """What was answered to a key of this run."""
        if key is None:
            return None
        return self._keys.get(key)
