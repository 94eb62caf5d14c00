"""Where batches come from: registering with the trajectory server, asking for the next batch under
the newest policy version, and how long to wait for one.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from pathlib import Path

from halteres.clients.trajectories import TrainerClient, TrainerRegistration
from halteres.config.settings import Settings
from halteres.errors import InvalidConfig, NotReady
from halteres.training.failures import BatchNotOurs, NoExperience
from halteres.training.folder import Wiring
from halteres.training.stopping import Stopping
from halteres.types import Batch

SLICE_S = 1.0  # one question for a batch waits so long: a request to stop is noticed that late
PATIENCE_S = 120.0
"""How long there may be no sign of life, neither a new group nor an environment, before the wait is
given up.
"""

# how long no new group may arrive while environments are there: one group of a large model takes
# long
GROUP_S = 1800.0
SEEN_S = 30.0  # an environment heard of within this time is alive
REGISTER_S = 60.0  # how long the trajectory server may take to come up


class Trajectories:
    """Batches of the trajectory server, one per step."""

    def __init__(
        self,
        client: TrainerClient,
        registration: TrainerRegistration,
        stopping: Stopping,
        patience_s: float = PATIENCE_S,
        slice_s: float = SLICE_S,
    ) -> None:
        self._client, self._registration, self._stopping = client, registration, stopping
        self._patience_s, self._slice_s = patience_s, slice_s

    async def register(self) -> None:
        """Tell the server about the run, waiting for it to come up. Raises NotReady if it does
        not.
        """
        deadline = time.monotonic() + REGISTER_S
        while not self._stopping.at_once:
            try:
                await asyncio.to_thread(self._client.register, self._registration)
                return
            except NotReady:  # the client has tried for a while itself
                if time.monotonic() > deadline:
                    raise

    async def batches(
        self, steps: Iterable[int], version: Callable[[], int]
    ) -> AsyncIterator[tuple[int, Batch]]:
        """Each step with its batch, which tells of groups set aside since the one before. Ends
        early where asked to.

        Args:
            steps: step numbers to serve.
            version: the trainer's policy version at the moment of asking; groups too far behind it
                are set aside.

        Raises:
            NoExperience: no sign of life for `patience_s`, or no group for GROUP_S; it says why
                there is no batch.
            BatchNotOurs: another trainer has registered at the server, for another run or another
                batch size.
        """
        num_stale = 0
        for step in steps:
            batch = await self._next(version())
            if batch is None:
                return
            check_source(batch, self._registration)
            if batch.num_stale is not None:
                stale_before, num_stale = num_stale, batch.num_stale
                batch = replace(batch, num_stale=num_stale - stale_before)
            yield step, batch
            if self._stopping.request():
                return

    async def _next(self, version: int) -> Batch | None:
        wait = BatchWait(self._patience_s)
        while not self._stopping.at_once:
            try:
                return await asyncio.to_thread(
                    self._client.batch, version, deadline_s=self._slice_s
                )
            except NotReady as reason:
                wait.check(*await self._signs_of_life(), reason)
        return None

    async def _signs_of_life(self) -> tuple[int | None, bool]:
        """How many groups ever arrived, and whether an environment was heard of within SEEN_S;
        nothing while the server is away.
        """
        try:
            answer = await asyncio.to_thread(self._client.diagnostics)
        except NotReady:
            return None, False
        ages = [
            e.get("last_seen_s", math.inf)
            for e in answer.get("environments", ())
            if e.get("connected", True)
        ]
        return answer.get("groups_accepted"), min(ages, default=math.inf) <= SEEN_S


def check_source(batch: Batch, registration: TrainerRegistration) -> None:
    """BatchNotOurs where a batch is of another run than registered, or of another size."""
    if batch.run_id not in (None, registration.run_id):
        why = (
            f"It is of {f'run {batch.run_id}' if batch.run_id else 'a trainer that named no run'}."
        )
    elif batch.num_rollouts != registration.batch_size:
        why = (
            f"It has {batch.num_rollouts} rollouts; the run's batches have "
            f"{registration.batch_size}."
        )
    else:
        return
    raise BatchNotOurs(
        f"The trajectory server delivered a batch that is not of run {registration.run_id}.",
        f"{why} Another trainer has registered at the run's server.",
        "End that trainer, or give it a trajectory server of its own; then resume from the last "
        "checkpoint.",
    )


class BatchWait:
    """How long to wait for a batch while nothing arrives."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s, self._clock = patience_s, clock
        self._sign = self._group = clock()
        self._accepted = 0

    def check(self, num_accepted: int | None, is_alive: bool, reason: NotReady) -> None:
        """Another wait was in vain; a new group begins the time anew, a living environment too, up
        to GROUP_S. NoExperience where it is over.
        """
        now = self._clock()
        if num_accepted not in (None, self._accepted):
            self._accepted, self._group = num_accepted, now
        if is_alive or self._group == now:
            self._sign = now
        if now - self._sign < self._patience_s and now - self._group < GROUP_S:
            return
        why = (
            "An environment is alive, but its rollouts do not end: are answers very long, or is "
            "scoring slow?"
        )
        if now - self._sign >= self._patience_s:
            age_s = now - self._sign
            why = (
                f"No environment was heard of for {age_s:.0f} s: it may hang in its own code, "
                "as in score()."
            )
        raise NoExperience(
            f"No new group reached the trajectory server for {now - self._group:.0f} s, and there "
            "is no batch.",
            f"{reason.why or reason.what} {why}",
            "Look into logs/env.log and mend what holds the environment up.",
        ) from reason


def registration_of(
    settings: Settings, wiring: Wiring, folder: Path, done: int
) -> TrainerRegistration:
    """What the trajectory server is told. Raises InvalidConfig where the environment's settings
    lack the batch size.
    """
    batch_size = settings.env.get("batch_size")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise InvalidConfig(
            "The trainer needs env.batch_size.",
            f"It is {batch_size!r} in settings.json; it counts rollouts, and is a multiple of "
            "env.group_size.",
            "Set it, e.g. --set env.batch_size=256.",
            field="env.batch_size",
        )
    return TrainerRegistration(
        run_id=wiring.run_id,
        batch_size=batch_size,
        max_token_len=int(
            settings.env.get("max_token_length", settings.trainer.max_token_trainer_length)
        ),
        starting_step=done,
        num_steps=settings.trainer.total_steps,
        # in policy versions
        max_staleness=settings.trainer.max_staleness * settings.trainer.updates_per_batch,
        updates_per_batch=settings.trainer.updates_per_batch,
        checkpoint_dir=str(folder),
        save_checkpoint_interval=settings.trainer.checkpoint_every,
    )
