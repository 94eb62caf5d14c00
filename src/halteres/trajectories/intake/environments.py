"""The environments a server knows, and what each may be told.

Owns: ids, names, heartbeats, buffers of incomplete groups, weights and minimum shares.
Never: forms a batch, talks to an environment.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from halteres.trajectories.forming.packing import Minimum, can_add_up
from halteres.trajectories.records import EnvRecord, GroupRecord
from halteres.trajectories.wire.schema import EnvRegistration

TIMEOUT_S = 60.0
"""An environment silent for longer has no weight and no minimum, until its next request."""

POLLING_S = 5.0
"""An environment that asked for its allowance within this time shares what a batch still lacks."""


@dataclass(slots=True, kw_only=True)
class Environment:
    """One environment process, with its counters of this run."""

    record: EnvRecord
    last_seen: float  # unix s
    last_poll: float = 0.0  # unix s
    buffer: list[GroupRecord] = field(default_factory=list)
    num_accepted: int = 0
    num_set_aside: int = 0

    @property
    def id(self) -> int:
        """Its number, from 0."""
        return self.record.id

    @property
    def group_size(self) -> int:
        """Sequences per group as registered; 0 if it was adopted."""
        return self.record.registration.group_size if self.record.registration else 0

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
        return sum(group.size for group in self.buffer)

    def is_live(self, now: float) -> bool:
        """Connected, and heard of lately."""
        return self.record.connected and now - self.last_seen <= TIMEOUT_S


class Environments:
    """All of them, by id."""

    def __init__(self) -> None:
        self.by_id: dict[int, Environment] = {}
        self._num_named: Counter[str] = Counter()

    def add(self, record: EnvRecord, now: float) -> Environment:
        """Enter a record."""
        env = Environment(record=record, last_seen=now)
        self.by_id[record.id] = env
        self._num_named[record.desired_name] += 1
        return env

    def new_record(self, registration: EnvRegistration) -> EnvRecord:
        """The record of an environment that registers: next id, next number of its name."""
        desired = registration.desired_name or "env"
        name = f"{desired}_{self._num_named[desired]}"
        return EnvRecord(id=max(self.by_id, default=-1) + 1, name=name, desired_name=desired, registration=registration)

    def live(self, now: float) -> list[Environment]:
        """Those connected and heard of lately."""
        return [env for env in self.by_id.values() if env.is_live(now)]

    def polling(self, now: float) -> list[Environment]:
        """Those that ask for work now."""
        return [env for env in self.by_id.values() if env.record.connected and now - env.last_poll <= POLLING_S]

    def weight_of(self, env: Environment, now: float) -> float:
        """Its part of all requests, at least 0.01; 1 where weights are to be ignored."""
        total = sum(other.pull for other in self.live(now))
        return max(0.01, env.pull / total) if env.pull > 0 and total > 0 else 1.0

    def minima(self, batch_size: int, now: float) -> list[Minimum]:
        """Minimum shares of live environments in sequences; scaled down together where they exceed the batch."""
        asked = [(env, int(batch_size * env.min_share)) for env in self.live(now)]
        asked = [(env, need) for env, need in asked if need > 0]
        total = sum(need for _, need in asked)
        if total <= batch_size:
            return [Minimum(env_id=env.id, need=need) for env, need in asked]
        scale = batch_size / total
        return [Minimum(env_id=env.id, need=max(env.group_size, int(need * scale))) for env, need in asked]


def complete(buffer: list[GroupRecord], group_size: int) -> list[GroupRecord]:
    """Buffered groups that make exactly one group of `group_size`, in order of arrival; none if there are none.

    Prefers older ones: each is taken if the rest can still be completed.
    """
    missing, taken = group_size, []
    sizes = Counter(group.size for group in buffer)
    if not can_add_up(sizes, group_size):
        return []
    for group in buffer:
        sizes[group.size] -= 1
        if group.size <= missing and can_add_up(sizes, missing - group.size):
            missing -= group.size
            taken.append(group)
            if not missing:
                break
    return taken
