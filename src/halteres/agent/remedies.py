"""What to call after an error: the rooms speak of commands, an agent needs calls.

Owns: the call that mends each kind of error.
Never: makes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

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


_BY_CODE: Mapping[str, Callable[[str, HalteresError], str]] = {
    "no_environment": lambda name, error: "rl_list_environments() then rl_select_environment(name)",
    "environment_not_found": _environment,
    "environment_broken": lambda name, error: "mend the file, then rl_list_environments(refresh=true)",
    "unknown_field": lambda name, error: 'rl_get_current_config(detail="full")',
    "locked_field": lambda name, error: "rl_get_current_config()",
    "invalid_config": _again,
    "run_not_found": _run,
    "run_ambiguous": lambda name, error: "rl_list_runs()",
}
