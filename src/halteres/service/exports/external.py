"""Exports: weights as files for others.

Owns: the folder that save_weights_external writes, its encryption.
Never: serves the files (`routes.downloads` does).
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from halteres.engine.folders import size_of, written
from halteres.engine.protocol import Saved, Trains
from halteres.errors import InvalidData
from halteres.service.base import BaseModel
from halteres.service.checkpoints.store import Checkpoints
from halteres.service.exports.encryption import SUFFIX, Recipients
from halteres.service.exports.peft_folders import FILES, copy_for_tinker
from halteres.service.training.models import Model
from halteres.service.wire.bodies import SaveWeights


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
