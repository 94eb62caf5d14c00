"""Snapshots: immutable weights for sampling, in the engine or on disk.

Owns: which snapshots the engine holds, loading those that have a folder when they are asked for, a bound on how many
are held (the ones unused for longest leave; those without a folder are written to one first).
Never: changes weights; removes one that is being sampled from.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass, field
from pathlib import Path

from halteres.engine.protocol import Engine
from halteres.errors import HalteresError, ServerError
from halteres.service.checkpoints import Checkpoint
from halteres.service.host import Host

MAX_HELD = 16
"""Snapshots in the engine at a time."""

MAX_SPILLED = 32
"""Unnamed snapshots on disk at a time; a trainer makes one with every step and seldom comes back to an old one."""

log = logging.getLogger(__name__)


class SnapshotLost(ServerError):
    """Weights that lived only in an engine that is gone."""

    code = "snapshot_lost"


@dataclass(slots=True, kw_only=True, eq=False)
class Snapshot:
    """Weights to sample from."""

    version: int  # policy version
    base_model: str
    name: str = field(default_factory=lambda: f"snapshot-{uuid.uuid4().hex}")  # in the engine
    path: str | None = None  # tinker:// path, of named ones
    folder: Path | None = None  # where it can be loaded from again
    home: Engine | None = None  # the engine that holds it
    users: int = 0  # sampling requests under way
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # of whoever loads or removes it


class Snapshots:
    """What the engine holds, and what it can load."""

    def __init__(self, host: Host, spill: Path, tasks: asyncio.TaskGroup, *, max_held: int = MAX_HELD) -> None:
        self._host, self._spill, self._tasks, self._max_held = host, spill, tasks, max_held
        self._held: OrderedDict[str, Snapshot] = OrderedDict()  # by name, unused for longest first
        self._named: dict[str, Snapshot] = {}  # by tinker:// path
        self._spilled: deque[Snapshot] = deque()  # oldest first
        shutil.rmtree(spill, ignore_errors=True)  # of an earlier life: nobody can name them any more

    async def publish(self, home: Engine, adapter: str, base_model: str) -> Snapshot:
        """Copy an adapter's weights."""
        snapshot = Snapshot(version=0, base_model=base_model, home=home)
        snapshot.version = await home.snapshot(adapter, snapshot.name)
        self._hold(snapshot)
        return snapshot

    def name(self, snapshot: Snapshot, path: str, folder: Path) -> None:
        """The snapshot was saved there."""
        snapshot.path, snapshot.folder = path, folder
        self._named[path] = snapshot

    def of(self, checkpoint: Checkpoint) -> Snapshot:
        """The snapshot of named weights; it is loaded when it is first used."""
        path = str(checkpoint.path)
        if path not in self._named:
            self._named[path] = Snapshot(
                version=checkpoint.version, base_model=checkpoint.base_model, path=path, folder=checkpoint.folder
            )
        return self._named[path]

    def forget(self, path: str) -> None:
        """The weights at this path were replaced: samplers made from now on load the new ones, and no others."""
        if (replaced := self._named.pop(path, None)) is not None:
            replaced.folder = None

    @asynccontextmanager
    async def resident(self, snapshot: Snapshot | None, engine: Engine) -> AsyncIterator[None]:
        """The engine holds the snapshot as long as the block runs; None is the base model, which it always holds.

        Raises:
            SnapshotLost: it lived only in an engine that is gone.
        """
        if snapshot is None:
            yield
            return
        async with snapshot.turn:
            if snapshot.home is not engine:
                await self._load(snapshot, engine)
            snapshot.users += 1
            self._touch(snapshot)
        try:
            yield
        finally:
            snapshot.users -= 1

    async def _load(self, snapshot: Snapshot, engine: Engine) -> None:
        if snapshot.folder is None:
            raise SnapshotLost(
                f"These sampler weights (policy version {snapshot.version}) are gone.",
                "They had no name, and the engine that held them stopped, or many newer ones took their place.",
                "Make a new sampling client; save_weights_for_sampler(name) keeps weights on disk.",
            )
        snapshot.version = await engine.load_snapshot(snapshot.name, str(snapshot.folder))
        snapshot.home = engine
        self._hold(snapshot)

    def _hold(self, snapshot: Snapshot) -> None:
        self._touch(snapshot)
        excess = len(self._held) - self._max_held
        for idle in [held for held in self._held.values() if not held.users and held is not snapshot][: max(0, excess)]:
            del self._held[idle.name]
            # A context of its own: engine calls made here must not carry the journal id of the request that led here.
            self._tasks.create_task(self._remove(idle), name="snapshot removal", context=Context())

    def _touch(self, snapshot: Snapshot) -> None:
        self._held[snapshot.name] = snapshot
        self._held.move_to_end(snapshot.name)

    async def _remove(self, snapshot: Snapshot) -> None:
        async with snapshot.turn:
            home = snapshot.home
            if home is None or snapshot.users or home is not self._host.engine:
                return
            try:
                if snapshot.folder is None:
                    await self._write(snapshot, home)
                snapshot.home = None
                await home.drop(snapshot.name)
            except HalteresError as error:
                log.warning("The snapshot %s stays in the engine: %s", snapshot.name, error)

    async def _write(self, snapshot: Snapshot, home: Engine) -> None:
        folder = self._spill / snapshot.name
        await home.save_snapshot(snapshot.name, str(folder))
        snapshot.folder = folder
        self._spilled.append(snapshot)
        while len(self._spilled) > MAX_SPILLED:
            oldest = self._spilled.popleft()
            if oldest.folder is not None and oldest.path is None:
                await asyncio.to_thread(shutil.rmtree, oldest.folder, ignore_errors=True)
                oldest.folder = None
