"""Exports: weights as files for others, which only their recipients can read where that is asked for.

Source: age-encryption.org/v1, by the library pyrage (the extra `age`).
"""

from __future__ import annotations

import asyncio
import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from halteres.engine.folders import size_of, written
from halteres.engine.protocol import Saved, Trains
from halteres.errors import InvalidData, ServerError, UserError, boundary
from halteres.service.base import BaseModel
from halteres.service.checkpoints.peft_folders import FILES, copy_for_tinker
from halteres.service.checkpoints.store import Checkpoints
from halteres.service.models import Model
from halteres.service.wire.bodies import SaveWeights

MAX_RECIPIENTS = 10

SUFFIX = ".age"

MAX_SHOWN = 24
"""Characters of a recipient that a message repeats."""


class Recipients:
    """Whom files are encrypted to: native `age1…` keys (X25519) or SSH public keys.

    Raises:
        InvalidData: none, too many, or one is no public key.
        UserError: pyrage is not installed.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        if not 1 <= len(keys) <= MAX_RECIPIENTS:
            raise InvalidData(
                f"An export cannot be encrypted to {len(keys)} recipients.",
                f"It has 1 to {MAX_RECIPIENTS}.",
                "Leave age_encryption_recipients out for plain files.",
            )
        self._pyrage = _pyrage()
        self._recipients = [self._recipient(key) for key in keys]

    def encrypt(self, source: Path, target: Path) -> None:
        """Write `target`, which everybody but the recipients finds unreadable."""
        with boundary(ServerError, "pyrage.encrypt_file"):
            self._pyrage.encrypt_file(str(source), str(target), self._recipients)

    def _recipient(self, key: str) -> Any:
        native = key.strip().startswith("age1")
        kind = self._pyrage.x25519.Recipient if native else self._pyrage.ssh.Recipient
        try:
            return kind.from_str(key.strip())
        except self._pyrage.RecipientError as error:
            raise InvalidData(
                f"'{key[:MAX_SHOWN]}' is no age recipient.",
                f"{error}.",
                "Send a public key: one that begins with age1 (age-keygen prints it), or an SSH public key.",
            ) from error


def _pyrage() -> ModuleType:
    try:
        return importlib.import_module("pyrage")
    except ImportError as error:
        raise UserError(
            "This service cannot encrypt an export.",
            "The package pyrage is not installed beside it.",
            "Run `pip install 'halteres[age]'` there, or leave age_encryption_recipients out.",
        ) from error


class Exports:
    """The external weights of one service."""

    def __init__(self, checkpoints: Checkpoints, base: BaseModel) -> None:
        self._checkpoints, self._base = checkpoints, base

    async def write(self, engine: Trains, model: Model, asked: SaveWeights, request_id: str) -> dict[str, Any]:
        """Write a model's weights for others; returns the result of its future: path, size_bytes."""
        if model.lora is None:
            raise InvalidData(f"The training run {model.id} has no adapter.", next="Make a new training client.")
        path = self._checkpoints.place(
            model.id,
            "external_weights",
            asked.path,
            ttl_s=asked.ttl_seconds,
            tenant=model.tenant,
            request_id=request_id,
        )
        keys = asked.age_encryption_recipients
        recipients = None if keys is None else Recipients(keys)
        folder = self._checkpoints.folder(path)
        saved = await self._saved(engine, model, folder, recipients)
        await self._checkpoints.add(
            path,
            saved,
            tenant=model.tenant,
            base_model=model.base_model,
            lora=model.lora,
            ttl_s=asked.ttl_seconds,
            user_metadata=asked.user_metadata,
            request_id=request_id,
        )
        return {"path": str(path), "size_bytes": saved.size_bytes}

    async def _saved(self, engine: Trains, model: Model, folder: Path, recipients: Recipients | None) -> Saved:
        with written(folder) as place, tempfile.TemporaryDirectory(dir=place) as work:
            plain = Path(work) / "plain"
            saved = await engine.save(model.id, str(plain), False)
            await asyncio.to_thread(self._fill, place, plain, recipients)
        return Saved(folder=str(folder), size_bytes=await asyncio.to_thread(size_of, folder), version=saved.version)

    def _fill(self, place: Path, plain: Path, recipients: Recipients | None) -> None:
        if recipients is None:
            copy_for_tinker(plain, place, self._base.folder)
            return
        with tempfile.TemporaryDirectory(dir=plain.parent) as named:
            copy_for_tinker(plain, Path(named), self._base.folder)
            for name in FILES:
                recipients.encrypt(Path(named) / name, place / f"{name}{SUFFIX}")
