"""Training runs: who owns one, its order of requests, what is known of it.

Owns: every model of this state directory.
Never: executes a training request (`training` does), knows what an engine holds (`adapters` does).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sqlalchemy import update

from halteres.engine.protocol import LoraConfig
from halteres.errors import NotFound, unknown
from halteres.process import steady_time
from halteres.service.durable.futures import Future, Futures
from halteres.service.durable.journal import Journal
from halteres.service.durable.tables import MODELS
from halteres.service.tenancy.tenants import Tenant
from halteres.service.training.lanes import Executor, Lane
from halteres.service.training.residence import Residence
from halteres.service.wire.training import Request


@dataclass(slots=True, kw_only=True, eq=False)
class Model:
    """One training run."""

    id: str
    session_id: str
    tenant: Tenant
    base_model: str  # the name its client knows
    lane: Lane[Job]
    lora: LoraConfig | None = None  # None until it is made
    user_metadata: dict[str, Any] = field(default_factory=dict)
    created_at: float  # unix s
    last_request_at: float  # unix s
    residence: Residence = field(default_factory=Residence)
    stand_in_announced: bool = False  # its client and the log have read that stable_reinforce is ours here


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a training run, ready to be executed in its turn."""

    model: Model
    request: Request
    future: Future


EVERY = 2**63 - 1
"""Above every request's number."""


def model_id_of(session_id: str, seq: int) -> str:
    """The training run id that the SDK computes by itself after a session-addressed load."""
    return f"{session_id}:train:{seq}"


class Models:
    """All training runs of this state directory."""

    def __init__(self, journal: Journal, futures: Futures, tasks: asyncio.TaskGroup, work: Executor[Job]) -> None:
        self._journal, self._futures, self._tasks, self._work = journal, futures, tasks, work
        self._known: dict[str, Model] = {}
        self._of_session: defaultdict[str, list[Model]] = defaultdict(list)

    async def open(self) -> None:
        """Know again those of an earlier life of the service."""
        last, first_open = await self._journal.last_settled(), await self._journal.first_open()
        for row in await self._journal.rows(MODELS):
            lora = msgspec.convert(row.pop("lora"), LoraConfig | None)
            point, settled, covered = (row.pop(name) for name in ("point", "settled", "covered"))
            known = (number for number in (last.get(row["id"]), point, settled) if number is not None)
            next_seq = min(max(known, default=-1) + 1, first_open.get(row["id"], EVERY))
            residence = Residence(point=point, forgotten=covered == EVERY)
            model = Model(
                **row, lora=lora, lane=self._lane(next_seq), last_request_at=steady_time(), residence=residence
            )
            self._enter(model)
        for run, seq in await self._journal.burnt():
            if run in self._known:
                self._known[run].lane.burn(seq)

    def _enter(self, model: Model) -> Model:
        self._known[model.id] = model
        self._of_session[model.session_id].append(model)
        return model

    def _lane(self, next_seq: int = 0) -> Lane[Job]:
        return Lane(self._futures, self._tasks, self._work, next_seq)

    def find(self, model_id: str, tenant: Tenant) -> Model:
        """The training run of this id, asked for now.

        Raises:
            NotFound: the tenant has none of this id; the message names what there is.
        """
        model = self._known.get(model_id)
        if model is None or model.tenant != tenant:
            known = [model.id for model in self.all(tenant)]
            following = "RestClient.list_training_runs tells them all; to train, make a new training client."
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
        self, model_id: str, session_id: str, tenant: Tenant, base_model: str, user_metadata: dict[str, Any]
    ) -> Model:
        """The training run of this id: made now, or the one made before."""
        if model_id not in self._known:
            now = steady_time()
            model = Model(
                id=model_id,
                session_id=session_id,
                tenant=tenant,
                base_model=base_model,
                lane=self._lane(),
                user_metadata=user_metadata,
                created_at=now,
                last_request_at=now,
            )
            await record(self._journal, model)
            if model_id not in self._known:  # a repetition may have been faster
                self._enter(model)
        return self._known[model_id]

    async def burn(self, model_id: str, seq: int, tenant: Tenant) -> None:
        """A request of this model was refused with a 4xx: its client will never fill the gap."""
        model = self._known.get(model_id)
        if model is not None and model.tenant == tenant and not model.lane.holds(seq):
            await self._journal.burn(model_id, seq)
            model.lane.burn(seq)


async def record(journal: Journal, model: Model) -> None:
    """Write down what is known of a training run."""
    facts = ("id", "session_id", "tenant", "base_model", "user_metadata", "created_at")
    values = {name: getattr(model, name) for name in facts}
    point = model.residence.point
    await journal.added(
        MODELS, **values, lora=msgspec.to_builtins(model.lora), point=point, covered=point, settled=model.lane.settled
    )


async def record_point(journal: Journal, model: Model, seq: int | None) -> None:
    """Write down that the newest restore point was taken after the request of this number; or that there is none any
    more, and that no request of the training run is needed."""
    values = {"point": seq, "covered": EVERY if seq is None else seq, "settled": model.lane.settled}
    statement = update(MODELS).where(MODELS.c.id == model.id).values(**values)
    await journal.transact(lambda connection: connection.execute(statement))
