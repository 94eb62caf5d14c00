"""The tools that judge runs: rl_get_results, rl_get_rollouts, rl_compare_runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from halteres.agent.arguments import RunId
from halteres.agent.caller import Caller
from halteres.agent.tool import READS, Result, tool


class Results(Result):
    """What a run has come to, so far or in the end."""

    run_id: str
    status: str
    environment: str
    wandb_project: str
    wandb_run_name: str
    wandb_url: str | None = None
    final_metrics: dict[str, Any] = {}
    baseline: dict[str, Any] = {}
    improvement: dict[str, Any] = {}  # metric -> {delta, ci95: [low, high]}
    history: list[dict[str, Any]] = []
    weights: dict[str, Any] = {}  # sampler, state, peft_dir, use
    checkpoints: list[dict[str, Any]] = []
    plot: str | None = None  # path of the PNG
    cost: dict[str, Any] = {}


class Rollouts(Result):
    """Rollouts of one step."""

    run_id: str
    step: int
    steps: list[int]  # first and last that there are
    rollouts: list[dict[str, Any]]  # prompt, completion, score, tokens, finish, group_scores


class Comparison(Result):
    """Runs side by side."""

    runs: list[dict[str, Any]]
    settings_that_differ: dict[str, dict[str, Any]]  # field -> run id -> value
    best: dict[str, Any] | None = None  # metric, run_id, why
    plot: str | None = None


@tool(title="Get a run's results", hints=READS)
def rl_get_results(
    caller: Caller,
    run_id: RunId = None,
    metrics: Annotated[list[str] | None, Field(description="names for the history; default: the headline ones")] = None,
    points: Annotated[int, Field(ge=2, le=50, description="rows of the history")] = 10,
    plot: Annotated[bool, Field(description="show the curves as a picture too")] = False,
) -> Results:
    """Get what a run has come to: final metrics, the gain over the untrained model with its confidence interval,
    history, weights and how to use them."""
    raise NotImplementedError


@tool(title="Read rollouts", hints=READS)
def rl_get_rollouts(
    caller: Caller,
    run_id: RunId = None,
    step: Annotated[int | None, Field(ge=0, description="default: the newest with rollouts")] = None,
    which: Annotated[Literal["best", "worst", "random"], Field(description="by score")] = "random",
    n: Annotated[int, Field(ge=1, le=3)] = 3,
) -> Rollouts:
    """Read what the policy answered and how it was scored: the way to see reward hacking and broken scorers."""
    raise NotImplementedError


@tool(title="Compare runs", hints=READS)
def rl_compare_runs(
    caller: Caller,
    run_ids: Annotated[list[str], Field(min_length=1, max_length=8)],
    metrics: Annotated[list[str] | None, Field(description="default: held-out share correct, reward")] = None,
    plot: Annotated[bool, Field(description="show the curves as a picture too")] = True,
) -> Comparison:
    """Compare runs: figures side by side, the settings that differ, which is better and whether that is certain."""
    raise NotImplementedError
