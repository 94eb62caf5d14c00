"""What makes sense next after a look at a run."""

from __future__ import annotations

from halteres.config import environ
from halteres.next_step import Advice, NextStep, then
from halteres.runs.reading.failures import mending
from halteres.runs.reading.report import FOR_GOOD, RunSnapshot

MOST_CHANGES = 8  # settings of a run that a proposed call sets again


def next_after(snapshot: RunSnapshot) -> Advice:
    """The call, or the calls, after a look at a run."""
    run_id, state = snapshot.run.run_id, snapshot.state
    results = NextStep.of("rl_get_results", run_id)
    match state.status:
        case "pending" | "starting":
            return NextStep.of(
                "rl_check_status", run_id, wait_s=snapshot.suggested_wait_s, until="running"
            )
        case "stopping":
            return until_it_ends(run_id)
        case "running":
            if call := snapshot.pressing.remedy.first if snapshot.pressing else None:
                return call
            # Wake at the end where it is near, else at the next evaluation, if there will be one.
            left_s, every = snapshot.progress.remaining_s, snapshot.given.trainer.eval_every
            is_near = left_s is not None and left_s < environ.longest_wait_s()
            if is_near or every <= 0 or (snapshot.step // every + 1) * every > state.total_steps:
                return until_it_ends(run_id)
            return NextStep.of(
                "rl_check_status", run_id, wait_s=snapshot.suggested_wait_s, until="eval"
            )
        case "completed":
            return results
        case "stopped":
            more = further(snapshot)
            return (results, " or ", more) if more else results
        case "failed":
            if fix := _fix(snapshot):
                return fix
            if state.code == "disk_full":
                return "make room, then ", resume_call(snapshot)
            # its own code, no setting of ours
            if snapshot.failed_process and snapshot.failed_process.process == "env":
                return then(NextStep.of("rl_get_logs", run_id, role="env"), resume_call(snapshot))
            return resume_call(snapshot)


def until_it_ends(run_id: str) -> NextStep:
    """Wait for the end, as long as a call may: it wakes at the end."""
    return NextStep.of(
        "rl_check_status", run_id, wait_s=int(environ.longest_wait_s()), until="terminal"
    )


def further(snapshot: RunSnapshot) -> NextStep | None:
    """What may follow upon a run that has ended: what an alert in force asks for, else going on;
    None: nothing.
    """
    state = snapshot.state
    if state.code == "policy_cap":
        return None  # it would be ended again at once
    if (call := _fix(snapshot)) or state.status == "completed":
        return call
    nothing_to_learn = snapshot.pressing is not None and state.status == "stopped"
    return resume_call(snapshot) if state.resumable and not nothing_to_learn else None


def _fix(snapshot: RunSnapshot) -> NextStep | None:
    """The call that is left of a remedy once its run has ended. A failure has its own, save where
    all is spoilt.
    """
    alert = snapshot.pressing
    if alert is None or (snapshot.state.status == "failed" and alert.rule not in FOR_GOOD):
        return None
    call = alert.remedy.after("rl_stop_training", "rl_get_results").first
    return call if call and (snapshot.state.resumable or "resume_from" not in call.args) else None


def resume_call(snapshot: RunSnapshot) -> NextStep:
    """Start again where it ended: from its checkpoint; where there is none, with the same
    settings.
    """
    state, run_id = snapshot.state, snapshot.run.run_id
    if state.kind == "reward":
        return NextStep.of("rl_train_reward_model", resume_from=run_id if state.resumable else None)
    changes = mending(state.code, snapshot.given)
    if state.resumable:
        return NextStep.of("rl_start_training", resume_from=run_id, changes=changes)
    given = snapshot.run.own_settings()
    changes = {**(given if len(given) <= MOST_CHANGES else {}), **changes}
    return NextStep.of("rl_start_training", environment=state.environment, changes=changes)
