"""Requests to v1/responses as harnesses really send them: `recorded_responses.json`, by package and
version, each a run of an agent with one tool; long texts of Codex's are cut. `tests/harnesses` runs
the packages, and compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .live_service import LiveService

RECORDED: dict[str, list[dict[str, Any]]] = json.loads(
    Path(__file__).with_suffix(".json").read_bytes()
)

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'
THINKS = f"<think>\nI add.\n</think>\n\nLet me see.\n{CALL}"
"""What the model of the recorded runs says first."""

SAYS_TO_RESULTS = "It is 42."
"""What it says once the tool has answered."""


def sent_to(scene: LiveService) -> list[dict[str, Any]]:
    """The bodies that were sent, in order."""
    rows = scene.rows("SELECT body FROM requests WHERE kind = 'generate' ORDER BY rowid")
    return [json.loads(body) for (body,) in rows]


def own(value: Any) -> Any:
    """Without what differs from request to request."""
    if isinstance(value, dict):
        drawn = ("id", "call_id", "item_id", "created_at", "completed_at")
        return {name: own(item) for name, item in value.items() if name not in drawn}
    if isinstance(value, list):
        return [own(item) for item in value]
    return value
