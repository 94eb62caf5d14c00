"""Training runs: a trained adapter, its order of requests, and where it lives.

Owns: every model of this state directory; that a model whose engine is gone or whose session has finished says so,
with the newest checkpoint's name.
Never: executes a training request (`training` does).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from halteres.engine.protocol import Engine, LoraConfig
from halteres.errors import NotFound, NotReady, ServerError, unknown
from halteres.service.checkpoints import Checkpoints
from halteres.service.host import Host
from halteres.service.journal import Journal
from halteres.service.lanes import Lane
from halteres.service.promises import Promises
from halteres.service.tables import MODELS


class AdapterLost(ServerError):
    """An adapter that lived only in an engine that is gone."""

    code = "adapter_lost"


@dataclass(slots=True, kw_only=True, eq=False)
class Model:
    """One training run."""

    id: str
    session_id: str
    base_model: str  # the name its client knows
    lane: Lane
    lora: LoraConfig | None = None  # None until it is loaded from a checkpoint
    user_metadata: dict[str, Any] = field(default_factory=dict)
    home: Engine | None = None  # the engine that holds its adapter
    retired: bool = False  # its session finished, and its adapter left the engine
    last_request_at: float = 0.0  # unix s


def model_id_of(session_id: str, seq: int) -> str:
    """The training run id that the SDK computes by itself after a session-addressed load."""
    return f"{session_id}:train:{seq}"


class Models:
    """All training runs of this state directory."""

    def __init__(self, journal: Journal, promises: Promises, host: Host, checkpoints: Checkpoints, tasks: Any) -> None:
        self._journal, self._promises, self._tasks = journal, promises, tasks
        self._host, self._checkpoints = host, checkpoints
        self._known: dict[str, Model] = {}

    async def open(self) -> None:
        """Know again those of an earlier life of the service; their adapters are gone."""
        last = await self._journal.last_seqs()
        for row in await self._journal.rows(MODELS):
            self._known[row["id"]] = Model(
                id=row["id"],
                session_id=row["session_id"],
                base_model=row["base_model"],
                lane=Lane(self._promises, self._tasks, last.get(row["id"], 0) + 1),
                lora=msgspec.convert(row["lora"], LoraConfig | None),
                user_metadata=row["user_metadata"],
                last_request_at=row["created_at"],
            )

    def find(self, model_id: str) -> Model:
        """The training run of this id, asked for now.

        Raises:
            NotFound: there is none here.
        """
        if (model := self._known.get(model_id)) is None:
            raise unknown(NotFound, "training run", model_id, self._known, "Make a new training client.")
        model.last_request_at = time.time()
        return model

    def all(self) -> list[Model]:
        """Every training run, oldest first."""
        return list(self._known.values())

    def of_session(self, session_id: str) -> list[Model]:
        """The training runs of a session."""
        return [model for model in self._known.values() if model.session_id == session_id]

    async def add(self, model_id: str, session_id: str, base_model: str, user_metadata: dict[str, Any]) -> Model:
        """The training run of this id: made now, or the one made before."""
        if model_id not in self._known:
            model = Model(
                id=model_id,
                session_id=session_id,
                base_model=base_model,
                lane=Lane(self._promises, self._tasks),
                user_metadata=user_metadata,
                last_request_at=time.time(),
            )
            self._known[model_id] = model
            await self.record(model)
        return self._known[model_id]

    async def record(self, model: Model) -> None:
        """Write down what is known of it."""
        await self._journal.added(
            MODELS,
            id=model.id,
            session_id=model.session_id,
            base_model=model.base_model,
            lora=msgspec.to_builtins(model.lora),
            user_metadata=model.user_metadata,
            created_at=model.last_request_at,
        )

    async def burn(self, model_id: str, seq: int) -> None:
        """A request of this model was refused with a 4xx: its client will never fill the gap."""
        if model_id in self._known:
            await self._journal.burn(model_id, seq)
            self._known[model_id].lane.burn(seq)

    async def retire(self, session_id: str) -> None:
        """The session finished: adapters that nothing runs or waits for leave the engine; what was saved stays."""
        for model in self.of_session(session_id):
            if model.home is not None and model.lane.idle:
                home, model.home, model.retired = model.home, None, True
                with suppress(NotReady):  # that engine is gone, and the adapter with it
                    await home.drop(model.id)

    @contextmanager
    def at_home(self, model: Model) -> Iterator[Engine]:
        """The engine that holds the adapter.

        Raises:
            AdapterLost: that engine is gone, or goes while the block runs.
        """
        if model.home is None or model.home is not self._host.engine:
            raise self._lost(model)
        try:
            yield model.home
        except NotReady as error:
            raise self._lost(model) from error

    def _lost(self, model: Model) -> AdapterLost:
        newest = self._checkpoints.newest(model.id)
        remedy = (
            f"Resume with create_training_client_from_state_with_optimizer('{newest.path}')."
            if newest
            else "No state of it was saved: make a new training client, and call save_state from time to time."
        )
        return AdapterLost(f"The adapter of training run {model.id} is gone.", self._why_lost(model), remedy)

    def _why_lost(self, model: Model) -> str:
        if model.retired:
            return "Its session has finished."
        failure = self._host.failure
        return (
            f"It lived in an engine that stopped{f': {failure.what}' if failure else ', with the service that ran it.'}"
        )
