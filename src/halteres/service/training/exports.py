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
from halteres.service.checkpoints.peft_folders import FILES, copy_for_tinker

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


async def write_export(engine: Trains, model_id: str, folder: Path, base: Path, recipients: Recipients | None) -> Saved:
    """A training run's weights as files for others, encrypted to the recipients if there are any."""
    with written(folder) as place, tempfile.TemporaryDirectory(dir=place) as work:
        plain = Path(work) / "plain"
        saved = await engine.save(model_id, str(plain), False)
        await asyncio.to_thread(_fill, place, plain, base, recipients)
    return Saved(folder=str(folder), size_bytes=await asyncio.to_thread(size_of, folder), version=saved.version)


def _fill(place: Path, plain: Path, base: Path, recipients: Recipients | None) -> None:
    if recipients is None:
        copy_for_tinker(plain, place, base)
        return
    with tempfile.TemporaryDirectory(dir=plain.parent) as named:
        copy_for_tinker(plain, Path(named), base)
        for name in FILES:
            recipients.encrypt(Path(named) / name, place / f"{name}{SUFFIX}")
