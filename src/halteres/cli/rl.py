"""`halteres rl`: the agent's tools, one command each."""

from __future__ import annotations

import typer

PASSED_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
"""Every word, --help too, belongs to the tools' own commands; they are read off the table when one is wanted."""


def rl(context: typer.Context) -> None:
    """Call the agent's tools: find, configure, test, start, watch, judge (`halteres rl --help` lists them)."""
    from halteres import process
    from halteres.agent.faces.cli import tools_app

    process.block_torch()
    tools_app()(args=context.args, prog_name="halteres rl")
