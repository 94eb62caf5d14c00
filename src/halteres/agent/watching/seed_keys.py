"""The keys by which clients of the seeds know a run.

Owns: those of a look at a run, and what W&B would call it.
Never: leaves one out: such clients read them without asking whether they are there.
"""

from __future__ import annotations

from typing import Any

from halteres.agent.watching.look import Look
from halteres.config import environ
from halteres.runs.reading.lenient_settings import Given
from halteres.runs.reading.processes import SEED_ROLES, conditions
from halteres.runs.state import RunState


def seed_facts(look: Look) -> dict[str, Any]:
    """The keys of the seeds that every look at a run tells."""
    return {
        "run_id": look.run.run_id,
        "status": look.state.status,
        "environment": look.state.environment,
        "running_time_minutes": look.minutes,
        "processes": conditions(look.state),
        **wandb_names(look.state, look.given),
        "logs": {role: str(look.run.log(role)) for role in SEED_ROLES},
        "metrics": look.metrics,
    }


def wandb_names(state: RunState, given: Given) -> dict[str, str | None]:
    """What W&B would call the run; no URL, for nothing is ever read from there."""
    project = given.run.wandb_project or environ.wandb_project()
    return {"wandb_project": project, "wandb_run_name": f"{state.environment}-{state.run_id}", "wandb_url": None}
