"""`halteres env`: list environments, run one, measure a policy on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from halteres.errors import EnvironmentFailed
from halteres.models import TINY

app = typer.Typer(help="List, serve and evaluate environments.", no_args_is_help=True)

Environment = Annotated[str, typer.Argument(help="Environment: a name or a file.")]


@app.command("list")
def list_() -> None:
    """Every environment that was found, and every file that could not be read."""
    from halteres.config.discovery import discover

    found = discover()
    for environment in found.environments:
        typer.echo(f"{environment.name:16} {environment.description}\n{'':16} {environment.file_path}")
    for broken in found.broken:
        typer.echo(f"broken: {broken.file_path}: {broken.why}", err=True)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(context: typer.Context, environment: Environment) -> None:
    """Run an environment against a trajectory server; further options (--config, --env.FIELD ...) are its own."""
    from halteres.config.discovery import find_environment

    file = find_environment(environment).file_path
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(file), "serve", *context.args])  # noqa: S606 - no shell


@app.command("eval")
def eval_(
    environment: Environment,
    run: Annotated[str | None, typer.Option("--run", help="Evaluate this run's newest weights.")] = None,
    model: Annotated[str, typer.Option(help="Base model, where no run is named.")] = TINY,
    tasks: Annotated[int, typer.Option(min=1, help="Held-out tasks.")] = 128,
    samples: Annotated[int, typer.Option(min=1, help="Samples a task at temperature 1.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a policy on held-out tasks, at temperature 1 and greedy."""
    from halteres.cli.chat import newest_policy
    from halteres.cli.served import served
    from halteres.config.discovery import find_environment
    from halteres.runs.directory import find_run

    file = Path(find_environment(environment).file_path)
    directory = find_run(run) if run else None
    base = directory.settings().inference.model if directory else model
    policy = newest_policy(directory) if directory else base
    with served(base, directory) as url:
        figures = evaluate(file, url, policy, base, {"eval_tasks": tasks, "eval_samples": samples})
    if as_json:
        typer.echo(json.dumps(figures))
        return
    for name, value in figures.items():
        typer.echo(f"{name:32} {value:.4f}" if isinstance(value, float) else f"{name:32} {value}")


def evaluate(file: Path, url: str, policy: str, base: str, env: dict[str, Any]) -> dict[str, Any]:
    """Run the file's `evaluate` verb against a service; its figures.

    Raises:
        EnvironmentFailed: it ended with an error; its last line is in the message.
    """
    from halteres.config import environ
    from halteres.models import builtin_path

    tokenizer = str(builtin_path(base) or base)
    config = {
        "env": {**env, "tokenizer_name": tokenizer, "use_wandb": False},
        "openai": [{"model_name": policy, "base_url": f"{url}/runs/eval/v1", "api_key": "x", "server_type": "sglang"}],
    }
    with tempfile.TemporaryDirectory(prefix="halteres-") as folder:
        settings = Path(folder) / "config.yaml"
        settings.write_text(yaml.safe_dump(config))
        command = [sys.executable, str(file), "evaluate", "--config", str(settings)]
        ended = subprocess.run(
            command, capture_output=True, text=True, env=environ.for_child(), timeout=3600, check=False
        )
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise EnvironmentFailed(f"{file.name} evaluate ended with exit code {ended.returncode}.", last)
    return json.loads(ended.stdout.strip().splitlines()[-1])
