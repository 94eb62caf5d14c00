"""What makes sense after a look at a run: the exact call.

Owns: the call for every state of a run; the one that goes on from a failure, with the settings that mend it.
Never: makes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from halteres.agent.watching.looking import Look
from halteres.agent.wording import worded
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.mending import mending

LONGEST_WAIT_S, EDITS = 50, 8


def next_after(look: Look) -> str:
    """The call, or the calls."""
    run_id = look.run.run_id
    match look.state.status:
        case "pending" | "starting":
            return worded("rl_check_status", run_id, wait_s=look.suggested_wait_s, until="running")
        case "stopping":
            return worded("rl_check_status", run_id, wait_s=look.suggested_wait_s, until="terminal")
        case "running":
            return _watching(look)
        case "completed":
            return worded("rl_get_results", run_id)
        case "stopped":
            results = worded("rl_get_results", run_id)
            may_go_on = look.state.resumable and look.state.code != "policy_cap"  # it would be ended again at once
            return f"{results} or {going_on(look)}" if may_go_on else results
        case "failed":
            return _mending(look)


def going_on(look: Look) -> str:
    """Start again where it ended: from its checkpoint; where there is none, with the same settings."""
    changes = mending(look.state.code, look.given)
    if look.state.resumable:
        return worded("rl_start_training", resume_from=look.run.run_id, changes=changes)
    changes = {**_edits(look.run), **changes}
    return worded("rl_start_training", environment=look.state.environment, changes=changes)


def _watching(look: Look) -> str:
    """Wake at the end where it is near, else at the next evaluation, if there will be one."""
    left, every = look.progress.remaining_s, look.given.trainer.eval_every
    if left is not None and left < LONGEST_WAIT_S:
        wait_s = min(LONGEST_WAIT_S, max(look.suggested_wait_s, math.ceil(left) + 5))
        return worded("rl_check_status", look.run.run_id, wait_s=wait_s, until="terminal")
    evaluates = every > 0 and (look.step // every + 1) * every <= look.state.total_steps
    until = "eval" if evaluates else "terminal"
    return worded("rl_check_status", look.run.run_id, wait_s=look.suggested_wait_s, until=until)


def _mending(look: Look) -> str:
    if look.state.code == "disk_full":
        return f"make room, then {going_on(look)}"
    if look.culprit and look.culprit.process == "env":  # its own code: no setting of ours mends it
        return f"{worded('rl_get_logs', look.run.run_id, role='env')} then {going_on(look)}"
    return going_on(look)


def _edits(run: RunDirectory) -> dict[str, Any]:
    """What was set by hand in that run, if it is little enough to write out."""
    try:
        told = json.loads((run.path / "config.resolved.json").read_bytes())
    except (OSError, ValueError):
        return {}
    fields: Mapping[str, Any] = told if isinstance(told, dict) else {}
    edits = {
        name: entry.get("value")
        for name, entry in fields.items()
        if isinstance(entry, dict) and entry.get("source") in ("edit", "file") and not name.startswith("run.")
    }
    return edits if len(edits) <= EDITS else {}
