"""Why a run that should train has no batch."""

from __future__ import annotations

import time
from collections.abc import Sequence

from halteres.clients import json_client
from halteres.errors import HalteresError
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.alerts import Alert
from halteres.runs.reading.progress import Progress
from halteres.runs.servers import servers_of
from halteres.runs.state import RunState
from halteres.short_texts import clipped

QUIET_S, QUIET_STEPS = 10.0, 2.0
"""So long, and for the time of so many steps, no figures came: a run between two steps is no run
without a batch.
"""

_WAITING = {("running", None), ("starting", "trainer"), ("starting", "environment")}
"""Status and phase of a run whose trajectory server is up and whose trainer is at work, or about to
be.
"""

GROUPS_FAILED = "groups_failed"
"""The rule of an environment whose groups all fail: the server sees only that none comes."""

ANSWER_WITHIN_S = 0.5
LENGTH = 160


def why_no_batch(
    run: RunDirectory, state: RunState, progress: Progress, alerts: Sequence[Alert], step: int
) -> str | None:
    """One sentence on a run that waits for a batch longer than its steps take; None for any
    other.
    """
    if not _waits(run, state, progress) or (server := servers_of(run).trajectories) is None:
        return None
    for alert in alerts:
        if alert.rule == GROUPS_FAILED and alert.step > step:
            return clipped(alert.evidence, LENGTH)
    try:
        found = json_client.get_json(f"{server.url}/v1/diagnostics", ANSWER_WITHIN_S, server.key)
    except HalteresError:
        return None
    if found.get("batch_ready") and not found.get("parked"):
        return None
    reasons = found.get("reasons")
    first = {}
    if isinstance(reasons, list) and reasons and isinstance(reasons[0], dict):
        first = reasons[0]
    sentence = found.get("why") or first.get("sentence")
    if isinstance(sentence, str) and sentence:
        return clipped(sentence, LENGTH)
    return None


def _waits(run: RunDirectory, state: RunState, progress: Progress) -> bool:
    """Whether the trainer wants batches, and has written no figures for a while."""
    if (state.status, state.phase) not in _WAITING:
        return False
    last = state.started_at or state.created_at
    try:
        metrics = (run.path / "metrics.jsonl").stat()
        if metrics.st_size:
            last = max(last, metrics.st_mtime)
    except OSError:
        pass
    return time.time() - last >= max(QUIET_S, QUIET_STEPS * (progress.step_s or 0.0))
