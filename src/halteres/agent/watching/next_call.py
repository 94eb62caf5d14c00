"""What makes sense after a look at a run: the exact call.

Owns: the call for every state of a run; the one that goes on from a failure, with the settings that mend it.
Never: makes it.
"""

from __future__ import annotations

from halteres.agent.watching.current_alerts import FOR_GOOD, first_call, left_of
from halteres.agent.watching.look import Look
from halteres.agent.wording import worded
from halteres.config import environ
from halteres.runs.reading.failures import mending
from halteres.runs.reading.outcome import chosen

EDITS = 8


def next_after(look: Look) -> str:
    """The call, or the calls."""
    run_id = look.run.run_id
    match look.state.status:
        case "pending" | "starting":
            return worded("rl_check_status", run_id, wait_s=look.suggested_wait_s, until="running")
        case "stopping":
            return until_it_ends(run_id)
        case "running":
            return (look.pressing and first_call(look.pressing.remedy)) or _watching(look)
        case "completed":
            return worded("rl_get_results", run_id)
        case "stopped":
            results, more = worded("rl_get_results", run_id), further(look)
            return f"{results} or {more}" if more else results
        case "failed":
            return _remedy(look) or _mending(look)


def further(look: Look) -> str | None:
    """What may follow upon a run that has ended: what an alert in force asks for, else going on; None: nothing."""
    if look.state.code == "policy_cap":
        return None  # it would be ended again at once
    if (call := _remedy(look)) or look.state.status == "completed":
        return call
    nothing_to_learn = look.pressing is not None and look.state.status == "stopped"
    return going_on(look) if look.state.resumable and not nothing_to_learn else None


def _remedy(look: Look) -> str | None:
    """The call that is left of a remedy once its run has ended. A failure has its own, save where all is spoilt."""
    alert = look.pressing
    if alert is None or (look.state.status == "failed" and alert.rule not in FOR_GOOD):
        return None
    call = first_call(left_of(alert.remedy, "rl_stop_training", "rl_get_results"))
    return call if call and (look.state.resumable or "resume_from" not in call) else None


def going_on(look: Look) -> str:
    """Start again where it ended: from its checkpoint; where there is none, with the same settings."""
    if look.state.kind == "reward":
        return worded("rl_train_reward_model", **({"resume_from": look.run.run_id} if look.state.resumable else {}))
    changes = mending(look.state.code, look.given)
    if look.state.resumable:
        return worded("rl_start_training", resume_from=look.run.run_id, changes=changes)
    given = chosen(look.run)
    changes = {**(given if len(given) <= EDITS else {}), **changes}
    return worded("rl_start_training", environment=look.state.environment, changes=changes)


def _watching(look: Look) -> str:
    """Wake at the end where it is near, else at the next evaluation, if there will be one."""
    left, every = look.progress.remaining_s, look.given.trainer.eval_every
    if left is not None and left < environ.longest_wait_s():
        return until_it_ends(look.run.run_id)
    evaluates = every > 0 and (look.step // every + 1) * every <= look.state.total_steps
    if not evaluates:
        return until_it_ends(look.run.run_id)
    return worded("rl_check_status", look.run.run_id, wait_s=look.suggested_wait_s, until="eval")


def until_it_ends(run_id: str) -> str:
    """It wakes at the end: a longer wait costs nothing."""
    return worded("rl_check_status", run_id, wait_s=int(environ.longest_wait_s()), until="terminal")


def _mending(look: Look) -> str:
    if look.state.code == "disk_full":
        return f"make room, then {going_on(look)}"
    if look.failed_process and look.failed_process.process == "env":  # its own code: no setting of ours mends it
        return f"{worded('rl_get_logs', look.run.run_id, role='env')} then {going_on(look)}"
    return going_on(look)
