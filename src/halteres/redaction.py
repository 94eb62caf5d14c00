"""Secrets that must not leave this process: known values become `***` in every text.

Owns: which values are secret (those of variables and of settings that are named like one), how they are struck out of
texts and JSON; what a terminal must not get of a text that others wrote.
Never: stores a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from halteres.config import environ

STRUCK = "***"

SHORTEST = 6
"""A shorter value is no secret (`x`, `tml-x`, an empty one): striking it out would only garble texts."""


_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """A text that others wrote, for a terminal or a page of Markdown: it moves no cursor, sets no title, hides nothing.

    >>> printable("10 %\\r\\x1b[32mdone\\x1b[0m\\x07")
    '10 %?done?'
    """
    return _CONTROL.sub("?", _ESCAPES.sub("", text))


_TASK = "item"
"""A key whose value is a task of an environment: what is called `answer_key` in there is no setting."""

_NAMES, _VALUES = ("name", "field"), ("value", "current_value", "locked_value", "default", "got")
"""Keys by which an answer tells of one setting: what it is called, what it is set to."""


class Redactor:
    """Strikes out the values it was made with.

    >>> Redactor(["sk-12345678"]).text("key=sk-12345678!")
    'key=***!'
    >>> Redactor([]).json({"message": "Updated judge_key = sk-12345678", "config": {"env.judge_key": "sk-12345678"}})
    {'message': 'Updated judge_key = ***', 'config': {'env.judge_key': '***'}}
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = frozenset(secrets)
        long_enough = sorted({one for one in self._secrets if len(one) >= SHORTEST}, key=len, reverse=True)
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
        """A JSON value without secrets, in keys and in texts; what it holds of settings named like secrets is one."""
        named = set(_secret_settings(value))
        return (Redactor({*self._secrets, *named}) if named else self)._struck(value)

    def _struck(self, value: Any) -> Any:
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(name)): self._struck(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._struck(item) for item in value]
        return value


def _secret_settings(value: Any) -> Iterator[str]:
    """The texts that settings named like secrets are set to, wherever a JSON value shows one."""
    if isinstance(value, Mapping):
        about = next((told for key in _NAMES if isinstance(told := value.get(key), str)), "")
        for name, item in value.items():
            if environ.is_secret(str(name)) or (name in _VALUES and environ.is_secret(about)):
                yield from _texts(item)
            elif name != _TASK:
                yield from _secret_settings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secret_settings(item)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)
