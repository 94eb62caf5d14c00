"""What somebody chose for a run, as the `changes` of a new one.

Owns: which settings were given rather than found, and which of those a new run may be given too.
Never: reads what they were chosen from, judges them.
"""

from __future__ import annotations

import json
from typing import Any

from halteres.files import NOT_JSON, read_regular
from halteres.runs.directory import RunDirectory

_CHOSEN = ("file", "edit", "draft")

_ITS_OWN = ("run.environment", "run.name")
"""The environment is named beside `changes`, and refused among them; two runs of one name cannot be told apart."""


def chosen(run: RunDirectory) -> dict[str, Any]:
    """section.field -> value; nothing where the file that tells cannot be read."""
    try:
        told = json.loads(read_regular(run.path / "config.resolved.json"))
    except (OSError, *NOT_JSON):
        return {}
    rows = told.items() if isinstance(told, dict) else ()
    given = {name: row.get("value") for name, row in rows if isinstance(row, dict) and row.get("source") in _CHOSEN}
    return {name: value for name, value in given.items() if name not in _ITS_OWN}
