"""Sampling sessions, and the policy that each run samples from."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace

from sqlalchemy import delete, update

from halteres.config.settings import MOST_PINNED
from halteres.errors import InvalidData, NotFound, NotReady, shortened
from halteres.service.base import BaseModel
from halteres.service.checkpoints import Checkpoints
from halteres.service.durable.journal import SAMPLERS, Journal
from halteres.service.keys import Tenant
from halteres.service.sampling.snapshots import Snapshot, SnapshotLost, Snapshots
from halteres.service.training_runs import Model, Models, Session, Sessions

KEPT_VERSIONS = MOST_PINNED + 1  # weights of a run that can be asked for by their policy version


@dataclass(slots=True)
class Target:
    """The weights that a sampling session means: fixed, or the newest in flight, which all its kind
    share.
    """

    snapshot: Snapshot | None  # None: the base model


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A sampling session."""

    id: str
    session_id: str
    tenant: Tenant
    base_model: str  # the name its client knows
    model_path: str | None = None
    target: Target
    lost: bool = False  # its weights were deleted

    @property
    def snapshot(self) -> Snapshot | None:
        """The weights that a request means which comes now; None is the base model."""
        return self.target.snapshot

    @property
    def weights(self) -> int | None:
        """Of unnamed weights: the number of the request that published those a request means which
        comes now.
        """
        return self.target.snapshot.seq if self.target.snapshot is not None else None


def sampler_id(session_id: str, seq: int) -> str:
    """The id of a session's sampling session number `seq`."""
    return f"{session_id}:sample:{seq}"


class Samplers:
    """All sampling sessions, and the policies of runs."""

    def __init__(
        self,
        journal: Journal,
        sessions: Sessions,
        checkpoints: Checkpoints,
        snapshots: Snapshots,
        base: BaseModel,
    ) -> None:
        self._journal, self._sessions, self._base = journal, sessions, base
        self._checkpoints, self._snapshots = checkpoints, snapshots
        self._known: dict[str, Sampler] = {}
        self._of_session: dict[str, dict[str, None]] = {}  # their ids, by session; the oldest first
        self._policies: dict[tuple[Tenant, str], Snapshot] = {}
        # the newest KEPT_VERSIONS of each run
        self._versions: dict[tuple[Tenant, str], dict[int, Snapshot]] = {}
        self._inflight: dict[str, Target] = {}  # by training run

    async def open(self, models: Models) -> None:
        """Know again those of an earlier life of the service."""
        for session in self._sessions.all():
            found = self._checkpoints.newest_of_session(session.id, "sampler_weights")
            if found is not None:
                self.published(session, self._snapshots.of(found))
        for row in await self._journal.rows(SAMPLERS):
            target, lost, path = Target(None), False, row["model_path"]
            if (model := models.of_id(row["model_id"] or "")) is not None:
                snapshot = self._snapshots.unnamed(
                    model, row["seq"], row["snapshot"], row["version"]
                )
                session = self._sessions.of_model(model.session_id)
                self._remember(session, snapshot)
                newest = self._policies.get((session.tenant, session.run or ""))
                if session.run and snapshot.version >= (newest.version if newest else 0):
                    self.published(session, snapshot)
                target = self._target(snapshot, inflight=row["inflight"])
            elif path:
                with suppress(NotFound):
                    found = self._checkpoints.find(path, row["tenant"])
                    if found.created_at <= row["created_at"]:  # else the path was used again
                        target = Target(self._snapshots.of(found))
                lost = target.snapshot is None
            facts = {
                name: row[name]
                for name in ("id", "session_id", "tenant", "base_model", "model_path")
            }
            self._enter(Sampler(**facts, target=target, lost=lost))
        await self._snapshots.sweep()

    def _target(self, snapshot: Snapshot, *, inflight: bool) -> Target:
        if not inflight or snapshot.model is None:
            return Target(snapshot)
        shared = self._inflight.setdefault(snapshot.model.id, Target(snapshot))
        shared.snapshot = snapshot
        return shared

    async def create(
        self, session: Session, seq: int, base_model: str | None, model_path: str | None
    ) -> Sampler:
        """The sampling session of this number: made now, or the one made before."""
        name = sampler_id(session.id, seq)
        if name in self._known:
            return self._known[name]
        if model_path is None and base_model is None:
            raise InvalidData(
                "The sampling session names no weights.", next="Send model_path or base_model."
            )
        found = (
            self._snapshots.of(self._checkpoints.find(model_path, session.tenant))
            if model_path
            else None
        )
        base = self._base.check(
            base_model or (found.base_model if found else None) or self._base.name
        )
        return await self._record(session, seq, base, Target(found), path=model_path)

    async def add_unnamed(
        self, session: Session, seq: int, snapshot: Snapshot, *, inflight: bool
    ) -> Sampler:
        """The sampling session of weights that were published without a name."""
        target = self._target(snapshot, inflight=inflight)
        return await self._record(session, seq, snapshot.base_model, target, inflight=inflight)

    async def _record(
        self,
        session: Session,
        seq: int,
        base: str,
        target: Target,
        *,
        path: str | None = None,
        inflight: bool = False,
    ) -> Sampler:
        sampler = Sampler(
            id=sampler_id(session.id, seq),
            session_id=session.id,
            tenant=session.tenant,
            base_model=base,
            model_path=path,
            target=target,
        )
        unnamed = target.snapshot if path is None else None
        await self._journal.put(
            SAMPLERS,
            sampler,
            model_id=unnamed.model.id if unnamed and unnamed.model else None,
            seq=unnamed and unnamed.seq,
            snapshot=unnamed and unnamed.name,
            version=unnamed and unnamed.version,
            inflight=inflight,
            created_at=time.time(),
        )
        return self._enter(sampler)

    def _enter(self, sampler: Sampler) -> Sampler:
        self._known[sampler.id] = sampler
        self._of_session.setdefault(sampler.session_id, {})[sampler.id] = None
        return sampler

    def at(self, sampler: Sampler, weights: int | None) -> Snapshot | None:
        """The weights that a request meant which came earlier, by `Sampler.weights` of that time;
        SnapshotLost where they were deleted.
        """
        if sampler.lost:
            raise SnapshotLost(
                f"The weights of sampling session {sampler.id} are gone.",
                f"{sampler.model_path} was deleted or replaced.",
                "Make a new sampling client.",
            )
        now = sampler.snapshot
        if weights is None or now is None or now.model is None or now.seq == weights:
            return now
        return self._snapshots.published_with(now.model, weights)

    async def forget(self, model: Model) -> None:
        """Remove the sampling sessions of a training run's unnamed weights, which nobody has used
        for long.
        """
        await self._snapshots.forget_unnamed(model)
        gone = [
            one.id
            for one in self._known.values()
            if one.snapshot is not None and one.snapshot.model is model
        ]
        if gone:
            await self._journal.change(delete(SAMPLERS).where(SAMPLERS.c.model_id == model.id))
        for sampler in gone:
            del self._of_session[self._known.pop(sampler).session_id][sampler]

    async def rename(self, path: str, to: str) -> None:
        """Named weights got another path: the sampling sessions that mean them mean that one, also
        after a restart.
        """
        await self._journal.change(
            update(SAMPLERS).where(SAMPLERS.c.model_path == path).values(model_path=to)
        )
        for sampler in [one for one in self._known.values() if one.model_path == path]:
            self._known[sampler.id] = replace(sampler, model_path=to)

    def find(self, sampler: str, tenant: Tenant) -> Sampler:
        """The sampling session of this id."""
        found = self._known.get(sampler)
        if found is None or found.tenant != tenant:
            what = f"There is no sampling session '{shortened(sampler)}' here."
            raise NotFound(what, next="Make a new sampling client.")
        return found

    def of_session(self, session_id: str) -> Collection[str]:
        """The ids of a session's sampling sessions, oldest first."""
        return self._of_session.get(session_id, {})

    # The policies of runs

    def published(self, session: Session, snapshot: Snapshot) -> None:
        """These are now the newest weights of the session's run."""
        if session.run:
            self._policies[session.tenant, session.run] = snapshot
        self._remember(session, snapshot)

    def _remember(self, session: Session, snapshot: Snapshot) -> None:
        """These weights can be named by their version: a deterministic run samples by older ones
        than the newest. It counts optimiser steps: weights that are published again unchanged have
        the same one.
        """
        if session.run:
            versions = self._versions.setdefault((session.tenant, session.run), {})
            versions[snapshot.version] = snapshot
            while len(versions) > KEPT_VERSIONS:
                del versions[min(versions)]

    def policy(self, run: str, tenant: Tenant, version: int | None = None) -> Snapshot:
        """The newest snapshot of a run, or that of a version; NotReady where it was not published
        yet, SnapshotLost where it was, and many newer ones took its place.
        """
        if (snapshot := self._policies.get((tenant, run))) is None:
            raise NotReady(
                f"The run '{shortened(run)}' has no weights to sample from.",
                "Its trainer has published none to this service yet, or there is no run of this "
                "name.",
                "Ask again in a moment; its session names it in user_metadata.halteres_run and "
                "saves sampler weights.",
            )
        if version is None:
            return snapshot
        versions = self._versions[tenant, run]
        if version in versions:
            return versions[version]
        what = (
            f"The run '{shortened(run)}' has no weights of policy version {version} to sample from."
        )
        if version > snapshot.version:
            raise NotReady(what, f"Its newest is {snapshot.version}.", "Ask again in a moment.")
        why = f"The newest {KEPT_VERSIONS} are kept, up to {snapshot.version}."
        raise SnapshotLost(what, why, "Ask for one of them.")

    def versions(self, tenant: Tenant) -> dict[str, int]:
        """The policy version of every run of a tenant."""
        return {
            run: snapshot.version
            for (owner, run), snapshot in self._policies.items()
            if owner == tenant
        }
