"""The tool that looks at the machine: rl_health_check."""

from __future__ import annotations

from typing import Any

from halteres.agent.caller import Caller
from halteres.agent.tool import READS, Result, tool


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
    raise NotImplementedError
