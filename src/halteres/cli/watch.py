"""`halteres watch`: look at a run until it ends."""

from __future__ import annotations

from typing import Annotated

import typer


def watch(
    run: Annotated[
        str | None, typer.Argument(help="Run id (a unique beginning will do) or name. [default: the newest run]")
    ] = None,
) -> None:
    """Follow a run until it ends, whoever started it; Ctrl-C stops watching, the run goes on."""
    from rich.console import Console

    from halteres.cli.follow import follow
    from halteres.cli.summary import tell
    from halteres.errors import NotFound
    from halteres.runs.directory import find_run, list_runs

    runs = list_runs() if run is None else [find_run(run)]
    if not runs:
        raise NotFound("There is no run to watch.", "", "Try: halteres quickstart")
    console = Console(highlight=False)
    tell(runs[0], follow(runs[0], console, may_stop=False), console)
