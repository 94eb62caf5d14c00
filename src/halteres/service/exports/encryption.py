"""age: files that only their recipients can read.

Owns: whom an export is encrypted to, and that it never falls back to plain text.
Never: holds a key.
Source: age-encryption.org/v1, by the library pyrage (the extra `age`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from halteres.errors import InvalidData, ServerError, UserError, boundary

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
