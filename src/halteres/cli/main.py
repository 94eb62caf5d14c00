"""`halteres`: its verbs, each of which imports its rooms only when it is called; how an error
leaves the program.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

import halteres
from halteres.cli import (
    agents,
    chat,
    env,
    gateway,
    groups,
    models,
    reward,
    runs,
    serve,
    train,
    train_on_file,
)
from halteres.cli.output import AsJson, print_json, print_table, tool_answer
from halteres.config.environ import use_utf8
from halteres.errors import HalteresError
from halteres.logins import refused
from halteres.redaction import printable

_UsageError: Final[Any] = typer.BadParameter.__base__
"""click's, of which typer may have its own copy."""


class Verbs(TyperGroup):
    """The verbs. What is no verb, option or value of one is quoted without the login in it."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Read the first words."""
        with _without_logins():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Read the others, and run the verb."""
        with _without_logins():
            return super().invoke(ctx)


@contextmanager
def _without_logins() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        error.message = refused(error.message)
        raise


app = typer.Typer(
    name="halteres",
    cls=Verbs,
    help="Reinforcement-learning post-training of language models, self-hosted.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def doctor(as_json: AsJson = False) -> None:
    """Check Python, packages, models, policy, ports, memory and disk; exit code 1 where something
    is missing.
    """
    from halteres.agent.health import machine_checks

    checks = list(machine_checks())
    is_ready = all(check.ok for check in checks)
    if as_json:
        found = [
            {
                "check": check.name,
                "ok": check.ok,
                "found": check.found,
                "remedy": "" if check.ok else check.remedy,
            }
            for check in checks
        ]
        print_json({**tool_answer("rl_health_check"), "checks": found})
    else:
        rows: list[tuple[str, ...]] = []
        for check in checks:
            if check.ok:
                rows.append(("ok", check.name, check.found))
            else:
                rows += [("NO", check.name, check.found), ("", "", check.remedy)]
        print_table(("", "check", "found"), rows)
    if not is_ready:
        raise typer.Exit(1)


def version() -> None:
    """Print the version."""
    typer.echo(f"halteres {halteres.__version__}")


app.command("quickstart")(train.quickstart)
app.command("train")(train.train)
app.command("sft")(train_on_file.sft)
app.command("dpo")(train_on_file.dpo)
app.add_typer(serve.app, name="serve")
app.add_typer(env.app, name="env")
app.add_typer(gateway.app, name="gateway")
app.add_typer(runs.app, name="runs")
app.add_typer(models.app, name="models")
app.add_typer(serve.keys, name="keys")
app.add_typer(models.checkpoints, name="checkpoints")
app.add_typer(groups.app, name="groups")
app.add_typer(reward.app, name="reward")
app.command("export")(models.export)
app.command("watch")(train.watch)
app.command("rl", context_settings=serve.PASSED_ON)(agents.rl)
app.command("chat")(chat.chat)
app.command("doctor")(doctor)
app.command("init")(agents.init)
app.command("install-agent")(agents.install_agent)
app.command("mcp")(agents.mcp)
app.command("tools")(agents.tools)
app.command("ui")(serve.ui)
app.command("variables")(serve.variables)
app.command("version")(version)


@app.callback(invoke_without_command=True)
def _halteres(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Reinforcement-learning post-training of language models, self-hosted."""
    if show_version:
        version()
        raise typer.Exit


def main() -> None:
    """The console script."""
    use_utf8()
    try:
        app()
    except HalteresError as error:
        # .3 s: only where there is an error
        from halteres.agent.transports.command_line import for_person

        typer.echo(f"error: {printable(error.written(for_person))}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
