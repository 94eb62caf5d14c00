"""Prompts that a person picks in a host: train, debug_run, write_environment; and what a host tells its model about the
tools as a whole.

Owns: their texts and arguments.
Never: calls a tool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mcp_types as types
from mcp.server import ServerRequestContext
from mcp.shared.exceptions import MCPError

from halteres.agent.untrusted import RULE

INSTRUCTIONS = f"""\
Halteres trains language models by reinforcement learning on this machine; no account or key is needed.
The path: rl_list_environments, rl_select_environment, rl_test_inference (trainable?), \
rl_start_training(dry_run=true), rl_start_training, rl_check_status until it has ended, rl_get_results. \
Or at once: rl_start_training(environment=..., changes={{...}}).
The `next` of every answer, errors too, holds the call that makes sense then.
Wait with rl_check_status(run_id, wait_s=45, until="...") instead of asking again and again. \
A run goes on without you: rl_list_runs finds it, from any session.
What you select and edit is a draft of your own; `draft` in an answer is its handle, to go on with it elsewhere.
{RULE}
Read rl_get_rollouts before you trust a reward that rises."""


Context = ServerRequestContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt; `text` has a place for each argument, which `arguments` describes."""

    name: str
    title: str
    arguments: Mapping[str, str]
    defaults: Mapping[str, str]  # of those that may be left out
    text: str


PROMPTS = (
    Prompt(
        name="train",
        title="Train a model",
        arguments={"environment": "what to train on", "goal": "when it is good enough"},
        defaults={
            "environment": "the one that fits best",
            "goal": "a held-out gain whose confidence interval excludes 0",
        },
        text="""\
Train a model with the rl_* tools. Environment: {environment}. Goal: {goal}.
1. rl_health_check, rl_list_environments, rl_select_environment.
2. rl_test_inference: go on only if it is trainable; else change the difficulty, group_size or max_token_length.
3. rl_start_training(dry_run=true): settle its problems and mind its estimate. Then rl_start_training().
4. rl_check_status(run_id, wait_s=45, until="eval") until it has ended. Act on alerts as their remedy says.
5. Read rl_get_rollouts(which="best"): is the reward earned? Then rl_get_results, and tell gain, interval, weights.""",
    ),
    Prompt(
        name="debug_run",
        title="Find out what is wrong with a run",
        arguments={"run_id": "the run"},
        defaults={"run_id": "the newest that failed or has an alert (rl_list_runs)"},
        text="""\
Find out what is wrong with a training run, and mend it. Run: {run_id}.
1. rl_check_status: state, error, code, alerts, trend. An error's and an alert's remedy comes first.
2. It failed: rl_get_logs of the process that ended. It learns nothing: rl_get_rollouts(which="worst"), then "best":
   are answers cut off, unparsed, or scored wrongly? Is the reward earned or hacked?
3. Change one thing: settings with rl_start_training(resume_from=..., changes=...), or the environment's scorer.
4. rl_compare_runs of before and after. Say what was wrong, what you changed, what it brought.""",
    ),
    Prompt(
        name="write_environment",
        title="Write an environment",
        arguments={"task": "what the model is to learn"},
        defaults={},
        text="""\
Write a reinforcement-learning environment. The model is to learn: {task}.
1. rl_list_environments; read the file of the one that is nearest and copy it under a new name.
2. Tasks: many, of mixed difficulty, with held-out ones for evaluation. The scorer: deterministic, strict about form,
   silent about the answer; partial credit only where it cannot be farmed.
3. rl_select_environment(file), rl_test_inference: half-right groups teach most. All right or all wrong: change the
   difficulty.
4. rl_start_training(changes={{"total_steps": 20}}), then rl_get_rollouts(which="best"): look for hacking.""",
    ),
)

BY_NAME = {prompt.name: prompt for prompt in PROMPTS}


async def listed(_: Context, __: types.PaginatedRequestParams | None) -> types.ListPromptsResult:
    """All prompts."""
    return types.ListPromptsResult(prompts=[_described(prompt) for prompt in PROMPTS])


async def get(_: Context, params: types.GetPromptRequestParams) -> types.GetPromptResult:
    """One prompt, filled in.

    Raises:
        MCPError: there is no such prompt, or an argument is missing.
    """
    prompt = BY_NAME.get(params.name)
    if prompt is None:
        raise MCPError(types.INVALID_PARAMS, f"There is no prompt '{params.name}'; there are {', '.join(BY_NAME)}.")
    given = {name: value for name, value in (params.arguments or {}).items() if value.strip()}
    missing = sorted(set(prompt.arguments) - set(prompt.defaults) - set(given))
    if missing:
        raise MCPError(types.INVALID_PARAMS, f"The prompt '{prompt.name}' needs: {', '.join(missing)}.")
    text = prompt.text.format(**{**prompt.defaults, **given})
    message = types.PromptMessage(role="user", content=types.TextContent(text=text))
    return types.GetPromptResult(description=prompt.title, messages=[message])


def _described(prompt: Prompt) -> types.Prompt:
    arguments = [
        types.PromptArgument(name=name, description=what, required=name not in prompt.defaults)
        for name, what in prompt.arguments.items()
    ]
    return types.Prompt(name=prompt.name, title=prompt.title, arguments=arguments)
