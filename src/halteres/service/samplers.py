"""Sampling sessions, and the policy that each run samples from.

Owns: sampling session ids and the snapshot behind each; the newest snapshot of every run.
Never: samples.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from halteres.errors import InvalidData, NotFound, NotReady
from halteres.service.base import BaseModel
from halteres.service.checkpoints import Checkpoints
from halteres.service.journal import Journal
from halteres.service.sessions import Session, Sessions
from halteres.service.snapshots import Snapshot, SnapshotLost, Snapshots
from halteres.service.tables import SAMPLERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A sampling session."""

    id: str
    base_model: str  # the name its client knows
    model_path: str | None
    snapshot: Snapshot | None  # None: the base model, unless it is lost
    lost: bool = False  # it was ephemeral, in an earlier life of the service


def sampler_id(session_id: str, seq: int) -> str:
    """The id of a session's sampling session number `seq`."""
    return f"{session_id}:sample:{seq}"


class Samplers:
    """All sampling sessions, and the policies of runs."""

    def __init__(
        self, journal: Journal, sessions: Sessions, checkpoints: Checkpoints, snapshots: Snapshots, base: BaseModel
    ) -> None:
        self._journal, self._sessions, self._base = journal, sessions, base
        self._checkpoints, self._snapshots = checkpoints, snapshots
        self._known: dict[str, Sampler] = {}
        self._policies: dict[str, Snapshot] = {}

    async def open(self) -> None:
        """Know again those of an earlier life of the service."""
        for row in await self._journal.rows(SAMPLERS):
            self._known[row["id"]] = self._again(row["id"], row["base_model"], row["model_path"], row["ephemeral"])
        for session in self._sessions.all():
            found = self._checkpoints.newest_of_session(session.id, "sampler_weights")
            if session.run and found:
                self._policies[session.run] = self._snapshots.of(found)

    def _again(self, sampler: str, base_model: str, model_path: str | None, ephemeral: bool) -> Sampler:
        snapshot, lost = None, ephemeral
        if model_path is not None:
            try:
                snapshot = self._snapshots.of(self._checkpoints.find(model_path))
            except NotFound:
                lost = True
        return Sampler(id=sampler, base_model=base_model, model_path=model_path, snapshot=snapshot, lost=lost)

    async def create(self, session_id: str, seq: int, base_model: str | None, model_path: str | None) -> Sampler:
        """The sampling session of this number: made now, or the one made before.

        Raises:
            NotFound: no such base model or weights.
        """
        name = sampler_id(session_id, seq)
        if name in self._known:
            return self._known[name]
        if model_path is None and base_model is None:
            raise InvalidData("The sampling session names no weights.", next="Send model_path or base_model.")
        snapshot = self._snapshots.of(self._checkpoints.find(model_path)) if model_path else None
        asked = base_model or (snapshot.base_model if snapshot else None) or self._base.name
        sampler = Sampler(id=name, base_model=self._base.check(asked), model_path=model_path, snapshot=snapshot)
        await self._record(sampler, session_id)
        return sampler

    async def add_ephemeral(self, session_id: str, seq: int, snapshot: Snapshot) -> Sampler:
        """The sampling session of weights that were published without a name."""
        sampler = Sampler(
            id=sampler_id(session_id, seq), base_model=snapshot.base_model, model_path=None, snapshot=snapshot
        )
        await self._record(sampler, session_id)
        return sampler

    async def _record(self, sampler: Sampler, session_id: str) -> None:
        await self._journal.added(
            SAMPLERS,
            id=sampler.id,
            session_id=session_id,
            base_model=sampler.base_model,
            model_path=sampler.model_path,
            ephemeral=sampler.snapshot is not None and sampler.model_path is None,
            created_at=time.time(),
        )
        self._known[sampler.id] = sampler

    def find(self, sampler: str) -> Sampler:
        """The sampling session of this id.

        Raises:
            NotFound: there is none here.
        """
        if (found := self._known.get(sampler)) is None:
            raise NotFound(f"There is no sampling session '{sampler}' here.", next="Make a new sampling client.")
        return found

    def of_session(self, session_id: str) -> list[str]:
        """The ids of a session's sampling sessions."""
        return [sampler for sampler in self._known if sampler.startswith(f"{session_id}:")]

    def published(self, session: Session, snapshot: Snapshot) -> None:
        """These are now the newest weights of the session's run."""
        if session.run:
            self._policies[session.run] = snapshot

    def policy(self, run: str) -> Snapshot:
        """The newest snapshot of a run.

        Raises:
            NotReady: nothing was published yet.
        """
        if (snapshot := self._policies.get(run)) is None:
            raise NotReady(
                f"The run '{run}' has no weights to sample from yet.",
                "Its trainer has published none to this service.",
                "Ask again in a moment; its session names it in user_metadata.halteres_run and saves sampler weights.",
            )
        return snapshot

    def versions(self) -> dict[str, int]:
        """The policy version of every run."""
        return {run: snapshot.version for run, snapshot in self._policies.items()}


def refuse_lost(sampler: Sampler) -> None:
    """Raise SnapshotLost for a sampling session whose weights died with an earlier life of the service."""
    if sampler.lost:
        raise SnapshotLost(
            f"The weights of sampling session {sampler.id} are gone.",
            "They had no name, and the service was restarted.",
            "Make a new sampling client; save_weights_for_sampler(name) keeps weights on disk.",
        )
