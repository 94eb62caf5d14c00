"""The training service as one value: its parts, opened and closed in order.

STATE/lock               held by flock while a service runs here
STATE/journal.sqlite     accepted requests, sessions, models, samplers, checkpoints
STATE/checkpoints/       named weights
STATE/points/            restore points of training runs
STATE/metrics/           metrics of training runs, a row for each optimiser step
STATE/spill/             unnamed snapshots that had to leave the engine, or go to another one
STATE/id                 names this service's folders where samplers of several services look
STATE/engine.log         the engine's standard error; STATE/sampler-1.log and on, those of engines
                         that only sample
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from halteres.errors import Conflict, HalteresError, NotFound, ServerError, boundary
from halteres.process import steady_time
from halteres.service.base import BaseModel, WeightsBudget
from halteres.service.checkpoints import Checkpoints
from halteres.service.durable.futures import LOST_SAMPLE, UNLOAD_MODEL, Futures, failure, unloaded
from halteres.service.durable.journal import FILE, GATEWAY, SAMPLE, Journal
from halteres.service.execution import Adapters, Training
from halteres.service.fleet import Fleet
from halteres.service.keys import Tenant
from halteres.service.limits import Allowances, Threads
from halteres.service.sampling.samples import Samples, gone
from halteres.service.sampling.sessions import Samplers, sampler_id
from halteres.service.sampling.snapshots import Snapshots
from halteres.service.training_metrics import TrainingMetrics
from halteres.service.training_runs import Job, Models, Session, Sessions
from halteres.service.wire.training import Request
from halteres.tokenizer import Tokenizer, load_tokenizer

# how long a settled request may be asked for again of a journal that has grown too large
FULL_KEEP_S = 60.0
# how long a session that has finished may ask for samples that are not drawn again
FINISHED_KEEP_S = 60.0
# how long a lock that is held is tried again: a reader that asks whether a service runs holds it
# for an instant
LOOKED_AT_S = 0.2
GENERATE = "generate"  # inference answered on its own connection, which ended with the earlier life

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The choices of one service."""

    # of its one user, beside those of its file
    own_key: str | None = field(default=None, repr=False)
    require_keys: bool = False  # also where none was made; beyond the loopback always
    limits: Allowances = Allowances()  # noqa: RUF009 - frozen
    # of sampled tokens: at temperature 1, or at the sampling one
    sample_logprobs: Literal["raw", "tempered"] = "raw"
    strict_context: bool = False  # a max_tokens that does not fit is refused, not shortened
    refuse_stable_reinforce: bool = False  # rather than compute it by a formula of ours
    replay_s: float = 1.0  # engine time after which a restore point is due; 0: after every request
    # name -> server: for best_of
    reward_models: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    # where groups of gateway sessions are posted; None: nowhere
    trajectory_server: str | None = field(default=None, repr=False)
    # for adapters and snapshots in the engine; None: by what memory is free
    weights_bytes: int | None = None
    silent_s: float = 600.0  # without a word from its client: a session's adapters leave the engine
    keep_requests_s: float = 3600.0  # how long a settled request may be asked for again
    journal_bytes: int = 16 * 2**30  # a larger journal keeps settled requests for a minute
    # how long the adapters of a finished or silent session can be brought back
    keep_points_s: float = 24 * 3600.0
    reap_s: float = 30.0  # between two looks at what has ended


class Service:
    """Everything behind the routes; `opened` opens and closes it."""

    def __init__(
        self,
        state: Path,
        base: BaseModel,
        fleet: Fleet,
        journal: Journal,
        tasks: asyncio.TaskGroup,
        options: Options,
    ) -> None:
        self.state, self.base, self.fleet, self.journal, self.options = (
            state,
            base,
            fleet,
            journal,
            options,
        )
        self.tokenizer: Tokenizer = load_tokenizer(str(base.folder))
        self.futures, self.threads = Futures(journal), Threads()
        self.sessions = Sessions(journal)
        budget = WeightsBudget.of(base.folder, options.weights_bytes)
        self.snapshots = Snapshots(fleet, state / "spill", tasks, budget)
        self.checkpoints = Checkpoints(
            journal, state, options.limits, on_removed=self.snapshots.forget
        )
        self.metrics = TrainingMetrics(state, tasks)
        self.adapters = Adapters(
            fleet,
            journal,
            self.snapshots,
            state / "points",
            tasks,
            budget,
            self.metrics,
            replay_s=options.replay_s,
        )
        self.samplers = Samplers(journal, self.sessions, self.checkpoints, self.snapshots, base)
        logprobs, limits = options.sample_logprobs, options.limits
        self.samples = Samples(
            fleet,
            self.futures,
            self.samplers,
            self.snapshots,
            tasks,
            self.threads,
            logprobs=logprobs,
            limits=limits,
        )
        training = Training(
            journal=journal,
            adapters=self.adapters,
            checkpoints=self.checkpoints,
            sessions=self.sessions,
            samplers=self.samplers,
            snapshots=self.snapshots,
            base=base,
            metrics=self.metrics,
            refuse_stable_reinforce=options.refuse_stable_reinforce,
        )
        self.models = Models(journal, self.futures, tasks, training)

    def refuse_session(self, tenant: Tenant) -> None:
        """Raise LimitReached if a tenant has as many sessions as it may have."""
        self.options.limits.of(tenant).check_alive("sessions", len(self._alive(tenant)))

    def refuse_model(self, session: Session, model_id: str, rank: int | None = None) -> None:
        """Raise LimitReached if a tenant has as many training runs as it may have, or none of this
        rank; a repetition of what made one is not refused.
        """
        if self.models.of_id(model_id) is not None:
            return
        limits, alive = self.options.limits.of(session.tenant), self._alive(session.tenant)
        limits.check_alive(
            "models", sum(model.session_id in alive for model in self.models.all(session.tenant))
        )
        if rank is not None:
            limits.check_rank(rank)

    def refuse_sampler(self, session: Session, seq: int) -> None:
        """Raise LimitReached if a tenant has as many sampling sessions as it may have; a repetition
        is not refused.
        """
        of_session = self.samplers.of_session
        if sampler_id(session.id, seq) not in of_session(session.id):
            alive = self._alive(session.tenant) | {session.id}
            limits = self.options.limits.of(session.tenant)
            limits.check_alive("samplers", sum(len(of_session(one)) for one in alive))

    def _alive(self, tenant: Tenant) -> set[str]:
        """The ids of sessions that have not finished, nor fallen silent."""
        oldest = steady_time() - self.options.silent_s
        known = self.sessions.all(tenant)
        return {
            session.id
            for session in known
            if session.finished is None and session.last_seen >= oldest
        }

    async def reap_for_ever(self) -> None:
        """Look again and again for what has ended, until cancelled."""
        while True:
            await asyncio.sleep(self.options.reap_s)
            await self.reap(steady_time())

    async def reap(self, now: float) -> None:
        """One look; what cannot be cleared away now stays until the next."""

        async def forget_requests(now: float) -> None:
            full = await self.journal.used_bytes() > self.options.journal_bytes
            await self.journal.forget(now - (FULL_KEEP_S if full else self.options.keep_requests_s))

        async def drop_results(now: float) -> None:
            limits, instead = self.options.limits, failure(gone())
            await self.journal.drop_results(
                now - FINISHED_KEEP_S, lambda tenant: limits.of(tenant).result_bytes, instead.body
            )

        for clear in (self.checkpoints.expire, self._clear_adapters, forget_requests, drop_results):
            try:
                with boundary(ServerError, "Clearing away"):
                    await clear(now)
            except HalteresError as error:
                log.warning("What has ended could not be cleared away: %s", error)

    async def _clear_adapters(self, now: float) -> None:
        for session in self.sessions.all():
            for model in self.models.of_session(session.id):
                silent_s = now - max(
                    session.finished_at or session.last_seen, model.last_request_at
                )
                # An adapter that leaves now is forgotten in a later look: a client may have been
                # held as we were.
                if model.placement.engine is not None:
                    if session.finished is not None or silent_s > self.options.silent_s:
                        await self.adapters.unload(model)
                elif silent_s > self.options.keep_points_s:
                    await self.adapters.forget(model)
                    await self.samplers.forget(model)

    async def retire(self, session: Session) -> None:
        """The adapters of a session that nothing runs or waits for leave the engine; they come back
        when asked for.
        """
        for model in self.models.of_session(session.id):
            await self.adapters.unload(model)

    async def recover(self) -> None:
        """Go on with every request that an earlier life of the service accepted and did not settle,
        oldest first.
        """
        rows = await self.journal.left_open()
        for row in rows:
            if row.kind == SAMPLE:
                await self.samples.redraw(row)
                continue
            future = self.futures.adopt(row)
            try:
                if row.kind in (GENERATE, GATEWAY):
                    self.futures.settle(future, LOST_SAMPLE)
                elif row.kind == UNLOAD_MODEL:
                    self.futures.settle(future, unloaded(row.subject))
                elif (model := self.models.of_id(row.subject)) is None or row.seq is None:
                    raise NotFound(
                        f"There is no training run '{row.subject}' here.",
                        next="Make a new training client.",
                    )
                else:
                    request = Request.read(
                        row.id, row.kind, row.seq, row.content_type, row.body, row.drawn
                    )
                    model.queue.put(Job(model, request, future))
            except HalteresError as error:
                self.futures.settle(future, failure(error))
        if rows:
            log.info("%d requests that were open are taken up again.", len(rows))


def _is_taken(descriptor: int) -> bool:
    """Whether the lock is ours from now on."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(state: Path) -> Iterator[None]:
    """Hold the state directory while the block runs; Conflict where another service holds it."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ServerError(
            f"The state directory {state} cannot be used.", f"{error.strerror}."
        ) from error
    try:
        ends = time.monotonic() + LOOKED_AT_S
        while not _is_taken(descriptor):
            if time.monotonic() > ends:
                raise Conflict(
                    f"Another service uses the state directory {state}.",
                    "Two services on one state would overwrite each other.",
                    "Stop that one, or name another directory: --state DIR.",
                )
            time.sleep(LOOKED_AT_S / 20)
        yield
    finally:
        os.close(descriptor)


@asynccontextmanager
async def opened(
    state: Path, base: BaseModel, fleet: Fleet, options: Options | None = None
) -> AsyncIterator[Service]:
    """A service over engines that somebody starts; when the block ends they are stopped, and what
    is open stays accepted in the journal: the next service on this state goes on with it.
    """
    journal = Journal(state / FILE)
    await journal.open()
    try:
        async with asyncio.TaskGroup() as tasks:
            service = Service(state, base, fleet, journal, tasks, options or Options())
            await service.sessions.open()
            await service.checkpoints.open()
            await service.models.open()
            await service.metrics.open([model.id for model in service.models.all()])
            await service.samplers.open(service.models)
            await service.recover()
            reaping = tasks.create_task(service.reap_for_ever(), name="reaper")
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
