"""Sessions and their training runs: who owns one, where its adapter is, and the order of its
requests.

put(7) put(8)      gap at 6: both wait
put(6)             6, 7, 8 run, one after the other
burn(9) put(10)    9 was refused with a 4xx: 10 runs
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import msgspec
from sqlalchemy import update

from halteres.engine.protocol import LoraConfig, Trains
from halteres.errors import (
    HalteresError,
    InvalidData,
    NotFound,
    NotReady,
    ServerError,
    boundary,
    shortened,
    unknown,
)
from halteres.process import steady_time
from halteres.service.durable.futures import Future, Futures, Outcome, Place, failure, outcome_of
from halteres.service.durable.journal import BURNT, MODELS, SESSIONS, Journal
from halteres.service.keys import Tenant
from halteres.service.wire.training import Request

log = logging.getLogger(__name__)


RUN_KEY = "halteres_run"


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One client."""

    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    tenant: Tenant
    tags: list[str]
    user_metadata: dict[str, Any]
    project_id: str | None = None
    display_name: str | None = None
    created_at: float = field(default_factory=steady_time)  # unix s
    # unix s; nobody can be heard while no service runs
    last_seen: float = field(default_factory=steady_time)
    finished: str | None = None  # success, errored or interrupted
    finished_at: float | None = None  # unix s

    @property
    def run(self) -> str | None:
        """The run whose trainer this is."""
        run = self.user_metadata.get(RUN_KEY)
        return run if isinstance(run, str) else None


class Sessions:
    """All sessions of this state directory."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._known: dict[str, Session] = {}

    async def open(self) -> None:
        """Know again those of an earlier life of the service."""
        for row in await self._journal.rows(SESSIONS):
            self._known[row["id"]] = Session(**row)

    async def add(self, session: Session) -> None:
        """Record a new session."""
        await self._journal.put(SESSIONS, session)
        self._known[session.id] = session

    def find(self, session_id: str, tenant: Tenant) -> Session:
        """The session of this id, seen now."""
        session = self._known.get(session_id)
        if session is None or session.tenant != tenant:
            raise NotFound(
                f"There is no session '{shortened(session_id)}' here.",
                next="Make a new ServiceClient.",
            )
        session.last_seen = steady_time()
        return session

    def of_model(self, session_id: str) -> Session:
        """The session of a training run or sampler that was found for its owner; it is not seen by
        this.
        """
        return self._known[session_id]

    def finish(self, session: Session, reason: str) -> None:
        """The client is done; the first reason stays."""
        if session.finished is None:
            session.finished, session.finished_at = reason, steady_time()
            self._update(session, finished=reason, finished_at=session.finished_at)

    def move(self, session: Session, project_id: str) -> None:
        """Into another project."""
        session.project_id = project_id
        self._update(session, project_id=project_id)

    def all(self, tenant: Tenant | None = None) -> list[Session]:
        """The sessions of a tenant, or every one; oldest first."""
        return [session for session in self._known.values() if tenant in (None, session.tenant)]

    def _update(self, session: Session, **values: Any) -> None:
        statement = update(SESSIONS).where(SESSIONS.c.id == session.id).values(**values)
        self._journal.post(lambda connection: connection.execute(statement))


MAX_WAITING = 4096  # requests of one model that may wait for an earlier one

GAP_S = 900.0
"""How long requests wait for one before them that does not arrive: the SDK gives up sending it long
before.
"""

EVERY_SEQ = 2**63 - 1  # above every request's number

NEW_CLIENT = "Make a new training client, from a checkpoint if there is one."


@dataclass(slots=True, kw_only=True, eq=False)
class Placement:
    """Where a training run's adapter is, and from what it would come back; `service.execution`
    changes it.
    """

    engine: Trains | None = None  # the engine that holds it
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # of whoever uses it
    point: int | None = None  # number of the request after which the newest restore point was taken
    work_s: float = 0.0  # engine time since then: what bringing it back would take
    point_s: float = 0.0  # what the last restore point took
    gradient: bool = False  # one waits for its step, so that no restore point can be taken
    forgotten: bool = False  # it ended long ago: restore point and requests are gone
    is_exact: bool = True  # what the engine computed for it last would be the same another time


@dataclass(slots=True, kw_only=True, eq=False)
class Model:
    """One training run."""

    id: str
    session_id: str
    tenant: Tenant
    base_model: str  # the name its client knows
    queue: RequestQueue
    lora: LoraConfig | None = None  # None until it is made
    user_metadata: dict[str, Any] = field(default_factory=dict)
    created_at: float = field(default_factory=steady_time)  # unix s
    last_request_at: float = field(default_factory=steady_time)  # unix s
    placement: Placement = field(default_factory=Placement)
    # its client and the log have read that stable_reinforce is ours here
    stand_in_announced: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a training run, ready to be executed in its turn."""

    model: Model
    request: Request
    future: Future


class Executor(Protocol):
    """Who does the work of a queue: `service.execution`, which is above this module."""

    async def execute(self, job: Job) -> Outcome:
        """What the future is settled with."""
        ...

    async def afterwards(self, job: Job) -> None:
        """What may follow before the next job begins."""


class RequestQueue:
    """One model's requests, by sequence number."""

    def __init__(
        self, futures: Futures, tasks: asyncio.TaskGroup, work: Executor, next_seq: int = 0
    ) -> None:
        self._futures, self._tasks, self._work = futures, tasks, work
        self._next = next_seq
        self._waiting: dict[int, Job] = {}
        self._burnt: set[int] = set()
        self._running = False
        self._gap: asyncio.TimerHandle | None = None  # until those that wait are given up

    def put(self, job: Job) -> None:
        """Execute the job once every earlier number was executed or burnt."""
        seq = job.request.seq
        if seq < self._next or seq in self._burnt:
            what, why = (
                f"Request {seq} of this model comes too late.",
                f"request {self._next} is next.",
            )
            self._refuse(
                job, InvalidData(what, f"It was refused or lost before, and {why}", NEW_CLIENT)
            )
            return
        self._waiting[seq] = job
        job.future.place = partial(self._place, seq)
        self._go_on()
        self._mind_the_gap()

    def burn(self, seq: int) -> None:
        """This number will never be put: its request was refused. A number that was put already is
        none.
        """
        if seq >= self._next and not self.holds(seq):
            self._burnt.add(seq)
            self._go_on()

    def holds(self, seq: int) -> bool:
        """A request of this number runs or waits."""
        return seq in self._waiting or (self._running and seq == self._next)

    @property
    def settled(self) -> int:
        """The highest number below which every one is settled or burnt; -1 where none is."""
        return self._next - 1

    @property
    def idle(self) -> bool:
        """Nothing of this model runs or waits."""
        return not self._running and not self._waiting

    def refuse_if_full(self, seq: int) -> None:
        """Raise NotReady rather than hold more requests than a client can mean; the one they wait
        for is let in.
        """
        if len(self._waiting) >= MAX_WAITING and seq != self._next and not self.holds(seq):
            raise NotReady(
                f"{len(self._waiting)} requests of this model wait.",
                f"Request {self._next} has not arrived, and they come after it.",
                "Send it, or make a new training client.",
            )

    def _refuse(self, job: Job, error: HalteresError) -> None:
        self._futures.settle(job.future, replace(failure(error), state="refused"))

    def _place(self, seq: int) -> Place:
        if not self._running:
            return Place(
                f"request {self._next} of this model comes first, and has not arrived", stuck=True
            )
        return Place(
            "it is being executed"
            if seq == self._next
            else f"request {self._next} of this model is executed first"
        )

    def _go_on(self) -> None:
        self._skip_burnt()
        if not self._running and self._next in self._waiting:
            self._running = True
            self._tasks.create_task(self._drain(), name="training requests")

    def _skip_burnt(self) -> None:
        while self._next in self._burnt:
            self._burnt.discard(self._next)
            self._next += 1

    async def _drain(self) -> None:
        try:
            while (
                not self._futures.closing
                and (job := self._waiting.pop(self._next, None)) is not None
            ):
                self._futures.settle(
                    job.future, await outcome_of(job.future, self._work.execute(job))
                )
                try:
                    with boundary(ServerError, "What follows a request"):
                        await self._work.afterwards(job)
                except HalteresError as error:
                    # it has no future to fail, and must not stop the queue
                    log.error("After request %s: %s", job.future.request_id, error)
                self._next += 1
                self._skip_burnt()
        finally:
            self._running = False
            self._mind_the_gap()

    def _mind_the_gap(self) -> None:
        """Requests wait for one that has not arrived: not for ever."""
        missing = bool(self._waiting) and not self._running
        if missing and self._gap is None:
            self._gap = asyncio.get_running_loop().call_later(GAP_S, self._give_up, self._next)
        elif not missing and self._gap is not None:
            self._gap.cancel()
            self._gap = None

    def _give_up(self, missing: int) -> None:
        self._gap = None
        if self._running or self._next != missing:
            self._mind_the_gap()
            return
        log.warning(
            "Request %d of a training run did not arrive in %g s; %d fail.",
            missing,
            GAP_S,
            len(self._waiting),
        )
        jobs, self._waiting = self._waiting, {}
        self._next = max(jobs) + 1
        what = f"Request {missing} of this model never arrived, and this one comes after it."
        why = (
            "Its client gave its number away and did not send it: an error was raised there before."
        )
        for job in jobs.values():
            self._refuse(job, InvalidData(what, why, NEW_CLIENT))


def model_id_of(session_id: str, seq: int) -> str:
    """The training run id that the SDK computes by itself after a session-addressed load."""
    return f"{session_id}:train:{seq}"


class Models:
    """All training runs of this state directory."""

    def __init__(
        self, journal: Journal, futures: Futures, tasks: asyncio.TaskGroup, work: Executor
    ) -> None:
        self._journal, self._futures, self._tasks, self._work = journal, futures, tasks, work
        self._known: dict[str, Model] = {}
        self._of_session: defaultdict[str, list[Model]] = defaultdict(list)

    async def open(self) -> None:
        """Know again those of an earlier life of the service."""
        last, first_open, burnt = await self._journal.positions()
        for row in await self._journal.rows(MODELS):
            lora = msgspec.convert(row.pop("lora"), LoraConfig | None)
            point, settled, covered = (row.pop(name) for name in ("point", "settled", "covered"))
            known = (
                number for number in (last.get(row["id"]), point, settled) if number is not None
            )
            next_seq = min(max(known, default=-1) + 1, first_open.get(row["id"], EVERY_SEQ))
            queue = RequestQueue(self._futures, self._tasks, self._work, next_seq)
            placement = Placement(point=point, forgotten=covered == EVERY_SEQ)
            self._enter(Model(**row, lora=lora, queue=queue, placement=placement))
        for run, seq in burnt:
            if run in self._known:
                self._known[run].queue.burn(seq)

    def _enter(self, model: Model) -> None:
        self._known[model.id] = model
        self._of_session[model.session_id].append(model)

    def find(self, model_id: str, tenant: Tenant) -> Model:
        """The training run of this id, asked for now."""
        model = self._known.get(model_id)
        if model is None or model.tenant != tenant:
            known = [model.id for model in self.all(tenant)]
            following = (
                "RestClient.list_training_runs tells them all; to train, make a new "
                "training client."
            )
            raise unknown(NotFound, "training run", model_id, known, following)
        model.last_request_at = steady_time()
        return model

    def of_id(self, model_id: str) -> Model | None:
        """The training run of this id, whoever owns it."""
        return self._known.get(model_id)

    def all(self, tenant: Tenant | None = None) -> list[Model]:
        """The training runs of a tenant, or every one; oldest first."""
        return [model for model in self._known.values() if tenant in (None, model.tenant)]

    def of_session(self, session_id: str) -> list[Model]:
        """The training runs of a session."""
        return self._of_session.get(session_id, [])

    async def add(
        self,
        model_id: str,
        session_id: str,
        tenant: Tenant,
        base_model: str,
        user_metadata: dict[str, Any],
    ) -> Model:
        """The training run of this id: made now, or the one made before."""
        if model_id not in self._known:
            queue = RequestQueue(self._futures, self._tasks, self._work)
            model = Model(
                id=model_id,
                session_id=session_id,
                tenant=tenant,
                base_model=base_model,
                queue=queue,
                user_metadata=user_metadata,
            )
            await record(self._journal, model)
            if model_id not in self._known:  # a repetition may have been faster
                self._enter(model)
        return self._known[model_id]

    async def burn(self, model_id: str, seq: int, tenant: Tenant) -> None:
        """A request of this model was refused with a 4xx: its client will never fill the gap."""
        model = self._known.get(model_id)
        if model is not None and model.tenant == tenant and not model.queue.holds(seq):
            await self._journal.put(BURNT, model_id=model_id, seq=seq)
            model.queue.burn(seq)


async def record(journal: Journal, model: Model) -> None:
    """Write down what is known of a training run."""
    point, lora = model.placement.point, msgspec.to_builtins(model.lora)
    await journal.put(
        MODELS, model, lora=lora, point=point, covered=point, settled=model.queue.settled
    )


async def record_point(journal: Journal, model: Model, seq: int | None) -> None:
    """Write down that the newest restore point was taken after the request of this number; or that
    there is none any more, and that no request of the training run is needed.
    """
    values = {
        "point": seq,
        "covered": EVERY_SEQ if seq is None else seq,
        "settled": model.queue.settled,
    }
    await journal.change(update(MODELS).where(MODELS.c.id == model.id).values(**values))
