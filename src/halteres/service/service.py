"""The training service as one value: its parts, opened and closed in order.

Owns: the state directory's lock and layout, the parts' lifetimes.
Never: knows HTTP.

    STATE/lock               held by flock while a service runs here
    STATE/journal.sqlite     accepted requests, sessions, models, samplers, checkpoints
    STATE/checkpoints/       named weights
    STATE/points/            restore points of training runs
    STATE/spill/             unnamed snapshots that had to leave the engine, or go to another one
    STATE/engine.log         the engine's standard error; STATE/sampler-1.log and on, those of engines that only sample
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from halteres.errors import Conflict, ServerError
from halteres.service.base import BaseModel
from halteres.service.checkpoints.store import Checkpoints
from halteres.service.durable.futures import Futures
from halteres.service.durable.journal import Journal
from halteres.service.fleet import Fleet
from halteres.service.models import Models
from halteres.service.options import Options
from halteres.service.reaper import Reaper
from halteres.service.sampling.samplers import Samplers
from halteres.service.sampling.samples import Samples
from halteres.service.sampling.snapshots import Snapshots
from halteres.service.sessions import Sessions
from halteres.service.takeover import take_up
from halteres.service.tenancy.fair_queue import Threads
from halteres.service.training.adapters import Adapters
from halteres.service.training.custom_losses import CustomLosses
from halteres.service.training.execution import Training
from halteres.service.training.exports import Exports
from halteres.service.weights_budget import WeightsBudget
from halteres.text import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Everything behind the routes."""

    state: Path
    base: BaseModel
    fleet: Fleet
    options: Options
    journal: Journal
    futures: Futures
    sessions: Sessions
    losses: CustomLosses
    checkpoints: Checkpoints
    snapshots: Snapshots
    adapters: Adapters
    samplers: Samplers
    samples: Samples
    models: Models
    reaper: Reaper
    tokenizer: Tokenizer
    threads: Threads


@contextmanager
def locked(state: Path) -> Iterator[None]:
    """Hold the state directory while the block runs.

    Raises:
        Conflict: another service holds it.
        ServerError: it cannot be made.
    """
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ServerError(f"The state directory {state} cannot be used.", f"{error.strerror}.") from error
    try:
        _lock(descriptor, state)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, state: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Conflict(
            f"Another service uses the state directory {state}.",
            "Two services on one state would overwrite each other.",
            "Stop that one, or name another directory.",
        ) from error


@asynccontextmanager
async def opened(state: Path, base: BaseModel, fleet: Fleet, options: Options | None = None) -> AsyncIterator[Service]:
    """A service over engines that somebody starts; when the block ends they are stopped.

    What is open then stays accepted in the journal: the next service on this state goes on with it.
    """
    journal = Journal(state / "journal.sqlite")
    await journal.open()
    try:
        async with asyncio.TaskGroup() as tasks:
            service = _assembled(state, base, fleet, journal, tasks, options or Options())
            await service.sessions.open()
            await service.checkpoints.open()
            await service.losses.open()
            await service.models.open()
            await service.samplers.open(service.models)
            await take_up(service.journal, service.futures, service.models, service.samples)
            reaping = tasks.create_task(service.reaper.run(), name="reaper")
            try:
                yield service
            finally:
                service.futures.close()
                reaping.cancel()
                service.samples.stop()
                service.threads.close()
                for host in fleet.hosts:
                    await host.stop()  # whatever waits for the engine fails now, and is not settled
    finally:
        await journal.close()


def _assembled(
    state: Path, base: BaseModel, fleet: Fleet, journal: Journal, tasks: asyncio.TaskGroup, options: Options
) -> Service:
    futures, threads = Futures(journal), Threads()
    sessions = Sessions(journal)
    losses = CustomLosses(journal)
    checkpoints = Checkpoints(journal, state, options.limits)
    budget = WeightsBudget.of(base.folder, options.weights_bytes)
    snapshots = Snapshots(fleet, state / "spill", tasks, budget)
    checkpoints.on_removed = snapshots.forget
    adapters = Adapters(fleet, journal, snapshots, losses, state / "points", tasks, budget, replay_s=options.replay_s)
    samplers = Samplers(journal, sessions, checkpoints, snapshots, base)
    training = Training(
        journal=journal,
        adapters=adapters,
        checkpoints=checkpoints,
        sessions=sessions,
        samplers=samplers,
        snapshots=snapshots,
        losses=losses,
        exports=Exports(checkpoints, base),
        refuse_stable_reinforce=options.refuse_stable_reinforce,
    )
    models = Models(journal, futures, tasks, training)
    return Service(
        options=options,
        state=state,
        base=base,
        fleet=fleet,
        journal=journal,
        futures=futures,
        sessions=sessions,
        losses=losses,
        checkpoints=checkpoints,
        snapshots=snapshots,
        adapters=adapters,
        samplers=samplers,
        samples=Samples(
            fleet,
            futures,
            samplers,
            snapshots,
            tasks,
            threads,
            logprobs=options.sample_logprobs,
            limits=options.limits,
        ),
        models=models,
        reaper=Reaper(journal, sessions, models, adapters, samplers, checkpoints, options),
        tokenizer=load_tokenizer(str(base.folder)),
        threads=threads,
    )
