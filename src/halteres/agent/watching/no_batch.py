"""Why a run that stands still has no batch, in its environment's or its trajectory server's words.

Owns: from when on it is asked; how long it may take.
Never: raises; a server that is away leaves the answer without its sentence.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from halteres.agent.shortening import clipped
from halteres.agent.watching.look import Look
from halteres.clients import plain
from halteres.errors import HalteresError
from halteres.runs.servers import servers_of

QUIET_S, QUIET_STEPS = 10.0, 2.0
"""So long, and for the time of so many steps, nothing came of it: a run between two steps is no run without a batch."""

_WANTED = {("running", None), ("starting", "trainer"), ("starting", "environment")}
"""Status and phase of a run whose trajectory server is up and whose trainer is at work, or about to be."""

FAILING = "groups_failed"
"""What an environment notices whose groups all fail: the server sees only that none comes."""

ANSWER_WITHIN_S = 0.5
LENGTH = 160


def why_no_batch(look: Look) -> str | None:
    """One sentence, of a run that waits for a batch longer than its steps take; None of any other."""
    if not _waits(look) or (server := servers_of(look.run).trajectories) is None:
        return None
    if failing := next((alert for alert in look.alerts if alert.rule == FAILING and alert.step > look.step), None):
        return clipped(failing.evidence, LENGTH)
    try:
        told = plain.get_json(f"{server.url}/v1/diagnostics", ANSWER_WITHIN_S, server.key)
    except HalteresError:
        return None
    sentence = None if told.get("batch_ready") and not told.get("parked") else _sentence(told)
    return clipped(sentence, LENGTH) if sentence else None


def _waits(look: Look) -> bool:
    """Whether batches are wanted, and nothing has come of it for a while."""
    if (look.state.status, look.state.phase) not in _WANTED:
        return False
    quiet_s = max(QUIET_S, QUIET_STEPS * (look.progress.step_s or 0.0))
    return time.time() - _last_sign(look) >= quiet_s


def _last_sign(look: Look) -> float:
    """When figures were written last, or the run began; unix s."""
    began = look.state.started_at or look.state.created_at
    try:
        metrics = (look.run.path / "metrics.jsonl").stat()
    except OSError:
        return began
    return max(began, metrics.st_mtime) if metrics.st_size else began


def _sentence(told: Mapping[str, Any]) -> str | None:
    """The server's own summary, or its first reason."""
    reasons = told.get("reasons")
    first = reasons[0] if isinstance(reasons, list) and reasons and isinstance(reasons[0], dict) else {}
    sentence = told.get("why") or first.get("sentence")
    return sentence if isinstance(sentence, str) else None
