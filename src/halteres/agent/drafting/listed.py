"""All settings in one answer that is not too long to read.

Owns: what a list of all of them leaves out of each (one by one they are told in full); for whose descriptions there is
room.
Never: leaves out a setting, or a key of the seeds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from halteres.agent.drafting.fields import Setting
from halteres.environments.config import BaseEnvConfig

CHARACTERS = 7500
"""Of the list, where there are not more settings than that has room for."""

LEFT_OUT = ("section", "range", "why")


def listed(settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """A row for each. Descriptions are told whole or not at all: first those that only this file tells."""
    whole = [{name: fact for name, fact in one.full.items() if name not in LEFT_OUT} for one in settings]
    rows = [{**row, "description": ""} for row in whole]
    room = CHARACTERS - sum(len(json.dumps(row, separators=(",", ":"), default=str)) + 1 for row in rows)
    for place in sorted(range(len(settings)), key=lambda place: _rank(settings[place])):
        description = str(whole[place]["description"])
        if len(description) <= room:
            rows[place]["description"] = description
            room -= len(description)
    return rows


def _rank(setting: Setting) -> int:
    section, _, field = setting.key.partition(".")
    if section == "env" and field not in BaseEnvConfig.model_fields:
        return 0
    return 1 if setting.is_headline else 2 if setting.lock is None else 3
