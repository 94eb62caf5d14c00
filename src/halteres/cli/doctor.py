"""`halteres doctor`: is this machine ready, and if not, what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from halteres.runs.starting.preflight import Check


def doctor() -> None:
    """Check Python, packages, models, policy, ports, memory and disk; exit code 1 where something is missing."""
    failed = 0
    for check in checks():
        failed += not check.ok
        typer.echo(f"{'ok ' if check.ok else 'NO '} {check.name:16} {check.found}")
        if not check.ok and check.remedy:
            typer.echo(f"    {'':16} {check.remedy}")
    if failed:
        raise typer.Exit(1)


def checks() -> Iterator[Check]:
    """Every finding, in the order a new user would meet them."""
    from halteres.agent.checks import machine_checks

    return machine_checks()
