"""Which call makes sense next: after a look at a run, and after a call that failed."""

from __future__ import annotations

from collections.abc import Container

from halteres.agent.run_snapshot import FOR_GOOD, RunSnapshot
from halteres.config import environ
from halteres.errors import HalteresError
from halteres.next_step import Advice, NextStep, Placeholder, then
from halteres.runs.reading.failures import mending

MOST_CHANGES = 8  # settings of a run that a proposed call sets again

LIST_RUNS, LIST_ENVIRONMENTS, HEALTH = (
    NextStep(f"rl_{name}") for name in ("list_runs", "list_environments", "health_check")
)


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


def next_call(
    name: str, error: HalteresError, draft: str | None = None, takes: Container[str] = ()
) -> Advice:
    """For the answer to a failed call: the error's own next step where it is a call, else by its
    code.

    Args:
        name: of the tool.
        error: that it failed with.
        draft: that the call named; None: the caller's own.
        takes: names of the tool's arguments.
    """
    details, own = error.details, error.next
    if own and not isinstance(own, str):
        return own
    guess = details.get("did_you_mean")  # instead of a name that nothing has
    match error.code:
        case "no_environment":
            return then(
                LIST_ENVIRONMENTS, NextStep.of("rl_select_environment", Placeholder("name"))
            )
        case "environment_not_found":
            return (
                NextStep.of("rl_select_environment", guess, draft=draft)
                if guess
                else LIST_ENVIRONMENTS
            )
        case "environment_broken":
            return "mend the file, then ", NextStep.of("rl_list_environments", refresh=True)
        case "unknown_field":
            return NextStep.of("rl_get_current_config", detail="full", draft=draft)
        case "locked_field":
            return NextStep.of("rl_get_current_config", draft=draft)
        case "invalid_config" if name == "rl_edit_config" and (field := details.get("field")):
            return NextStep.of("rl_get_current_config", field=field, draft=draft)
        case "invalid_config" if details.get("problems"):
            return f"call {name} again with the fields mended"
        case "run_not_found":
            # The same call, of the run that was meant: tools name a run, or runs, by different
            # arguments.
            argument = next(
                (one for one in ("run_id", "resume_from", "run_ids") if one in takes), None
            )
            if guess is None or argument is None:
                return LIST_RUNS
            return NextStep.of(name, **{argument: [guess] if argument == "run_ids" else guess})
        case "run_ambiguous":
            return LIST_RUNS
        case "run_unreadable":
            return (
                f"put back a copy of {details.get('path')} or move its folder away, then ",
                LIST_RUNS,
            )
        case "preflight_failed" if details.get("field") == "inference.model":
            return NextStep.of("rl_get_current_config", field="model", draft=draft)
        case "preflight_failed":
            return NextStep.of("rl_start_training", dry_run=True, draft=draft)
        case "policy_cap" if active := details.get("active_runs"):
            waiting = NextStep.of("rl_check_status", active[-1], wait_s=45, until="terminal")
            return waiting, " or ", NextStep.of("rl_stop_training", active[-1])
        case "policy_cap" if field := details.get("field"):
            return NextStep.of("rl_edit_config", field, details.get("limit"), draft=draft)
        case "policy_cap":
            return own or NextStep("rl_get_current_config")
        case "missing_key":
            return (
                f"set {details.get('field')} where these tools are started, then call {name} again"
            )
        case "disk_full":
            return HEALTH
        case "not_found" if environment := details.get("environment"):
            # a checkpoint is missing: start anew
            return NextStep.of("rl_start_training", environment=environment)
        case "not_found" | "conflict":
            return own or LIST_RUNS
        case _:
            return own or HEALTH
