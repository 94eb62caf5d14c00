"""Which call makes sense after one that failed, and how a refused one is mended."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from halteres.config.edits import ANYTHING, Edit
from halteres.errors import HalteresError, InvalidConfig
from halteres.next_step import Advice, NextStep, Placeholder, then

LONGEST_CALL = 600  # characters of a call that an error offers

LIST_RUNS, LIST_ENVIRONMENTS, HEALTH = (
    NextStep(f"rl_{name}") for name in ("list_runs", "list_environments", "health_check")
)


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
            if guess:
                return NextStep.of("rl_select_environment", guess, draft=draft)
            return LIST_ENVIRONMENTS
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


def mend(error: InvalidConfig, tool: str, changes: Mapping[str, Any], **arguments: Any) -> None:
    """Say in the error of a refused edit that nothing was changed, and which call would not be
    refused.
    """
    if error.details.get("problems") and error.details.get("field"):
        error.why = f"{error.why} Nothing was changed.".strip()
        error.next = mended_call(error, tool, changes, **arguments) or error.next


def mended_call(
    error: HalteresError, tool: str, changes: Mapping[str, Any], **arguments: Any
) -> NextStep | None:
    """The call with every suggestion followed; None where a problem has none."""
    typed = {name: ANYTHING.value_of(value) for name, value in changes.items()}
    changes = {**typed, **error.details.get("coerced", {})}
    mended = dict(changes)
    for problem in error.details.get("problems") or ():
        name = next(
            (one for one in changes if problem["field"] in (one, Edit(name=one, value=None).key)),
            None,
        )
        guess, suggested = problem.get("did_you_mean"), problem.get("suggest")
        if guess and name:
            mended[guess] = mended.pop(name)
        elif suggested:
            mended[name or problem["field"].removeprefix("env.")] = suggested[0]
        else:
            return None
    step = NextStep(tool, {**arguments, "changes": mended})
    if mended and len(step.call) <= LONGEST_CALL:
        return step
    return None
