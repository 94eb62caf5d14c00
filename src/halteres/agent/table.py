"""The one table of tools, in the order in which an agent meets them."""

from __future__ import annotations

from halteres.agent.comparison import rl_compare_runs
from halteres.agent.configuration import (
    rl_edit_config,
    rl_get_current_config,
    rl_list_environments,
    rl_select_environment,
)
from halteres.agent.evaluation import rl_evaluate
from halteres.agent.gateway_sessions import rl_open_session, rl_post_reward
from halteres.agent.health import rl_health_check
from halteres.agent.logs import rl_get_logs
from halteres.agent.results import rl_get_results, rl_get_rollouts
from halteres.agent.reward_models import (
    rl_evaluate_reward_model,
    rl_list_reward_models,
    rl_rank_completions,
    rl_train_reward_model,
)
from halteres.agent.start_training import rl_start_training
from halteres.agent.status import rl_check_status, rl_list_runs
from halteres.agent.stop_training import rl_stop_training
from halteres.agent.trial.testing import rl_score, rl_test_inference

TOOLS = (
    rl_list_environments,
    rl_select_environment,
    rl_get_current_config,
    rl_edit_config,
    rl_score,
    rl_test_inference,
    rl_start_training,
    rl_check_status,
    rl_stop_training,
    rl_get_results,
    rl_evaluate,
    rl_list_runs,
    rl_health_check,
    rl_get_logs,
    rl_get_rollouts,
    rl_compare_runs,
    rl_list_reward_models,
    rl_train_reward_model,
    rl_evaluate_reward_model,
    rl_rank_completions,
    rl_open_session,
    rl_post_reward,
)

BY_NAME = {tool.name: tool for tool in TOOLS}
