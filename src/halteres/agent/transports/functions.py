"""The tools as Python functions: `await rl_list_environments()` answers JSON in a text, as in seed
002.

Nothing here raises, unless Python refuses the call itself: what goes wrong is an answer with
`error`.
"""

from __future__ import annotations

import base64
import inspect
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ParamSpec, get_type_hints

from halteres.agent import table
from halteres.agent.call import call
from halteres.agent.tool import Caller, Tool
from halteres.config import environ
from halteres.config.operator_policy import load_policy
from halteres.errors import InvalidConfig

P = ParamSpec("P")


class Tools:
    """The tools, answering dicts, on one draft.

    >>> tools = Tools(draft="mine")
    >>> answer = await tools.call("rl_select_environment", name="gsm8k")  # doctest: +SKIP
    """

    def __init__(self, draft: str | None = None) -> None:
        if draft:
            self._caller = Caller(draft=draft)
        else:
            self._caller = Caller.own()

    async def call(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        """Call a tool. A failure is an answer with `error`, `code` and `next`."""
        return (await call(name, arguments, self._caller)).for_agents


def _function(tool: Tool[P]) -> Callable[P, Coroutine[Any, Any, str]]:
    """The tool as an async function of its own signature, without the caller."""
    types = get_type_hints(tool.function, include_extras=True)
    _, *parameters = inspect.signature(tool.function).parameters.values()
    typed = [parameter.replace(annotation=types[parameter.name]) for parameter in parameters]
    signature = inspect.Signature(typed, return_annotation=str)

    async def function(*args: P.args, **kwargs: P.kwargs) -> str:
        reply = await call(tool.name, signature.bind(*args, **kwargs).arguments, Caller.own())
        return json.dumps(reply.for_agents, ensure_ascii=False, indent=2)

    function.__annotations__ = {parameter.name: parameter.annotation for parameter in typed} | {
        "return": str
    }
    function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess] - what `help` shows
    function.__name__ = function.__qualname__ = tool.name
    function.__doc__ = tool.description
    return function


rl_list_environments = _function(table.rl_list_environments)
rl_select_environment = _function(table.rl_select_environment)
rl_get_current_config = _function(table.rl_get_current_config)
rl_edit_config = _function(table.rl_edit_config)
rl_score = _function(table.rl_score)
rl_test_inference = _function(table.rl_test_inference)
rl_start_training = _function(table.rl_start_training)
rl_check_status = _function(table.rl_check_status)
rl_stop_training = _function(table.rl_stop_training)
rl_get_results = _function(table.rl_get_results)
rl_evaluate = _function(table.rl_evaluate)
rl_list_runs = _function(table.rl_list_runs)
rl_health_check = _function(table.rl_health_check)
rl_get_logs = _function(table.rl_get_logs)
rl_get_rollouts = _function(table.rl_get_rollouts)
rl_compare_runs = _function(table.rl_compare_runs)
rl_list_reward_models = _function(table.rl_list_reward_models)
rl_train_reward_model = _function(table.rl_train_reward_model)
rl_evaluate_reward_model = _function(table.rl_evaluate_reward_model)
rl_rank_completions = _function(table.rl_rank_completions)
rl_open_session = _function(table.rl_open_session)
rl_post_reward = _function(table.rl_post_reward)


def base64_of(file: Path) -> str | None:
    """A PNG; None where it is gone: the answer names its path and says all without it."""
    try:
        return base64.b64encode(file.read_bytes()).decode()
    except OSError:
        return None


OLDEST_PYTHON = (3, 11)


def check_rl_python_version() -> bool:
    """Whether this Python is new enough."""
    return sys.version_info >= OLDEST_PYTHON


def check_rl_api_keys() -> bool:
    """Whether the tools can be used: the Python version, and keys where the policy in force asks
    for some.
    """
    return not get_missing_keys()


def get_missing_keys() -> list[str]:
    """What is missing, in words: a newer Python, or variables that the policy in force asks for.

    Source: seed 002. It hid the tools without two keys; policy `hermes-compat` asks for them again.
    """
    try:
        required = load_policy().require_keys.gate
    except InvalidConfig:
        # a policy that cannot be read hides no tool: each of them says what is wrong with it
        required = ()
    missing = [name for name in required if not environ.is_set(name)]
    if not check_rl_python_version():
        oldest, current = (
            ".".join(map(str, version[:2])) for version in (OLDEST_PYTHON, sys.version_info)
        )
        missing.insert(0, f"Python >= {oldest} (current: {current})")
    return missing
