"""What to call after an error: its own next step, or by its kind.

Owns: the call that mends each kind of error that names none; a sentence where no call does.
Never: makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from halteres.errors import HalteresError
from halteres.next_step import NextStep, for_agents, worded


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A call that failed."""

    tool: str
    error: HalteresError
    draft: str | None  # that it named; None: the caller's own
    takes: Container[str]  # names of the tool's arguments

    @property
    def guess(self) -> str | None:
        """What was meant by the name that nothing has."""
        return self.error.details.get("did_you_mean")


def next_call(name: str, error: HalteresError, draft: str | None = None, takes: Container[str] = ()) -> str:
    """One line for the answer to a failed call: the error's own where it is a call, else by its code.

    Args:
        name: of the tool.
        error: that it failed with.
        draft: that the call named.
        takes: names of the tool's arguments.
    """
    if isinstance(error.next, NextStep):
        return error.next.for_agents
    by_code = _BY_CODE.get(error.code)
    if by_code is None:
        return error.next or "rl_health_check()"
    return by_code(Failed(tool=name, error=error, draft=draft, takes=takes))


def _environment(failed: Failed) -> str:
    if failed.guess is None:
        return "rl_list_environments()"
    return worded("rl_select_environment", failed.guess, draft=failed.draft)


def _run(failed: Failed) -> str:
    """The same call, of the run that was meant: tools name a run, or runs, by different arguments."""
    if failed.guess is None:
        return "rl_list_runs()"
    argument = next((one for one in ("run_id", "resume_from", "run_ids") if one in failed.takes), None)
    meant = [failed.guess] if argument == "run_ids" else failed.guess
    return worded(failed.tool, **{argument: meant}) if argument else "rl_list_runs()"


def _missing(failed: Failed) -> str:
    """Where it is a run's checkpoint that is missing, its environment is there, to start anew."""
    if environment := failed.error.details.get("environment"):
        return worded("rl_start_training", environment=environment)
    return for_agents(failed.error.next) or "rl_list_runs()"


def _again(failed: Failed) -> str:
    """What such a setting may be; where nothing may be selected yet, whose settings could be shown, a sentence."""
    details = failed.error.details
    if failed.tool == "rl_edit_config" and details.get("field"):
        return worded("rl_get_current_config", field=details["field"], draft=failed.draft)
    if details.get("problems"):
        return f"call {failed.tool} again with the fields mended"
    return for_agents(failed.error.next) or "rl_health_check()"


def _checked(failed: Failed) -> str:
    if failed.error.details.get("field") == "inference.model":
        return worded("rl_get_current_config", field="model", draft=failed.draft)
    return worded("rl_start_training", dry_run=True, draft=failed.draft)


def _capped(failed: Failed) -> str:
    details = failed.error.details
    if active := details.get("active_runs"):
        waiting = worded("rl_check_status", active[-1], wait_s=45, until="terminal")
        return f"{waiting} or {worded('rl_stop_training', active[-1])}"
    if details.get("field") is None:
        return for_agents(failed.error.next) or "rl_get_current_config()"
    return worded("rl_edit_config", details["field"], details.get("limit"), draft=failed.draft)


def _missing_key(failed: Failed) -> str:
    return f"set {failed.error.details.get('field')} where these tools are started, then call {failed.tool} again"


_BY_CODE: Mapping[str, Callable[[Failed], str]] = {
    "no_environment": lambda failed: "rl_list_environments() then rl_select_environment(name)",
    "environment_not_found": _environment,
    "environment_broken": lambda failed: "mend the file, then rl_list_environments(refresh=true)",
    "unknown_field": lambda failed: worded("rl_get_current_config", detail="full", draft=failed.draft),
    "locked_field": lambda failed: worded("rl_get_current_config", draft=failed.draft),
    "invalid_config": _again,
    "run_not_found": _run,
    "run_unreadable": lambda failed: (
        f"put back a copy of {failed.error.details.get('path')} or move its folder away, then rl_list_runs()"
    ),
    "preflight_failed": _checked,
    "policy_cap": _capped,
    "missing_key": _missing_key,
    "disk_full": lambda failed: "rl_health_check()",
    "conflict": lambda failed: for_agents(failed.error.next) or "rl_list_runs()",
    "not_found": _missing,
    "run_ambiguous": lambda failed: "rl_list_runs()",
}
