"""Processes of a run that died and were started again.

Owns: counting them, from events.jsonl.
Never: starts one.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from halteres.observe.metrics import read_rows

EVENT = "restart"


def read_restarts(events: Path) -> dict[str, int]:
    """Role -> how often it was started again; none where nothing was."""
    return dict(Counter(str(row.get("role")) for row in read_rows(events) if row.get("type") == EVENT))
