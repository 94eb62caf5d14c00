"""Checkpoints: the named weights of one service.

STATE/checkpoints/<training run, ':' as '_'>/
    weights/<name>/             PEFT folder, optimiser, state.json
    sampler_weights/<name>/     PEFT folder
    external_weights/<name>/    files for others, perhaps encrypted
STATE/trash/        folders that were deleted, for an instant: half a checkpoint never exists
"""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import delete

from halteres.engine.folders import copy_linked, put, recover, size_of, waiting
from halteres.engine.protocol import LoraConfig, Saved
from halteres.errors import (
    Conflict,
    InvalidData,
    NotFound,
    ServerError,
    UserError,
    nearest,
    shortened,
)
from halteres.files import UnreadableFile, read_json
from halteres.service.checkpoint_folders import (
    CARD,
    CONFIG,
    KINDS,
    LOADABLE,
    Card,
    Kind,
    TinkerPath,
    checked_name,
    checked_ttl,
    end_of_life,
    parse,
    read_card,
)
from halteres.service.durable.journal import CHECKPOINTS, Journal
from halteres.service.keys import Tenant
from halteres.service.limits import Allowances
from halteres.service.training_runs import Model

LONGEST_RENAMED = 118  # characters of a name that leave room for a number behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What is known of named weights."""

    path: TinkerPath
    folder: Path
    version: int  # optimiser steps
    size_bytes: int
    base_model: str
    lora: LoraConfig
    tenant: Tenant
    public: bool = False  # everybody may load it
    request_id: str | None = None  # whose outcome it is
    created_at: float  # unix s
    expires_at: float | None = None  # unix s
    user_metadata: dict[str, Any] = field(default_factory=dict)

    def expired(self, now: float) -> bool:
        """Whether its time is over."""
        return self.expires_at is not None and self.expires_at <= now

    def can_be_renamed(self, tenant: Tenant) -> bool:
        """Whether newer weights of its training run may have its path, and it a numbered one: a
        request of that run saved it. Others' weights, publications and exports stay where they are.
        """
        own = self.tenant == tenant and self.request_id is not None
        return (
            own
            and not self.public
            and self.path.kind in LOADABLE
            and len(self.path.name) <= LONGEST_RENAMED
        )


def _age(checkpoint: Checkpoint) -> float:
    return checkpoint.created_at


class NotOwner(UserError):
    """Somebody may see it, but not change it."""

    code, status = "not_owner", 403


class Checkpoints:
    """The named weights of one service."""

    def __init__(
        self,
        journal: Journal,
        state: Path,
        allowances: Allowances,
        on_removed: Callable[[str], None],
    ) -> None:
        """`on_removed` is called with a tinker:// path, once that name is free."""
        self._journal, self._state, self._trash = journal, state, state / "trash"
        self._allowances, self._on_removed = allowances, on_removed
        self._known: dict[str, Checkpoint] = {}

    async def open(self) -> None:
        """Know again what an earlier life of the service saved, and repair what its end left half
        done.
        """

        def repair() -> None:
            for kind in KINDS:
                for folder in (self._state / "checkpoints").glob(f"*/{kind}"):
                    recover(folder)
            self._empty_trash()

        await asyncio.to_thread(repair)
        for row in await self._journal.rows(CHECKPOINTS):
            path, lora = parse(row.pop("path")), msgspec.convert(row.pop("lora"), LoraConfig)
            del row["model_id"]  # it is in the path
            if (folder := self.folder(path)).is_dir():
                self._known[str(path)] = Checkpoint(path=path, folder=folder, lora=lora, **row)
        await self.discover()

    async def discover(self) -> None:
        """Know those that were put here meanwhile (`halteres checkpoints add`): folders with a card
        that names them.
        """

        def cards() -> list[str]:
            found: list[str] = []
            for file in (self._state / "checkpoints").glob(f"*/*/*/{CARD}"):
                with suppress(UnreadableFile):
                    found.append(read_json(file, Card, linked=False).path)
            return found

        for path in await asyncio.to_thread(cards):
            with suppress(InvalidData):
                self.at(path)

    # Looking

    def all(self, run: str | None = None, tenant: Tenant | None = None) -> list[Checkpoint]:
        """Those of one training run, of one tenant, or all; oldest first."""
        now = time.time()
        found = (
            one
            for one in self._known.values()
            if run in (None, one.path.run) and tenant in (None, one.tenant) and not one.expired(now)
        )
        return sorted(found, key=_age)

    def newest(self, run: str, kind: Kind = "weights") -> Checkpoint | None:
        """The last one saved of a training run."""
        return max(
            (found for found in self.all(run) if found.path.kind == kind), key=_age, default=None
        )

    def newest_of_session(self, session_id: str, kind: Kind) -> Checkpoint | None:
        """The last one saved of any training run of a session."""
        found = (
            one
            for one in self.all()
            if one.path.kind == kind and one.path.run.startswith(f"{session_id}:")
        )
        return max(found, key=_age, default=None)

    def find(self, path: str, tenant: Tenant) -> Checkpoint:
        """The checkpoint at a path, to train from or to sample: the tenant's own, or a public one;
        never an export.
        """
        found = self.readable(path, tenant)
        if found.path.kind not in LOADABLE:
            raise InvalidData(
                f"{path} is an export for others.",
                "It may be encrypted, and it has no optimiser.",
                "Name weights/NAME or sampler_weights/NAME of the training run.",
            )
        return found

    def readable(self, path: str, tenant: Tenant) -> Checkpoint:
        """The checkpoint of any kind at a path: the tenant's own, or a public one. NotFound where
        there is none.
        """
        found = self.at(path)
        if found is None or not (found.public or found.tenant == tenant):
            # Another training run's weights are no answer, however alike their paths are.
            known = {str(one.path): one for one in self.all(parse(path).run, tenant)}
            guess, newest = nearest(path, known), max(known.values(), key=_age, default=None)
            other = (
                f"The newest of its training run is {newest.path}."
                if newest
                else "Its training run has none."
            )
            why = f"Did you mean {guess}?" if guess else other
            raise NotFound(f"There are no weights {shortened(path)}.", why, did_you_mean=guess)
        return found

    def owned(self, path: str, tenant: Tenant) -> Checkpoint:
        """The tenant's own checkpoint at a path; NotOwner where there is a public one of another
        tenant's.
        """
        found, why = self.readable(path, tenant), "It is public, and only its owner may change it."
        if found.tenant != tenant:
            raise NotOwner(f"{path} is another tenant's.", why, "Copy it instead.")
        return found

    def outcome_of(self, request_id: str, tenant: Tenant) -> Checkpoint | None:
        """What a request made."""
        return next((one for one in self.all(tenant=tenant) if one.request_id == request_id), None)

    def at(self, path: str) -> Checkpoint | None:
        """The checkpoint at a path, whoever asks. A folder that no journal lists was put here
        meanwhile, or copied from another state: it belongs to the tenant that its card names, else
        to the one of a service without keys.
        """
        found = self._known.get(path)
        if found is None:
            parsed = parse(path)
            folder, same = parsed.folder(self._state), self._known.get(str(parsed))
            if same or any(known.folder == folder for known in self._known.values()):
                found = same  # two paths may mean one folder; the first one has it
            elif (card := read_card(parsed, folder)) is not None:
                found = self._known[str(parsed)] = Checkpoint(
                    path=parsed,
                    folder=folder,
                    version=card.version,
                    size_bytes=size_of(folder),
                    base_model=card.base_model,
                    lora=card.lora,
                    tenant=card.tenant,
                    created_at=(folder / CONFIG).stat().st_mtime,
                )
        return found if found and not found.expired(time.time()) and found.folder.is_dir() else None

    # Saving

    def place(
        self,
        model: Model,
        kind: Kind,
        name: str | None,
        *,
        overwrite: bool = False,
        ttl_s: int | None = None,
        request_id: str | None = None,
    ) -> TinkerPath:
        """Where a new checkpoint goes, whatever an earlier attempt of the same request left there.
        Conflict where the name is taken by weights that `keep` gives no other name, LimitReached
        where the tenant has no room.
        """
        path, tenant = TinkerPath(model.id, kind, checked_name(name)), model.tenant
        checked_ttl(ttl_s)
        known = self._known.get(str(path))
        if known is not None and known.expired(time.time()):
            self._discard(known)
            known = None
        replaced = known is None or overwrite or known.request_id == request_id
        if (
            known is not None
            and known.folder.exists()
            and not (replaced or known.can_be_renamed(tenant))
        ):
            raise _taken(path)
        # How large it will be is known from the last one of its training run: adapters do not grow.
        # The first is saved where there is room at all. One that takes another's place needs no
        # room, unless that other one is kept.
        held = self.all(tenant=tenant)
        sizes = {str(found.path): found.size_bytes for found in held}
        alike = [one for one in held if (one.path.run, one.path.kind) == (model.id, kind)]
        used = sum(sizes.values()) - (sizes.get(str(path), 0) if replaced else 0)
        self._allowances.of(tenant).check_storage(used, alike[-1].size_bytes if alike else 1, sizes)
        return path

    def folder(self, path: TinkerPath) -> Path:
        """Where a path's folder lies."""
        return path.folder(self._state)

    def waiting_folder(self, path: TinkerPath, request_id: str) -> Path:
        """Where weights are written before `add` puts them in their place."""
        return waiting(path.folder(self._state), request_id)

    async def keep(self, path: TinkerPath, tenant: Tenant) -> Checkpoint | None:
        """Give what is at a path a second path, NAME.1, NAME.2, … in the order of saving; None
        where nothing is. Conflict where it must stay: since `place` it was published.
        """
        older = self._known.get(str(path))
        if older is None or not older.folder.is_dir():
            return None
        if not older.can_be_renamed(tenant):
            raise _taken(path)
        alike = [
            one for one in self.all(path.run) if one.path.kind == path.kind and one is not older
        ]
        if (
            renamed := next((one for one in alike if one.request_id == older.request_id), None)
        ) is not None:
            return renamed  # before a crash; it gets no third path
        prefix = f"{path.name}."
        earlier = [one.path.name.partition(prefix) for one in alike if _age(one) < _age(older)]
        last = max(
            (int(number) for before, _, number in earlier if not before and number.isdecimal()),
            default=0,
        )
        numbered = (replace(path, name=f"{prefix}{number}") for number in count(last + 1))
        free = next(
            one for one in numbered if str(one) not in self._known and not self.folder(one).exists()
        )
        renamed = replace(older, path=free, folder=self.folder(free))
        # before its folder: what a crash interrupts is done again under the same name
        await self._write_down(renamed)
        await asyncio.to_thread(copy_linked, older.folder, renamed.folder)
        self._known[str(free)] = renamed
        return renamed

    async def add(
        self,
        path: TinkerPath,
        saved: Saved,
        model: Model,
        *,
        ttl_s: int | None = None,
        user_metadata: dict[str, Any],
        request_id: str | None = None,
    ) -> Checkpoint:
        """Remember a folder that was written, in its place or beside it; it takes its place, and
        whatever was known of its path before is forgotten. NotFound where somebody deleted it
        meanwhile.
        """
        folder, now = path.folder(self._state), time.time()
        if not Path(saved.folder).is_dir():
            raise NotFound(f"{path} was deleted while it was being saved.", next="Save it again.")
        if Path(saved.folder) != folder:
            put(Path(saved.folder), folder)  # nobody may look between this and the record: no await
        assert model.lora is not None  # noqa: S101 - whatever was saved was made
        checkpoint = Checkpoint(
            path=path,
            folder=folder,
            version=saved.version,
            size_bytes=saved.size_bytes,
            base_model=model.base_model,
            lora=model.lora,
            tenant=model.tenant,
            request_id=request_id,
            created_at=now,
            expires_at=end_of_life(ttl_s, now),
            user_metadata=user_metadata,
        )
        return await self.change(checkpoint)

    async def change(self, checkpoint: Checkpoint, **facts: Any) -> Checkpoint:
        """Record a checkpoint, with facts that are others from now on: `public`, `expires_at`."""
        changed = self._known[str(checkpoint.path)] = replace(checkpoint, **facts)
        await self._write_down(changed)
        return changed

    async def _write_down(self, checkpoint: Checkpoint) -> None:
        path, lora = checkpoint.path, msgspec.to_builtins(checkpoint.lora)
        await self._journal.put(
            CHECKPOINTS, checkpoint, path=str(path), model_id=path.run, lora=lora
        )

    # Going

    async def remove(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint that was just found. Snapshots that the engine holds of it keep
        answering.
        """
        self._discard(checkpoint)
        await self._journal.change(
            delete(CHECKPOINTS).where(CHECKPOINTS.c.path == str(checkpoint.path))
        )
        await asyncio.to_thread(self._empty_trash)

    async def expire(self, now: float) -> int:
        """Delete those whose time is over at `now` (unix s); returns how many."""
        over = [checkpoint for checkpoint in self._known.values() if checkpoint.expired(now)]
        for checkpoint in over:
            # it may have been renewed meanwhile
            if self._known.get(str(checkpoint.path)) is checkpoint:
                await self.remove(checkpoint)
        return len(over)

    def _discard(self, checkpoint: Checkpoint) -> None:
        """From here on its name is free; no instant lies between."""
        try:
            self._trash.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):  # it is gone already
                checkpoint.folder.rename(self._trash / uuid.uuid4().hex)
        except OSError as error:
            raise ServerError(
                f"The folder {checkpoint.folder} cannot be deleted.", f"{error.strerror}."
            ) from error
        self._known.pop(str(checkpoint.path), None)
        self._on_removed(str(checkpoint.path))

    def _empty_trash(self) -> None:
        for folder in self._trash.glob("*"):  # what cannot be removed now is removed the next time
            shutil.rmtree(folder, ignore_errors=True)


def _taken(path: TinkerPath) -> Conflict:
    next_step = (
        f"Choose another name{', or save with overwrite=True' if path.kind == 'weights' else ''}."
    )
    return Conflict(
        f"The checkpoint {path} exists.", "Saved weights are not replaced by accident.", next_step
    )
