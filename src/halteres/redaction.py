"""Secrets that must not leave this process: known values become `***` in every text.

Owns: which values are secret (those of variables named like one), how they are struck out of texts and JSON.
Never: stores a secret, or guesses at one that it was not told.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from halteres.config import environ

STRUCK = "***"

SHORTEST = 6
"""A shorter value is no secret (`x`, `tml-x`, an empty one): striking it out would only garble texts."""


class Redactor:
    """Strikes out the values it was made with.

    >>> Redactor(["sk-12345678"]).text("key=sk-12345678!")
    'key=***!'
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        long_enough = sorted({secret for secret in secrets if len(secret) >= SHORTEST}, key=len, reverse=True)
        self._pattern = re.compile("|".join(re.escape(secret) for secret in long_enough)) if long_enough else None
        self.longest = max(map(len, long_enough), default=0)  # characters; what a stream must hold back

    @classmethod
    def of_this_process(cls) -> Redactor:
        """For the values of this process's variables that are named like secrets."""
        return cls(environ.secrets().values())

    def text(self, text: str) -> str:
        """The text without secrets."""
        return self._pattern.sub(STRUCK, text) if self._pattern else text

    def json(self, value: Any) -> Any:
        """A JSON value without secrets, in keys and in texts."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(name)): self.json(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.json(item) for item in value]
        return value
