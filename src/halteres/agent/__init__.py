"""The agent's tools: one table, put on MCP, HTTP, the command line, Python, OpenAI's format and
Hermes.

    from halteres.agent import rl_list_environments, rl_start_training  # async, JSON in a text
    from halteres.agent import Tools                                    # async, dicts

Importing this package costs nothing: what is named here is loaded when it is asked for.
"""

# ruff: noqa: F405 - the names below are those of `transports.functions`

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halteres.agent.transports.functions import *  # noqa: F403

__all__ = [
    "Tools",
    "check_rl_api_keys",
    "check_rl_python_version",
    "get_missing_keys",
    "rl_check_status",
    "rl_compare_runs",
    "rl_edit_config",
    "rl_evaluate",
    "rl_evaluate_reward_model",
    "rl_get_current_config",
    "rl_get_logs",
    "rl_get_results",
    "rl_get_rollouts",
    "rl_health_check",
    "rl_list_environments",
    "rl_list_reward_models",
    "rl_list_runs",
    "rl_open_session",
    "rl_post_reward",
    "rl_rank_completions",
    "rl_score",
    "rl_select_environment",
    "rl_start_training",
    "rl_stop_training",
    "rl_test_inference",
    "rl_train_reward_model",
]


def __getattr__(name: str) -> Any:
    """Load what is named in `__all__` at its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("halteres.agent.transports.functions"), name)
