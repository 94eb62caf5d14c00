"""Settings within settings.

Owns: a value put, or left out, some keys deep; when two settings say the same.
Never: knows how settings are written.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from halteres.agent.hosts.host import Edit, Keys, Put, Settings


def nested(keys: Keys, value: Any) -> Any:
    """The value below these keys.

    >>> nested(("a", "b"), 1)
    {'a': {'b': 1}}
    """
    for key in reversed(keys):
        value = {key: value}
    return value


def edited(settings: Settings, edits: Sequence[Edit]) -> Settings:
    """The settings after these edits."""
    settings = copy.deepcopy(settings)
    for edit in edits:
        inner = settings
        for key in edit.keys[:-1]:
            if not isinstance(inner.get(key), dict):
                inner[key] = {}
            inner = inner[key]
        if isinstance(edit, Put):
            inner[edit.keys[-1]] = edit.value
        else:
            inner.pop(edit.keys[-1], None)
    return settings


def same(one: Settings, other: Settings) -> bool:
    """Whether they say the same: a section without anything in it says nothing."""
    return _full(one) == _full(other)


def _full(settings: Settings) -> Settings:
    kept = {name: _full(value) if isinstance(value, dict) else value for name, value in settings.items()}
    return {name: value for name, value in kept.items() if value not in ({}, None)}
