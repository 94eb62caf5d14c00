"""The tool that looks at the machine: rl_health_check."""

from __future__ import annotations

from typing import Any

import halteres
from halteres.agent.caller import Caller
from halteres.agent.checks import machine_checks
from halteres.agent.fitting import clipped
from halteres.agent.known_models import KnownModel, known_models, proposed
from halteres.agent.tool import READS, Result, tool
from halteres.config.policies import load_policy
from halteres.errors import HalteresError
from halteres.next_step import worded
from halteres.runs.directory import active_runs
from halteres.runs.starting import machine
from halteres.runs.starting.preflight import Check

MOST_MODELS, MOST_RUNS, MOST_PROBLEMS, PROBLEM_LENGTH = 6, 8, 3, 160
"""An answer is short whatever there is; `halteres models list`, rl_list_runs and `halteres doctor` tell all."""


class Health(Result):
    """What there is to work with."""

    status: str  # ok, degraded
    version: str
    machine: dict[str, Any]  # cores, memory_gb, free_gb, gpu
    models: list[dict[str, Any]]  # base models: name, size, fits
    active_runs: list[str]
    policy: str
    problems: list[str] = []


@tool(title="Check the machine", hints=READS)
def rl_health_check(caller: Caller) -> Health:
    """Look at this machine: is Halteres ready, which base models fit, what runs, which policy holds."""
    there = machine.look()
    problems = [_problem(check) for check in machine_checks(there) if not check.ok]
    active = [run.run_id for run in active_runs()]
    told = Health(
        status="degraded" if problems else "ok",
        version=halteres.__version__,
        machine={
            "cores": there.cores,
            "memory_gb": machine.gb(there.memory.total),
            "free_gb": machine.gb(there.memory.free),
            "gpu": _gpu(there.gpu),
        },
        models=_brief(known_models(there=there)),
        active_runs=active[:MOST_RUNS],
        policy=_policy(),
        next=_next(active, problems),
    )
    if problems:
        told.problems = problems[:MOST_PROBLEMS]
    return told


def _brief(models: tuple[KnownModel, ...]) -> list[dict[str, Any]]:
    """Those that are here, the proposed one first; then the largest well-known one that would fit."""
    first = proposed(models)
    here = [first, *(model for model in models if model.present and model is not first)]
    told: list[dict[str, Any]] = [{"name": model.name, "fits": model.fits} for model in here[:MOST_MODELS]]
    told[0]["proposed"] = True
    absent = [model for model in models if not model.present and model.fits == "yes"]
    return told + [{"name": model.name, "fits": model.fits, "present": False} for model in absent[-1:]]


def _gpu(gpu: machine.Gpu | None) -> dict[str, Any] | None:
    return None if gpu is None else {"name": gpu.name, "free_gb": machine.gb(gpu.memory.free)}


def _policy() -> str:
    try:
        return load_policy().name
    except HalteresError:
        return "unreadable"  # told among the problems


def _problem(check: Check) -> str:
    return clipped(f"{check.name}: {check.found.rstrip('.')}. {check.remedy}".strip(), PROBLEM_LENGTH)


def _next(active: list[str], problems: list[str]) -> str:
    if problems:
        return "mend the problems, then rl_health_check()"
    return worded("rl_check_status", active[0]) if active else "rl_list_environments()"
