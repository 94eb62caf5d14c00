"""Checkpoints: tinker:// paths and the folders behind them.

Owns: `tinker://{training run}/{weights|sampler_weights}/{name}` and its place on disk; what is known of each of them.
Never: writes or reads weights (the engine does), deletes a checkpoint.

    STATE/checkpoints/<training run, ':' as '_'>/weights/<name>/           PEFT folder, optimiser, state.json
                                                /sampler_weights/<name>/   PEFT folder
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from halteres.engine.folders import recover
from halteres.engine.protocol import LoraConfig, Saved
from halteres.errors import Conflict, InvalidData, NotFound, nearest
from halteres.service.journal import Journal
from halteres.service.tables import CHECKPOINTS

Kind = Literal["weights", "sampler_weights"]

_KINDS: dict[str, Kind] = {"weights": "weights", "sampler_weights": "sampler_weights"}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,127}")
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """A parsed tinker:// path."""

    run: str  # training run id
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    def folder(self, state: Path) -> Path:
        """Where it lies."""
        return state / "checkpoints" / self.run.replace(":", "_") / self.kind / self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What is known of named weights."""

    path: TinkerPath
    folder: Path
    version: int  # optimiser steps
    size_bytes: int
    base_model: str
    lora: LoraConfig
    created_at: float  # unix s
    expires_at: float | None = None  # unix s
    user_metadata: dict[str, Any] = field(default_factory=dict)


def parse(path: str) -> TinkerPath:
    """Read a tinker:// path.

    Raises:
        InvalidData: it is none.
    """
    scheme, _, rest = path.partition("://")
    parts = rest.split("/")
    if scheme != "tinker" or len(parts) != 3 or parts[1] not in _KINDS:
        raise InvalidData(
            f"'{path}' is no path of weights.",
            next="Write tinker://TRAINING_RUN/weights/NAME or …/sampler_weights/NAME.",
        )
    if not _RUN.fullmatch(parts[0]) or not _NAME.fullmatch(parts[2]):
        raise InvalidData(f"'{path}' is no path of weights.", "Its run or name holds a character that none can have.")
    return TinkerPath(parts[0], _KINDS[parts[1]], parts[2])


def folder_of(state: Path, tinker_path: str) -> Path:
    """The folder that a path stands for, in a service's state directory; it need not exist.

    Raises:
        InvalidData: no tinker:// path.
    """
    return parse(tinker_path).folder(state)


class Checkpoints:
    """The named weights of one service."""

    def __init__(self, journal: Journal, state: Path) -> None:
        self._journal, self._state = journal, state
        self._known: dict[str, Checkpoint] = {}

    async def open(self) -> None:
        """Know again what an earlier life of the service saved, and mend what its end left half replaced."""
        await asyncio.to_thread(self._recover)
        for row in await self._journal.rows(CHECKPOINTS):
            path = parse(row["path"])
            facts = {name: row[name] for name in row if name not in ("path", "model_id", "lora")}
            lora = msgspec.convert(row["lora"], LoraConfig)
            self._known[row["path"]] = Checkpoint(path=path, folder=path.folder(self._state), lora=lora, **facts)

    def _recover(self) -> None:
        for kind in _KINDS:
            for folder in (self._state / "checkpoints").glob(f"*/{kind}"):
                recover(folder)

    def all(self, run: str | None = None) -> list[Checkpoint]:
        """Those of one training run, or all; oldest first."""
        return [found for found in self._known.values() if run is None or found.path.run == run]

    def newest(self, run: str, kind: Kind = "weights") -> Checkpoint | None:
        """The last one saved of a training run."""
        return max((found for found in self.all(run) if found.path.kind == kind), key=_age, default=None)

    def newest_of_session(self, session_id: str, kind: Kind) -> Checkpoint | None:
        """The last one saved of any training run of a session."""
        found = (one for one in self.all() if one.path.kind == kind and one.path.run.startswith(f"{session_id}:"))
        return max(found, key=_age, default=None)

    def find(self, path: str) -> Checkpoint:
        """The checkpoint at a path. One that another service wrote is known by its folder.

        Raises:
            NotFound: there is none; the message names what exists.
        """
        known = self._known.get(path) or self._read(parse(path))
        if known is None or not known.folder.is_dir():
            raise _missing(path, self._known)
        return known

    def place(self, run: str, kind: Kind, name: str | None, *, overwrite: bool = False) -> TinkerPath:
        """Where a new checkpoint goes.

        Raises:
            InvalidData: no usable name.
            Conflict: the name is taken.
        """
        if not name or not _NAME.fullmatch(name):
            raise InvalidData(
                f"'{name or ''}' cannot name a checkpoint.",
                "It may have letters, digits and . _ + = @ -, up to 128, and no '/'.",
                "Choose another name.",
            )
        path = TinkerPath(run, kind, name)
        if path.folder(self._state).exists() and not overwrite:
            remedy = (
                "Choose another name, or save with overwrite=True." if kind == "weights" else "Choose another name."
            )
            raise Conflict(f"The checkpoint {path} exists.", "Saved weights are not replaced by accident.", remedy)
        return path

    def folder(self, path: TinkerPath) -> Path:
        """Where a path's folder lies."""
        return path.folder(self._state)

    async def add(
        self,
        path: TinkerPath,
        saved: Saved,
        *,
        base_model: str,
        lora: LoraConfig,
        ttl_s: int | None,
        user_metadata: dict[str, Any],
    ) -> Checkpoint:
        """Remember a folder that the engine wrote."""
        now = time.time()
        checkpoint = Checkpoint(
            path=path,
            folder=path.folder(self._state),
            version=saved.version,
            size_bytes=saved.size_bytes,
            base_model=base_model,
            lora=lora,
            created_at=now,
            expires_at=None if ttl_s is None else now + ttl_s,
            user_metadata=user_metadata,
        )
        await self._journal.added(
            CHECKPOINTS,
            path=str(path),
            model_id=path.run,
            version=saved.version,
            size_bytes=saved.size_bytes,
            base_model=base_model,
            lora=msgspec.to_builtins(lora),
            user_metadata=user_metadata,
            created_at=now,
            expires_at=checkpoint.expires_at,
        )
        self._known[str(path)] = checkpoint
        return checkpoint

    def _read(self, path: TinkerPath) -> Checkpoint | None:
        folder = path.folder(self._state)
        files = (folder / "adapter_config.json", folder / "state.json")
        if not all(file.is_file() for file in files):
            return None
        adapter, state = (json.loads(file.read_text()) for file in files)
        return Checkpoint(
            path=path,
            folder=folder,
            version=state["version"],
            size_bytes=sum(file.stat().st_size for file in folder.iterdir()),
            base_model=adapter.get("base_model_name_or_path") or "",
            lora=msgspec.convert(state["lora"], LoraConfig),
            created_at=files[1].stat().st_mtime,
        )


def _age(checkpoint: Checkpoint) -> float:
    return checkpoint.created_at


def _missing(path: str, known: dict[str, Checkpoint]) -> NotFound:
    guess = nearest(path, known)
    newest = max(known.values(), key=_age, default=None)
    why = f"Did you mean {guess}?" if guess else f"The newest is {newest.path}." if newest else "None was saved yet."
    return NotFound(f"There are no weights {path}.", why, did_you_mean=guess)
