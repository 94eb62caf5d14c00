"""The tool that starts training: rl_start_training."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from halteres.agent.arguments import Changes, Draft
from halteres.agent.caller import Caller
from halteres.agent.tool import Hints, Result, tool


class Check(BaseModel):
    """One thing that must be true; more keys tell the figures."""

    model_config = {"extra": "allow"}

    check: str
    ok: bool


class Started(Result):
    """A run that was started (seed keys), or, for a dry run: dry_run, ok, checks, estimate, config_diff."""

    run_id: str = ""
    status: str = ""
    environment: str = ""
    config: dict[str, Any] = {}
    wandb_project: str = ""
    wandb_run_name: str = ""
    config_path: str = ""
    logs: dict[str, str] = {}
    message: str = ""
    dry_run: bool = False
    ok: bool = True
    checks: list[Check] = []
    estimate: dict[str, Any] | None = None  # step_s, total_min: [low, high]; basis; peak_gb
    config_diff: dict[str, list[Any]] = {}


@tool(title="Start training", hints=Hints())
def rl_start_training(
    caller: Caller,
    environment: Annotated[
        str | None, Field(description="select this one first, as rl_select_environment does")
    ] = None,
    changes: Changes = None,
    dry_run: Annotated[bool, Field(description="only check, and estimate memory and time on this machine")] = False,
    name: Annotated[str | None, Field(description="readable name of the run", max_length=80)] = None,
    resume_from: Annotated[str | None, Field(description="run to go on from, at its newest checkpoint")] = None,
    idempotency_key: Annotated[
        str | None, Field(description="a repeated key answers with the first run", max_length=200)
    ] = None,
    draft: Draft = None,
) -> Started:
    """Start a training run with your draft's settings. It goes on by itself, whatever becomes of you.

    Test first with rl_test_inference and dry_run=true. Then watch with rl_check_status.
    """
    raise NotImplementedError
