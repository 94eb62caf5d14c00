"""Snapshots: immutable weights for sampling, in engines or on disk.

the engine that trains also samples       snapshot ─▶ it has them
another one samples                       snapshot ─▶ trainer writes a folder, tells its digest ─▶
                                          sampler reads it
a folder that was damaged on its way      refused, and written again while the trainer has them
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
from weakref import WeakKeyDictionary

from halteres.engine.protocol import (
    EngineGone,
    LoraConfig,
    Samples,
    Saved,
    Trains,
    Weights,
    WeightsDamaged,
)
from halteres.errors import HalteresError, ServerError, UserError
from halteres.files import linked
from halteres.service.base import WeightsBudget
from halteres.service.checkpoints import Checkpoint
from halteres.service.fleet import Fleet, with_failover
from halteres.service.training_runs import Model

MAX_SPILLED = 32
"""Unnamed snapshots of one training run on disk; a trainer makes one with every step and seldom
goes back to one.
"""

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
    # of that folder; None: it was written in an earlier life, or by somebody else
    sha256: str | None = None
    largest: float | None = None
    # those that hold it -> requests under way there
    engines: WeakKeyDictionary[Trains | Samples, int] = field(
        default_factory=WeakKeyDictionary["Trains | Samples", int]
    )
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # of whoever loads or removes it
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)  # ... or writes its folder


class Snapshots:
    """What each engine holds, and what it can be given."""

    def __init__(
        self, fleet: Fleet, spill: Path, tasks: asyncio.TaskGroup, budget: WeightsBudget
    ) -> None:
        self._fleet, self._spill, self._tasks, self._budget = fleet, spill, tasks, budget
        self._held: WeakKeyDictionary[Trains | Samples, OrderedDict[str, Snapshot]] = (
            WeakKeyDictionary()
        )
        """By engine and name, unused for longest first."""
        self._by_path: dict[str, Snapshot] = {}  # by tinker:// path
        self._unnamed: dict[tuple[str, int], Snapshot] = {}  # by training run and number
        # by training run, oldest first
        self._spilled: defaultdict[str, deque[Snapshot]] = defaultdict(deque)
        self.bring_back: Callable[[Model, Trains], Awaitable[None]] | None = None
        """Brings an adapter back, and with it the unnamed weights published from it;
        `service.execution` sets it.
        """

    # Unnamed weights

    async def publish(self, trainer: Trains, model: Model, seq: int) -> Snapshot:
        """Copy an adapter's weights, for the request of this number."""
        snapshot = Snapshot(
            version=0, base_model=model.base_model, lora=model.lora, model=model, seq=seq
        )
        snapshot.version = (await trainer.snapshot(model.id, snapshot.name)).version
        self._hold(snapshot, trainer)
        self._unnamed[model.id, seq] = snapshot
        return snapshot

    def unnamed(self, model: Model, seq: int, name: str, version: int) -> Snapshot:
        """The weights that an earlier life of the service published with the request of this
        number.
        """
        snapshot = self._unnamed[model.id, seq] = Snapshot(
            version=version,
            base_model=model.base_model,
            lora=model.lora,
            name=name,
            model=model,
            seq=seq,
        )
        if (folder := self._spill / name).is_dir():
            snapshot.folder = folder
            self._spilled[model.id].append(snapshot)
        return snapshot

    def published_with(self, model: Model, seq: int) -> Snapshot:
        """Unnamed weights by the request that published them; SnapshotLost where they are gone."""
        if (found := self._unnamed.get((model.id, seq))) is None:
            raise _gone("These sampler weights", UNNAMED)
        return found

    async def sweep(self) -> None:
        """Remove folders of an earlier life that no sampling session means any more."""
        used = {snapshot.name for snapshot in self._unnamed.values()}
        for folder in self._spill.glob("*"):
            if folder.name not in used:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def retake(self, model: Model, seq: int, trainer: Trains) -> None:
        """The adapter is again what it was when it was published with this number."""
        snapshot = self._unnamed.get((model.id, seq))
        if snapshot is not None and snapshot.folder is None and trainer not in snapshot.engines:
            await trainer.snapshot(model.id, snapshot.name)
            self._hold(snapshot, trainer)

    async def keep(self, model: Model, trainer: Trains) -> None:
        """Write a training run's unnamed weights that only the engine holds."""
        for snapshot in [one for one in self._unnamed.values() if one.model is model]:
            if snapshot.folder is None and trainer in snapshot.engines:
                await self._write(snapshot, trainer)

    async def forget_unnamed(self, model: Model) -> None:
        """Forget what a training run has published without a name."""
        for snapshot in [one for one in self._unnamed.values() if one.model is model]:
            await self._discard(snapshot)
        self._spilled.pop(model.id, None)

    async def _discard(self, snapshot: Snapshot) -> None:
        """Forget unnamed weights; whoever samples from them goes on while the engine holds them."""
        folder, snapshot.folder = snapshot.folder, None
        if snapshot.model is not None and snapshot.seq is not None:
            self._unnamed.pop((snapshot.model.id, snapshot.seq), None)
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    # Named weights

    def name(self, snapshot: Snapshot, path: str, folder: Path, saved: Saved) -> None:
        """The snapshot was saved, and lies there now."""
        snapshot.path, snapshot.folder = path, folder
        snapshot.sha256, snapshot.largest = saved.sha256, saved.largest
        self._by_path[path] = snapshot
        if snapshot.model is not None and snapshot.seq is not None:
            self._unnamed.pop((snapshot.model.id, snapshot.seq), None)

    def of(self, checkpoint: Checkpoint) -> Snapshot:
        """The snapshot of named weights; it is loaded when it is first used."""
        path, base_model = str(checkpoint.path), checkpoint.base_model
        if path not in self._by_path:
            folder, lora = checkpoint.folder, checkpoint.lora
            snapshot = Snapshot(
                version=checkpoint.version,
                base_model=base_model,
                lora=lora,
                path=path,
                folder=folder,
            )
            self._by_path[path] = snapshot
        return self._by_path[path]

    def forget(self, path: str) -> None:
        """The weights at this path were deleted: whoever samples from them goes on while the engine
        holds them.
        """
        if (deleted := self._by_path.pop(path, None)) is not None:
            deleted.folder = None

    async def rename(self, path: str, to: Checkpoint) -> None:
        """The weights at this path are now at another one, and whoever samples from them goes on
        there.
        """
        if (renamed := self._by_path.pop(path, None)) is not None:
            # a load under way ends first: it reads the folder that newer weights will take
            async with renamed.lock:
                renamed.path, renamed.folder = str(to.path), to.folder
            self._by_path[renamed.path] = renamed

    async def detach(self, path: str) -> None:
        """The weights at this path are about to be replaced: samplers made before keep theirs, in a
        folder of links.
        """
        replaced = self._by_path.pop(path, None)
        if replaced is not None and replaced.folder is not None:
            links = self._spill / replaced.name
            async with replaced.lock:  # a load of them that is under way ends first
                await asyncio.to_thread(
                    shutil.copytree,
                    replaced.folder,
                    links,
                    copy_function=linked,
                    dirs_exist_ok=True,
                )
                replaced.folder = links

    # In the engines

    @asynccontextmanager
    async def resident(self, snapshot: Snapshot | None, engine: Samples) -> AsyncIterator[None]:
        """The engine holds the snapshot as long as the block runs; None is the base model, which it
        always holds. SnapshotLost where it lived only in an engine that is gone.
        """
        if snapshot is None:
            yield
            return
        async with snapshot.lock:
            if engine not in snapshot.engines:
                await self._load(snapshot, engine)
            snapshot.engines[engine] += 1
            self._touch(snapshot, engine)
        try:
            yield
        finally:
            snapshot.engines[engine] -= 1

    async def _load(self, snapshot: Snapshot, engine: Samples) -> None:
        async def give() -> None:
            folder = None if snapshot.folder is None else str(snapshot.folder)
            source = Weights(
                name=snapshot.name,
                version=snapshot.version,
                folder=folder,
                sha256=snapshot.sha256,
                largest=snapshot.largest,
            )
            snapshot.version = await engine.hold(snapshot.name, source)
            self._hold(snapshot, engine)

        if snapshot.folder is None:
            await self._fetch(snapshot)
        if engine in snapshot.engines:
            return
        try:
            await give()
        except WeightsDamaged as damaged:
            log.warning("%s", damaged)
            folder, snapshot.folder = snapshot.folder, None
            try:
                await self._fetch(snapshot)
            except SnapshotLost:
                snapshot.folder = folder
                raise damaged from None
            await give()

    async def _fetch(self, snapshot: Snapshot) -> None:
        """Weights that no folder holds: the trainer has them, or takes them again, and writes them
        for others.
        """

        async def fetch(trainer: Trains) -> None:
            if (
                trainer not in snapshot.engines
                and snapshot.model is not None
                and self.bring_back is not None
            ):
                # the adapter cannot come back, nor what was published from it
                with suppress(UserError, ServerError):
                    await self.bring_back(snapshot.model, trainer)
            if trainer not in snapshot.engines:
                what = f"These sampler weights (policy version {snapshot.version})"
                raise _gone(
                    what, f"{snapshot.path} was deleted or replaced." if snapshot.path else UNNAMED
                )
            if self._fleet.apart:
                await self._write(snapshot, trainer)

        await with_failover(lambda _: self._fleet.trainer, fetch)

    def _hold(self, snapshot: Snapshot, engine: Trains | Samples) -> None:
        """The engine has it now; those unused for longest make room for it."""
        snapshot.engines[engine] = 0
        self._touch(snapshot, engine)
        idle = self._budget.evict(
            self._held[engine],
            lambda one: not one.engines.get(engine) and one is not snapshot,
            trained=False,
        )
        for one in idle:
            self._tasks.create_task(self._remove(one, engine), name="snapshot removal")

    def _touch(self, snapshot: Snapshot, engine: Trains | Samples) -> None:
        held = self._held.setdefault(engine, OrderedDict())
        held[snapshot.name] = snapshot
        held.move_to_end(snapshot.name)

    async def _remove(self, snapshot: Snapshot, engine: Trains | Samples) -> None:
        async with snapshot.lock:
            if snapshot.engines.get(engine) != 0:
                return  # it is sampled from again
            try:
                trainer = self._fleet.trainer.engine
                if snapshot.folder is None and engine is trainer:
                    await self._write(snapshot, trainer)
                del snapshot.engines[engine]
                await engine.drop(snapshot.name)
            except EngineGone:
                return
            except HalteresError as error:
                self._touch(snapshot, engine)
                log.warning("The snapshot %s stays in the engine: %s", snapshot.name, error)

    async def _write(self, snapshot: Snapshot, trainer: Trains) -> None:
        """Write its folder, once; of a training run's unnamed ones only the newest stay."""
        async with snapshot.writing:
            if snapshot.folder is not None:
                return
            folder = self._spill / snapshot.name
            dtype = self._fleet.published_type
            saved = await trainer.save_snapshot(snapshot.name, str(folder), dtype)
            if snapshot.folder is not None:
                return  # it was given a name meanwhile
            snapshot.folder = folder
            snapshot.sha256, snapshot.largest = saved.sha256, saved.largest
            spilled = self._spilled[snapshot.model.id if snapshot.model else ""]
            if snapshot not in spilled:
                spilled.append(snapshot)
            while len(spilled) > MAX_SPILLED:
                if (oldest := spilled.popleft()).path is None:
                    await self._discard(oldest)


def _gone(what: str, why: str) -> SnapshotLost:
    next_step = "Make a new sampling client; save_weights_for_sampler(name) keeps weights on disk."
    return SnapshotLost(f"{what} are gone.", why, next_step)
