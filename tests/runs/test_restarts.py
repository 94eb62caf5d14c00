"""How often processes of a run were started again, from its events."""

from __future__ import annotations

from pathlib import Path

from halteres.observe.metrics import append_row
from halteres.runs.reading.failures import read_restarts


def test_restarts_are_counted_by_process(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    assert read_restarts(file) == {}
    for role in ("env", "engine", "env"):
        append_row(file, {"type": "process_exit", "role": role})
        append_row(file, {"type": "restart", "role": role, "attempt": 1, "of": 3})
    assert read_restarts(file) == {"env": 2, "engine": 1}
