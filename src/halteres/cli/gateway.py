"""`halteres gateway`: train the model behind an agent program, which stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from halteres.cli.output import AsJson

app = typer.Typer(
    help="Train the model behind a program that talks to OpenAI's or Anthropic's API.",
    no_args_is_help=True,
)


@app.command("run")
def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            help="The program and its arguments: what names a file here is given its whole path, "
            "{name} is replaced by that field of the task.",
        ),
    ],
    tasks: Annotated[
        Path, typer.Option("--tasks", help="JSON lines, a task each; or a folder with train, test.")
    ],
    reward: Annotated[
        str | None,
        typer.Option(
            "--reward",
            help="FILE.py or FILE.py:NAME of the reward function (NAME: reward). [default: 1 "
            "where the program ends with code 0]",
        ),
    ] = None,
    workspace: Annotated[
        Path | None, typer.Option("--workspace", help="Folder that is copied for every episode.")
    ] = None,
    edits: Annotated[
        list[str] | None,
        typer.Option("--set", help="One setting: trainer.total_steps=20, or total_steps=20."),
    ] = None,
    service: Annotated[
        str | None,
        typer.Option("--service", help="URL of a training service to use instead of starting one."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Start and return; the run goes on by itself.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train on tasks that a program plays, once for every rollout: `halteres train agent`."""
    from halteres.cli.train import train

    # episodes run in folders of their own
    whole = [str(Path(one).absolute()) if Path(one).is_file() else one for one in command]
    given = [f"env.tasks={tasks.expanduser().absolute()}", f"env.command={json.dumps(whole)}"]
    if reward is not None:
        given.append(f"env.reward={_function(reward)}")
    if workspace is not None:
        given.append(f"env.workspace={workspace.expanduser().absolute()}")
    edits = [*given, *(edits or [])]
    train("agent", edits=edits, service=service, detach=detach, as_json=as_json)


def _function(reward: str) -> str:
    """FILE.py:NAME with the whole path; a module's function as it is.

    >>> _function("package.rewards:exact")
    'package.rewards:exact'
    """
    place, colon, name = reward.rpartition(":")
    if not colon:
        place, name = reward, "reward"
    if place.endswith(".py"):
        place = str(Path(place).expanduser().absolute())
    return f"{place}:{name}"
