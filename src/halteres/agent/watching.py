"""The tools that watch and stop runs: rl_check_status, rl_stop_training, rl_list_runs, rl_get_logs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from halteres.agent.arguments import RunId, WaitSeconds
from halteres.agent.caller import Caller
from halteres.agent.tool import READS, Hints, Result, tool


class Looked(Result):
    """A run as it is now; where it failed also error, code, exit, log_tail, last_checkpoint."""

    run_id: str
    status: str = ""
    state: str = ""  # in W&B's words: running, finished, crashed
    phase: str | None = None
    environment: str = ""
    step: int = 0
    total_steps: int = 0
    running_time_minutes: float = 0
    eta_minutes: list[float] | None = None  # [low, high]
    processes: dict[str, str] = {}  # api, trainer, env and more: "running", "exited (N)", "not started"
    wandb_project: str = ""
    wandb_run_name: str = ""
    wandb_url: str | None = None
    logs: dict[str, str] = {}
    metrics: dict[str, Any] = {}  # step, reward_mean, percent_correct, eval_percent_correct, loss, kl
    trend: dict[str, Any] = {}
    alerts: list[dict[str, Any]] = []
    health: str = ""
    woke: str | None = None
    suggested_wait_s: float = 0
    rate_limited: bool = False


class Stopped(Result):
    """A run that was asked to stop."""

    message: str
    run_id: str = ""
    status: str = ""


class Runs(Result):
    """Runs, newest first. One is {run_id, name, environment, status, wandb_run_name, step, total_steps, reward,
    started, minutes}."""

    runs: list[dict[str, Any]]
    count: int  # of all that fit, also where fewer are listed


class Logs(Result):
    """The end of one log."""

    run_id: str
    role: str
    file: str
    lines: list[str]
    roles: list[str]  # whose logs there are


@tool(title="Look at a run", hints=READS)
async def rl_check_status(
    caller: Caller,
    run_id: RunId = None,
    wait_s: WaitSeconds = 0,
    until: Annotated[
        str | None,
        Field(description='wake at "terminal", "running", "eval", "alert", "change" or "step>=N"; default "change"'),
    ] = None,
) -> Looked:
    """Look at a run: state, step, reward, trend, alerts with remedies, time left. Waits up to `wait_s` for `until`."""
    raise NotImplementedError


@tool(title="Stop a run", hints=Hints(destructive=True, idempotent=True))
async def rl_stop_training(
    caller: Caller,
    run_id: RunId = None,
    mode: Annotated[
        Literal["now", "after_step"], Field(description="now: interrupt the step; both write a checkpoint")
    ] = "now",
) -> Stopped:
    """Stop a run with a checkpoint, so that it can be resumed. Safe to repeat: an ended run answers with its state."""
    raise NotImplementedError


@tool(title="List runs", hints=READS)
def rl_list_runs(
    caller: Caller,
    status: Annotated[str | None, Field(description="only those: active, running, completed, failed, stopped")] = None,
    limit: Annotated[int, Field(ge=1, le=200)] = 20,
) -> Runs:
    """List runs, newest first, also those that others started."""
    raise NotImplementedError


@tool(title="Read a log", hints=READS)
def rl_get_logs(
    caller: Caller,
    run_id: RunId = None,
    role: Annotated[
        str | None, Field(description="service, engine, api, trainer, env, eval, supervisor; default: whoever failed")
    ] = None,
    lines: Annotated[int, Field(ge=1, le=40)] = 20,
    grep: Annotated[str | None, Field(description="only lines that hold this text or match this pattern")] = None,
) -> Logs:
    """Read the last lines of one process's log."""
    raise NotImplementedError
