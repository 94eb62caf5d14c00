"""Copies of checkpoints: into a project, or into a training run of a session.

Owns: what a copy is: a checkpoint of its own, of the kind and name of its source, in a training run of its own that
holds no adapter; that a repeated request makes one copy.
Never: copies bytes where the disk can link (files of a checkpoint are never written again).
"""

from __future__ import annotations

import asyncio

from halteres.engine.folders import copy_linked, size_of
from halteres.engine.protocol import Saved
from halteres.errors import Conflict, InvalidData
from halteres.service.base import BaseModel
from halteres.service.checkpoints.lifetimes import checked_ttl
from halteres.service.checkpoints.paths import TinkerPath
from halteres.service.checkpoints.store import Checkpoint, Checkpoints
from halteres.service.checkpoints.unlisted import CARD
from halteres.service.durable.journal import Journal
from halteres.service.sessions import Session, Sessions
from halteres.service.tenancy.tenants import Tenant
from halteres.service.training.models import Model, Models, model_id_of, record
from halteres.service.wire.bodies import CopyWeights


class Copies:
    """Makes copies, one at a time: they are links, and take no time."""

    def __init__(
        self, checkpoints: Checkpoints, sessions: Sessions, models: Models, journal: Journal, base: BaseModel
    ) -> None:
        self._checkpoints, self._sessions, self._models = checkpoints, sessions, models
        self._journal, self._base = journal, base
        self._turn = asyncio.Lock()

    async def copy(self, asked: CopyWeights, tenant: Tenant, key: str | None) -> TinkerPath:
        """Copy weights that the tenant may read; returns the copy's path.

        Args:
            asked: what and where to.
            tenant: who asks, and owns the copy.
            key: the client's idempotency key: a repetition gets the first copy.

        Raises:
            NotFound: no such weights or session.
            InvalidData: no destination, or a time to live that is out of range.
            Conflict: the session's training run of that number is in use.
        """
        async with self._turn:
            made = self._checkpoints.outcome_of(f"copy/{key}", tenant) if key else None
            if made is not None:
                return made.path
            source = self._checkpoints.readable(asked.source_path, tenant)
            checked_ttl(asked.ttl_seconds)
            model = await self._destination(asked, tenant, source)
            return await self._linked(source, model, asked.ttl_seconds, f"copy/{key}" if key else None)

    async def _destination(self, asked: CopyWeights, tenant: Tenant, source: Checkpoint) -> Model:
        """The training run that is made for the copy."""
        if asked.session_id is not None and asked.model_seq_id is not None:
            session, seq = self._sessions.find(asked.session_id, tenant), asked.model_seq_id
        elif asked.destination_project_id is not None:
            session, seq = await self._session_of_project(asked.destination_project_id, tenant), 0
        else:
            raise InvalidData(
                "The copy has no destination.", next="Send destination_project_id, or session_id and model_seq_id."
            )
        model_id = model_id_of(session.id, seq)
        if self._models.of_id(model_id) is not None:
            raise Conflict(f"The training run {model_id} is in use.", next="Send a model_seq_id that is free.")
        told = {"copied_from": str(source.path)}
        base = source.base_model or self._base.name
        model = await self._models.add(model_id, session.id, tenant, base, told)
        model.lora = source.lora
        await record(self._journal, model)
        return model

    async def _session_of_project(self, project_id: str, tenant: Tenant) -> Session:
        session = await self._sessions.create(tenant, {}, ["copy_weights"], project_id)
        self._sessions.finish(session, "success")
        return session

    async def _linked(self, source: Checkpoint, model: Model, ttl_s: int | None, request_id: str | None) -> TinkerPath:
        path = self._checkpoints.place(
            model.id, source.path.kind, source.path.name, tenant=model.tenant, request_id=request_id
        )
        folder = self._checkpoints.folder(path)
        await asyncio.to_thread(copy_linked, source.folder, folder, leave_out=CARD)  # which names the source's path
        saved = Saved(folder=str(folder), size_bytes=size_of(folder), version=source.version)
        await self._checkpoints.add(
            path,
            saved,
            tenant=model.tenant,
            base_model=model.base_model,
            lora=source.lora,
            ttl_s=ttl_s,
            user_metadata=source.user_metadata,
            request_id=request_id,
        )
        return path
