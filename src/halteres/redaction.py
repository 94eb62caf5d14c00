"""Secrets that must not leave this process: known values become `***` in every text, and so do the
passwords of addresses, known or not; in JSON also what settings named like secrets are set to. And
what a terminal must not get of a text that others wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from halteres.config import environ
from halteres.logins import STRUCK, passwords_in, without_logins

# a shorter value is no secret (`x`, `tml-x`, an empty one): striking it out would only garble texts
SHORTEST = 6

LONG = 16
"""A setting's value so long is searched for in other texts too; a shorter one only if it mixes
letters and digits.
"""

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.")
# half characters, too, which a terminal does not take
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

# a key whose value is a task of an environment: what is called `answer_key` in there is no setting
_TASK = "item"

_NO_SECRET = re.compile(
    r"(^|\.)key$|(^|[._])(answer|best|question|prompt|label|text|reference|sort)_key$"
    r"|(^|[._])(bos|eos|pad|unk|sep|cls|mask|stop|start|end|per|max|min|num)_token$",
    re.IGNORECASE,
)
"""Names that end like a secret's: a token of a tokenizer, a number of tokens, a column of a data
set.
"""

_NAMES, _VALUES = ("name", "field"), ("value", "current_value", "locked_value", "default", "got")
"""Keys by which an answer describes one setting: what it is called, what it is set to."""


def printable(text: str) -> str:
    """A text that others wrote, for a terminal or a page of Markdown: it moves no cursor, sets no
    title, hides nothing.

    >>> printable("10 %\\r\\x1b[32mdone\\x1b[0m\\x07")
    '10 %?done?'
    """
    return _CONTROL.sub("?", _ESCAPES.sub("", text))


_kept = set[str]()  # see `keep_secret`


def keep_secret(settings: Any) -> None:
    """Make the passwords of these settings' addresses known to this process, which from then on
    strikes them out of all that it and its children write, also where they stand without their
    address.
    """
    _kept.update(passwords_in(settings))


class Redactor:
    """Strikes out the values it was made with, and the passwords of addresses.

    >>> Redactor(["sk-12345678"]).text("key=sk-12345678!")
    'key=***!'
    >>> Redactor([]).text("http://any:KEY@HOST does not answer.")
    'http://any:***@HOST does not answer.'
    >>> config = {"env.judge_key": "sk-12345678"}
    >>> Redactor([]).json({"message": "Updated judge_key = sk-12345678", "config": config})
    {'message': 'Updated judge_key = ***', 'config': {'env.judge_key': '***'}}
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = frozenset(secrets)
        long_enough = [one for one in self._secrets if len(one) >= SHORTEST]
        # the longest first: one secret may begin with another
        long_enough.sort(key=len, reverse=True)
        self._pattern: re.Pattern[str] | None = None
        if long_enough:
            self._pattern = re.compile("|".join(map(re.escape, long_enough)))
        # characters; what a stream must hold back
        self.longest = max(map(len, long_enough), default=0)

    @classmethod
    def of_this_process(cls) -> Redactor:
        """For the values of this process's variables that are named like secrets, and those it was
        made to keep.
        """
        return cls((*environ.secrets().values(), *_kept))

    @property
    def secrets(self) -> frozenset[str]:
        """The values."""
        return self._secrets

    def text(self, text: str) -> str:
        """The text without secrets."""
        if self._pattern:
            text = self._pattern.sub(STRUCK, text)
        return without_logins(text)

    def json(self, value: Any) -> Any:
        """A JSON value without secrets, in keys and in texts; what it holds of settings named like
        secrets is one, and in its own place struck out whatever it is.
        """
        values = secret_values(value)
        redactor = self
        if values:
            redactor = Redactor({*self._secrets, *values})
        return redactor.in_place(value)

    def in_place(self, value: Any, *, in_task: bool = False) -> Any:
        """A JSON value of which each secret is struck out where it stands, and in no other text.
        `in_task`: no name in there is one of a setting.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            secret = set[Any]()
            if not in_task:
                secret = _secret_names(value)
            shown: dict[str, Any] = {}
            for name, item in value.items():
                if name in secret:
                    shown[self.text(str(name))] = _blank(item)
                else:
                    inside = in_task or name == _TASK
                    shown[self.text(str(name))] = self.in_place(item, in_task=inside)
            return shown
        if isinstance(value, list | tuple):
            return [self.in_place(item, in_task=in_task) for item in value]
        return value


def secret_values(value: Any) -> set[str]:
    """What settings named like secrets are set to in a JSON value, as far as it is a secret
    wherever it stands.

    >>> secret_values({"judge_key": "sk-12345678", "model": "tiny"})
    {'sk-12345678'}
    """
    return {text for text in _texts(_secret_settings(value)) if _is_unlike_a_word(text)}


def without_secrets(settings: Any) -> Any:
    """Settings as JSON for a file that others may read: their own secrets are struck out in their
    places, so that `logins.restored` can put each back.

    >>> without_secrets({"judge_key": "x", "model": "http://any:KEY@HOST", "note": "x"})
    {'judge_key': '***', 'model': 'http://any:***@HOST', 'note': 'x'}
    """
    return Redactor([]).in_place(settings)


def _secret_names(value: Mapping[Any, Any]) -> set[Any]:
    """Keys whose value is that of a setting named like a secret: by the key, or by the setting that
    this describes.
    """
    names = [value.get(key) for key in _NAMES]
    described = next((name for name in names if isinstance(name, str)), "")
    return {
        name
        for name in value
        if is_secret_setting(str(name)) or (name in _VALUES and is_secret_setting(described))
    }


def is_secret_setting(name: str) -> bool:
    """Whether a setting is named like a secret.

    >>> is_secret_setting("judge_key"), is_secret_setting("answer_key")
    (True, False)
    """
    return environ.is_secret(name) and not _NO_SECRET.search(name)


def _is_unlike_a_word(text: str) -> bool:
    """Whether a text is so unlike a word that it is a secret wherever it stands."""
    is_mixed = any(letter.isdigit() for letter in text) and any(letter.isalpha() for letter in text)
    return len(text) >= LONG or (len(text) >= SHORTEST and is_mixed)


def _blank(value: Any) -> Any:
    """A secret's value struck out; what is empty, a switch or a figure stays, and shows that it
    is.
    """
    if isinstance(value, Mapping):
        return {name: _blank(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_blank(item) for item in value]
    if value in (None, "") or isinstance(value, bool | float):
        return value
    return STRUCK


def _secret_settings(value: Any) -> list[Any]:
    """What settings named like secrets are set to, wherever a JSON value shows one."""
    if isinstance(value, Mapping):
        secret = _secret_names(value)
        others = [item for name, item in value.items() if name not in secret and name != _TASK]
        return [value[name] for name in secret] + [
            found for item in others for found in _secret_settings(item)
        ]
    if isinstance(value, list | tuple):
        return [found for item in value for found in _secret_settings(item)]
    return []


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
