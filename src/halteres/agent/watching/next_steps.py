"""Which call makes sense next: after a look at a run, and after a call that failed."""

from __future__ import annotations

from collections.abc import Container

from halteres.agent.watching.look import FOR_GOOD, Look
from halteres.config import environ
from halteres.errors import HalteresError
from halteres.next_step import NextStep, worded
from halteres.runs.reading.failures import mending

MOST_CHANGES = 8
"""Settings of a run that a proposed call sets again."""


def next_after(look: Look) -> str:
    """The call, or the calls, after a look at a run."""
    run_id, state = look.run.run_id, look.state
    match state.status:
        case "pending" | "starting":
            return worded("rl_check_status", run_id, wait_s=look.suggested_wait_s, until="running")
        case "stopping":
            return until_it_ends(run_id)
        case "running":
            call = look.pressing.remedy.first if look.pressing else None
            return call.call if call else _watching(look)
        case "completed":
            return worded("rl_get_results", run_id)
        case "stopped":
            results, more = worded("rl_get_results", run_id), further(look)
            return f"{results} or {more}" if more else results
        case "failed":
            if remedy := _remedy(look):
                return remedy
            if state.code == "disk_full":
                return f"make room, then {resume_call(look)}"
            if (
                look.failed_process and look.failed_process.process == "env"
            ):  # its own code: no setting of ours mends it
                return f"{worded('rl_get_logs', run_id, role='env')} then {resume_call(look)}"
            return resume_call(look)


def _watching(look: Look) -> str:
    """Wake at the end where it is near, else at the next evaluation, if there will be one."""
    left_s, every = look.progress.remaining_s, look.given.trainer.eval_every
    is_near = left_s is not None and left_s < environ.longest_wait_s()
    if is_near or every <= 0 or (look.step // every + 1) * every > look.state.total_steps:
        return until_it_ends(look.run.run_id)
    return worded("rl_check_status", look.run.run_id, wait_s=look.suggested_wait_s, until="eval")


def until_it_ends(run_id: str) -> str:
    """Wait for the end, as long as a call may: it wakes at the end."""
    return worded("rl_check_status", run_id, wait_s=int(environ.longest_wait_s()), until="terminal")


def further(look: Look) -> str | None:
    """What may follow upon a run that has ended: what an alert in force asks for, else going on; None: nothing."""
    if look.state.code == "policy_cap":
        return None  # it would be ended again at once
    if (call := _remedy(look)) or look.state.status == "completed":
        return call
    nothing_to_learn = look.pressing is not None and look.state.status == "stopped"
    return resume_call(look) if look.state.resumable and not nothing_to_learn else None


def _remedy(look: Look) -> str | None:
    """The call that is left of a remedy once its run has ended. A failure has its own, save where all is spoilt."""
    alert = look.pressing
    if alert is None or (look.state.status == "failed" and alert.rule not in FOR_GOOD):
        return None
    call = alert.remedy.after("rl_stop_training", "rl_get_results").first
    return call.call if call and (look.state.resumable or "resume_from" not in call.args) else None


def resume_call(look: Look) -> str:
    """Start again where it ended: from its checkpoint; where there is none, with the same settings."""
    state, run_id = look.state, look.run.run_id
    if state.kind == "reward":
        return worded("rl_train_reward_model", resume_from=run_id if state.resumable else None)
    changes = mending(state.code, look.given)
    if state.resumable:
        return worded("rl_start_training", resume_from=run_id, changes=changes)
    given = look.run.own_settings()
    changes = {**(given if len(given) <= MOST_CHANGES else {}), **changes}
    return worded("rl_start_training", environment=state.environment, changes=changes)


def next_call(name: str, error: HalteresError, draft: str | None = None, takes: Container[str] = ()) -> str:
    """One line for the answer to a failed call: the error's own next step where it is a call, else by its code.

    Args:
        name: of the tool.
        error: that it failed with.
        draft: that the call named; None: the caller's own.
        takes: names of the tool's arguments.
    """
    if isinstance(error.next, NextStep):
        return error.next.for_agents
    details, own = error.details, error.next
    meant = details.get("did_you_mean")  # instead of a name that nothing has
    match error.code:
        case "no_environment":
            return "rl_list_environments() then rl_select_environment(name)"
        case "environment_not_found":
            return worded("rl_select_environment", meant, draft=draft) if meant else "rl_list_environments()"
        case "environment_broken":
            return "mend the file, then rl_list_environments(refresh=true)"
        case "unknown_field":
            return worded("rl_get_current_config", detail="full", draft=draft)
        case "locked_field":
            return worded("rl_get_current_config", draft=draft)
        case "invalid_config":
            if name == "rl_edit_config" and details.get("field"):
                return worded("rl_get_current_config", field=details["field"], draft=draft)
            return (
                f"call {name} again with the fields mended" if details.get("problems") else own or "rl_health_check()"
            )
        case "run_not_found":
            # The same call, of the run that was meant: tools name a run, or runs, by different arguments.
            argument = next((one for one in ("run_id", "resume_from", "run_ids") if one in takes), None)
            if meant is None or argument is None:
                return "rl_list_runs()"
            return worded(name, **{argument: [meant] if argument == "run_ids" else meant})
        case "run_ambiguous":
            return "rl_list_runs()"
        case "run_unreadable":
            return f"put back a copy of {details.get('path')} or move its folder away, then rl_list_runs()"
        case "preflight_failed" if details.get("field") == "inference.model":
            return worded("rl_get_current_config", field="model", draft=draft)
        case "preflight_failed":
            return worded("rl_start_training", dry_run=True, draft=draft)
        case "policy_cap":
            if active := details.get("active_runs"):
                waiting = worded("rl_check_status", active[-1], wait_s=45, until="terminal")
                return f"{waiting} or {worded('rl_stop_training', active[-1])}"
            if details.get("field") is None:
                return own or "rl_get_current_config()"
            return worded("rl_edit_config", details["field"], details.get("limit"), draft=draft)
        case "missing_key":
            return f"set {details.get('field')} where these tools are started, then call {name} again"
        case "disk_full":
            return "rl_health_check()"
        case "not_found" if environment := details.get("environment"):
            return worded("rl_start_training", environment=environment)  # a run's checkpoint is missing: start anew
        case "not_found" | "conflict":
            return own or "rl_list_runs()"
        case _:
            return own or "rl_health_check()"
