"""Snapshots: immutable weights for sampling, in the engine or on disk.

Owns: which snapshots the engine holds, loading those that have a folder when they are asked for, a bound on the memory
that they take (the ones unused for longest leave; those without a folder are written to one first). Unnamed ones that
no folder holds come back with their adapter (`adapters`), which takes them again.
Never: changes weights; removes one that is being sampled from.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections import OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from halteres.engine.protocol import Engine, LoraConfig
from halteres.errors import HalteresError, ServerError, UserError
from halteres.files import linked
from halteres.service.checkpoints.store import Checkpoint
from halteres.service.host import Host
from halteres.service.training.models import Model
from halteres.service.weights_budget import WeightsBudget

MAX_SPILLED = 32
"""Unnamed snapshots of one training run on disk; a trainer makes one with every step and seldom goes back to one."""

UNNAMED = "They had no name, and many newer ones took their place."

log = logging.getLogger(__name__)


class SnapshotLost(ServerError):
    """Weights that lived only in an engine that is gone."""

    code = "snapshot_lost"


@dataclass(slots=True, kw_only=True, eq=False)
class Snapshot:
    """Weights to sample from."""

    version: int  # policy version
    base_model: str
    lora: LoraConfig | None = None
    name: str = field(default_factory=lambda: f"snapshot-{uuid.uuid4().hex}")  # in the engine
    model: Model | None = None  # of unnamed ones: the training run ...
    seq: int | None = None  # ... and the number of the request that published them
    path: str | None = None  # tinker:// path, of named ones
    folder: Path | None = None  # where it can be loaded from again
    home: Engine | None = None  # the engine that holds it
    users: int = 0  # sampling requests under way
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # of whoever loads or removes it


class Snapshots:
    """What the engine holds, and what it can load."""

    def __init__(self, host: Host, spill: Path, tasks: asyncio.TaskGroup, budget: WeightsBudget) -> None:
        self._host, self._spill, self._tasks, self._budget = host, spill, tasks, budget
        self._held: OrderedDict[str, Snapshot] = OrderedDict()  # by name, unused for longest first
        self._named: dict[str, Snapshot] = {}  # by tinker:// path
        self._unnamed: dict[tuple[str, int], Snapshot] = {}  # by training run and number
        self._spilled: defaultdict[str, deque[Snapshot]] = defaultdict(deque)  # by training run, oldest first
        self._bring_back: Callable[[Snapshot, Engine], Awaitable[None]] | None = None

    def bring_back_by(self, bring_back: Callable[[Snapshot, Engine], Awaitable[None]]) -> None:
        """Who takes unnamed weights again that no folder holds."""
        self._bring_back = bring_back

    async def publish(self, home: Engine, model: Model, seq: int) -> Snapshot:
        """Copy an adapter's weights, for the request of this number."""
        snapshot = Snapshot(version=0, base_model=model.base_model, lora=model.lora, home=home, model=model, seq=seq)
        snapshot.version = await home.snapshot(model.id, snapshot.name)
        self._hold(snapshot)
        self._unnamed[model.id, seq] = snapshot
        return snapshot

    def unnamed(self, model: Model, seq: int, name: str, version: int) -> Snapshot:
        """The weights that an earlier life of the service published with the request of this number."""
        snapshot = Snapshot(
            version=version, base_model=model.base_model, lora=model.lora, name=name, model=model, seq=seq
        )
        folder = self._spill / name
        if folder.is_dir():
            snapshot.folder = folder
            self._spilled[model.id].append(snapshot)
        self._unnamed[model.id, seq] = snapshot
        return snapshot

    def published_with(self, model: Model, seq: int) -> Snapshot:
        """Unnamed weights by the request that published them.

        Raises:
            SnapshotLost: they are gone.
        """
        if (found := self._unnamed.get((model.id, seq))) is None:
            raise _gone("These sampler weights", UNNAMED)
        return found

    async def sweep(self) -> None:
        """Remove folders of an earlier life that no sampling session means any more."""
        meant = {snapshot.name for snapshot in self._unnamed.values()}
        for folder in self._spill.glob("*"):
            if folder.name not in meant:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def taken_again(self, model: Model, seq: int, engine: Engine) -> None:
        """The adapter is again what it was when it was published with this number."""
        snapshot = self._unnamed.get((model.id, seq))
        if snapshot is not None and snapshot.folder is None and snapshot.home is not engine:
            await engine.snapshot(model.id, snapshot.name)
            snapshot.home = engine
            self._hold(snapshot)

    async def keep(self, model: Model, engine: Engine) -> None:
        """Write a training run's unnamed weights that only the engine holds."""
        published = [snapshot for (run, _), snapshot in self._unnamed.items() if run == model.id]
        for snapshot in published:
            if snapshot.folder is None and snapshot.home is engine:
                await self._write(snapshot, engine)

    def name(self, snapshot: Snapshot, path: str, folder: Path) -> None:
        """The snapshot was saved there."""
        snapshot.path, snapshot.folder = path, folder
        self._named[path] = snapshot
        if snapshot.model is not None and snapshot.seq is not None:
            self._unnamed.pop((snapshot.model.id, snapshot.seq), None)

    def of(self, checkpoint: Checkpoint) -> Snapshot:
        """The snapshot of named weights; it is loaded when it is first used."""
        path = str(checkpoint.path)
        if path not in self._named:
            self._named[path] = Snapshot(
                version=checkpoint.version,
                base_model=checkpoint.base_model,
                lora=checkpoint.lora,
                path=path,
                folder=checkpoint.folder,
            )
        return self._named[path]

    def forget(self, path: str) -> None:
        """The weights at this path were deleted: whoever samples from them goes on while the engine holds them."""
        if (deleted := self._named.pop(path, None)) is not None:
            deleted.folder = None

    async def rename(self, path: str, kept: Checkpoint) -> None:
        """The weights at this path are now at another one, and whoever samples from them goes on there.

        A load of them that is under way ends first: it reads the folder that newer weights are about to take.
        """
        if (renamed := self._named.pop(path, None)) is not None:
            async with renamed.turn:
                renamed.path, renamed.folder = str(kept.path), kept.folder
            self._named[renamed.path] = renamed

    async def detach(self, path: str) -> None:
        """The weights at this path are about to be replaced: samplers made before keep theirs, in a folder of links."""
        replaced = self._named.pop(path, None)
        if replaced is not None and replaced.folder is not None:
            kept = self._spill / replaced.name
            async with replaced.turn:  # a load of them that is under way ends first
                await asyncio.to_thread(
                    shutil.copytree, replaced.folder, kept, copy_function=linked, dirs_exist_ok=True
                )
                replaced.folder = kept

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
            await self._take_again(snapshot, engine)
            return
        snapshot.version = await engine.load_snapshot(snapshot.name, str(snapshot.folder))
        snapshot.home = engine
        self._hold(snapshot)

    async def _take_again(self, snapshot: Snapshot, engine: Engine) -> None:
        if self._bring_back is not None:
            with suppress(UserError, ServerError):  # the adapter cannot come back, nor can what was published from it
                await self._bring_back(snapshot, engine)
        if snapshot.home is not engine:
            what = f"These sampler weights (policy version {snapshot.version})"
            raise _gone(what, f"{snapshot.path} was deleted or replaced." if snapshot.path else UNNAMED)

    def _hold(self, snapshot: Snapshot) -> None:
        self._touch(snapshot)
        excess = sum(self._budget.snapshot(held.lora) for held in self._held.values()) - self._budget.of_kind
        for idle in [held for held in self._held.values() if not held.users and held is not snapshot]:
            if excess <= 0:
                return
            excess -= self._budget.snapshot(idle.lora)
            del self._held[idle.name]
            self._tasks.create_task(self._remove(idle), name="snapshot removal")

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
                self._touch(snapshot)
                log.warning("The snapshot %s stays in the engine: %s", snapshot.name, error)

    async def _write(self, snapshot: Snapshot, home: Engine) -> None:
        folder = self._spill / snapshot.name
        await home.save_snapshot(snapshot.name, str(folder))
        if snapshot.folder is not None:
            return  # somebody else wrote it meanwhile
        snapshot.folder = folder
        spilled = self._spilled[snapshot.model.id if snapshot.model else ""]
        spilled.append(snapshot)
        while len(spilled) > MAX_SPILLED:
            oldest = spilled.popleft()
            if oldest.path is None:
                await self._discard(oldest)

    async def _discard(self, snapshot: Snapshot) -> None:
        """Forget unnamed weights; whoever samples from them goes on while the engine holds them."""
        folder, snapshot.folder = snapshot.folder, None
        if snapshot.model is not None and snapshot.seq is not None:
            self._unnamed.pop((snapshot.model.id, snapshot.seq), None)
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def forget_unnamed(self, model: Model) -> None:
        """Forget what a training run has published without a name."""
        for snapshot in [snapshot for (run, _), snapshot in self._unnamed.items() if run == model.id]:
            await self._discard(snapshot)
        self._spilled.pop(model.id, None)


def _gone(what: str, why: str) -> SnapshotLost:
    remedy = "Make a new sampling client; save_weights_for_sampler(name) keeps weights on disk."
    return SnapshotLost(f"{what} are gone.", why, remedy)
