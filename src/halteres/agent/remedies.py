"""What to call after an error: the rooms speak of commands, an agent needs calls.

Owns: the call that mends each kind of error.
Never: makes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from halteres.agent.wording import in_calls
from halteres.errors import HalteresError


def next_call(name: str, error: HalteresError) -> str:
    """One line for the answer to a failed call of tool `name`: the error's own where it is a call, else by its code."""
    if error.next.startswith("rl_"):
        return error.next
    by_code = _BY_CODE.get(error.code)
    return by_code(name, error) if by_code else error.next or "rl_health_check()"


def _environment(name: str, error: HalteresError) -> str:
    guess = error.details.get("did_you_mean")
    return f"rl_select_environment({json.dumps(guess)})" if guess else "rl_list_environments()"


def _run(name: str, error: HalteresError) -> str:
    guess = error.details.get("did_you_mean")
    return f"{name}(run_id={json.dumps(guess)})" if guess else "rl_list_runs()"


def _again(name: str, error: HalteresError) -> str:
    return f"{name}(...) again with the fields mended" if error.details.get("problems") else error.next


def _checked(name: str, error: HalteresError) -> str:
    is_model = error.details.get("field") == "inference.model"
    return 'rl_get_current_config(field="model")' if is_model else "rl_start_training(dry_run=true)"


def _capped(name: str, error: HalteresError) -> str:
    if active := error.details.get("active_runs"):
        run = json.dumps(active[-1])
        return f'rl_check_status({run}, wait_s=45, until="terminal") or rl_stop_training({run})'
    return f"rl_edit_config({json.dumps(error.details.get('field'))}, {error.details.get('limit')})"


_BY_CODE: Mapping[str, Callable[[str, HalteresError], str]] = {
    "no_environment": lambda name, error: "rl_list_environments() then rl_select_environment(name)",
    "environment_not_found": _environment,
    "environment_broken": lambda name, error: "mend the file, then rl_list_environments(refresh=true)",
    "unknown_field": lambda name, error: 'rl_get_current_config(detail="full")',
    "locked_field": lambda name, error: "rl_get_current_config()",
    "invalid_config": _again,
    "run_not_found": _run,
    "preflight_failed": _checked,
    "policy_cap": _capped,
    "missing_key": lambda name, error: f"set {error.details.get('field')} where these tools are started, then {name}()",
    "disk_full": lambda name, error: "rl_health_check()",
    "conflict": lambda name, error: in_calls(error.next) or "rl_list_runs()",
    "not_found": lambda name, error: in_calls(error.next) or "rl_list_runs()",
    "run_ambiguous": lambda name, error: "rl_list_runs()",
}
