"""The keys by which clients of the seeds know a run.

Owns: those of a look at a run, what W&B calls it, where else its metrics are.
Never: leaves one out: such clients read them without asking whether they are there.
"""

from __future__ import annotations

from typing import Any

from halteres.agent.watching.look import Look
from halteres.observe.sinks import read_reports
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.lenient_settings import Given
from halteres.runs.reading.processes import SEED_ROLES, conditions
from halteres.runs.state import RunState

AILING = ("failing", "failed")
"""Health of a run whose logs are worth a look; rl_start_training has told where they are."""


def seed_facts(look: Look) -> dict[str, Any]:
    """The keys of the seeds that every look at a run tells."""
    return {
        "run_id": look.run.run_id,
        "status": look.state.status,
        "environment": look.state.environment,
        "running_time_minutes": look.minutes,
        "processes": conditions(look.state),
        **wandb_names(look.state, look.given),
        **sink_facts(look.run),
        "logs": {role: str(look.run.log(role)) for role in SEED_ROLES} if look.health in AILING else {},
        "metrics": look.metrics,
    }


def wandb_names(state: RunState, given: Given) -> dict[str, str]:
    """What W&B calls the run."""
    return {"wandb_project": given.run.project, "wandb_run_name": state.default_name}


def sink_facts(run: RunDirectory) -> dict[str, Any]:
    """Where the metrics are forwarded to: `wandb_url`; `wandb` and `wandb_error`, how that sink is; `sinks`, of each
    how it is and what to do."""
    reports = read_reports(run.path)
    wandb = reports.get("wandb")
    error = wandb.note if wandb and wandb.state == "failed" else None
    notes = {name: report.line for name, report in reports.items() if report.note and report.note != error}
    return {
        **({"wandb_url": wandb.url, "wandb": wandb.state} if wandb else {}),
        **({"wandb_error": error} if error else {}),
        **({"sinks": notes} if notes else {}),
    }
