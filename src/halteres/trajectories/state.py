"""The state of the trajectory server in memory, and the list of changes that a store must remember.

Owns: the run, the queue, the environments, counters, ids; keeps memory and `changes` in step.
Never: decides (`intake` and `delivery` do), waits, touches a disk. One caller at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from halteres.trajectories.forming import packing
from halteres.trajectories.forming.lanes import Queue
from halteres.trajectories.intake.environments import Environment, Environments
from halteres.trajectories.records import (
    Change,
    EnvRecord,
    EnvSaved,
    GroupMoved,
    GroupRecord,
    Place,
    Remembered,
    RunRecord,
    RunSaved,
    Tally,
)
from halteres.trajectories.wire.scored import Problem

Clock = Callable[[], float]
"""Gives the time in unix s."""


class State:
    """Everything the server decides upon. Whoever changes it has `changes` committed before anyone is told."""

    def __init__(self, remembered: Remembered, clock: Clock) -> None:
        self.clock = clock
        self.run: RunRecord = remembered.run
        self.queue = Queue()
        self.envs = Environments()
        self.changes: list[Change] = []
        self.set_aside: Counter[str] = Counter()  # groups of this run, per reason
        self.num_accepted = 0  # groups of this run that were not set aside
        self.first_group_at = remembered.first_group_at  # unix s
        self.verdicts = {group.key: (group.fingerprint, group.verdict) for group in remembered.keyed if group.key}
        self.last_group = remembered.last_group
        self.last_position = remembered.last_position
        self.last_delivery = remembered.last_delivery
        self._recall(remembered)

    def drain(self) -> list[Change]:
        """What changed since the last call."""
        changes, self.changes = self.changes, []
        return changes

    def save_run(self, run: RunRecord) -> RunRecord:
        """Make this the run's record."""
        if run != self.run:
            self.run = run
            self.changes.append(RunSaved(run))
        return run

    def add_env(self, record: EnvRecord) -> Environment:
        """Enter an environment."""
        self.changes.append(EnvSaved(record))
        return self.envs.add(record, self.clock())

    def connect(self, env: Environment, connected: bool) -> None:
        """Change whether an environment counts as connected."""
        if env.record.connected != connected:
            env.record = replace(env.record, connected=connected)
            self.changes.append(EnvSaved(env.record))

    def hear(self, env_id: int) -> Environment:
        """An environment was heard of; one that nobody knows is adopted under the id it uses."""
        env = self.envs.by_id.get(env_id)
        if env is None:
            name = f"adopted_{env_id}"
            env = self.add_env(EnvRecord(id=env_id, name=name, desired_name=name, registration=None))
        env.last_seen = self.clock()
        self.connect(env, True)
        return env

    def next_position(self) -> int:
        """The place behind the last in the queue."""
        self.last_position += 1
        return self.last_position

    def move(self, group: GroupRecord, place: Place, problem: Problem | None = None) -> None:
        """Put a known group somewhere else; its former place lets go of it."""
        if group.place is Place.QUEUED:
            self.queue.remove(group)
        elif group.place is Place.BUFFERED and group.env_id is not None:
            self.envs.by_id[group.env_id].buffer.remove(group)
        position = self.next_position() if place is Place.QUEUED else group.position
        reason, why = (problem.code, problem.why) if problem else (None, None)
        moved = replace(group, place=place, position=position, reason=reason, why=why)
        self.changes.append(GroupMoved(moved))
        self.enter(moved)
        if problem:
            self.count(Tally(env_id=group.env_id, place=group.place, reason=None, num_groups=-1))
            self.count(Tally(env_id=group.env_id, place=place, reason=problem.code, num_groups=1))

    def enter(self, group: GroupRecord) -> None:
        """Put a group where its record says it waits."""
        if group.place is Place.QUEUED:
            self.queue.add(group)
        elif group.place is Place.BUFFERED and group.env_id is not None:
            self.envs.by_id[group.env_id].buffer.append(group)

    def count(self, tally: Tally) -> None:
        """Count groups of this run: accepted, or set aside."""
        env = self.envs.by_id.get(-1 if tally.env_id is None else tally.env_id)
        if tally.place is Place.SET_ASIDE:
            self.set_aside[tally.reason or "other"] += tally.num_groups
            if env:
                env.num_set_aside += tally.num_groups
        else:
            self.num_accepted += tally.num_groups
            if env:
                env.num_accepted += tally.num_groups

    def archive(self) -> None:
        """Take everything that waits out of the way of another run, and count from nothing."""
        buffered = [group for env in self.envs.by_id.values() for group in env.buffer]
        for group in (*self.queue.groups.values(), *buffered):
            self.move(group, Place.ARCHIVED)
        for env in self.envs.by_id.values():
            env.num_accepted = env.num_set_aside = 0
        self.set_aside.clear()
        self.num_accepted, self.first_group_at = 0, None
        self.save_run(RunRecord(first_group=self.last_group + 1))

    def minima(self) -> list[packing.Minimum]:
        """Minimum shares of the next batch."""
        return self.envs.minima(self.run.batch_size, self.clock())

    def batch_is_ready(self) -> bool:
        """Whether a batch could be formed from what is queued."""
        if not 0 < self.run.batch_size <= self.queue.num_sequences:
            return False
        held_back = packing.unmet(self.queue, self.minima())
        return held_back is None and packing.can_add_up(self.queue.num_by_size, self.run.batch_size)

    def _recall(self, remembered: Remembered) -> None:
        now = self.clock()
        for record in remembered.envs:
            self.envs.add(record, now)
        for group in remembered.waiting:
            self.enter(group)
        for tally in remembered.tallies:
            self.count(tally)
