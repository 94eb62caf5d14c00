"""`halteres quickstart`: the built-in model learns arithmetic, here and now."""

from __future__ import annotations

from typing import Annotated

import typer


def quickstart(
    steps: Annotated[int, typer.Option(min=2, help="Optimiser steps.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Seeds adapter, sampling and tasks.")] = 0,
) -> None:
    """Train the built-in model on arithmetic, on this machine, with no network and no key, and show what it learnt."""
    from halteres.cli.train import attend
    from halteres.config.files import resolve_settings
    from halteres.runs.starting import machine
    from halteres.runs.starting.start import start_run

    typer.echo(
        "Halteres quick start: the built-in model (0.9 M parameters) learns to work its sums instead of guessing."
    )
    if (unused := machine.look().unused_gpu) is not None:
        typer.echo(
            f"It runs on the CPU: the engine's path for {unused.name} is not verified yet (HALTERES_DEVICE=cuda)."
        )
    asked = resolve_settings("arithmetic", None, [f"trainer.total_steps={steps}", f"run.seed={seed}"])
    attend(start_run(asked.settings, sources=asked.sources).run_id)
