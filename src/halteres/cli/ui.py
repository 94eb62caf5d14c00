"""`halteres ui`: the page."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from halteres.cli.serve import Port

if TYPE_CHECKING:
    import socket


def ui(
    port: Port = 8080,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser, if there is one.")] = True,
) -> None:
    """Open the page: runs, live curves, alerts, rollouts. Serves it until Ctrl-C, unless a server runs already."""
    from halteres.dashboard.access import check_ours, link, show
    from halteres.errors import Conflict
    from halteres.loopback import HOST, open_listener, url_of

    try:
        listening = open_listener(port)
    except Conflict:
        check_ours(port)
        listening = None
    address = link(url_of(listening) if listening else f"http://{HOST}:{port}")
    typer.echo(f"{address}\n(opens once, within ten minutes; `halteres ui` makes another link)")
    if browser:
        show(address)
    if listening:
        _serve(listening)


def _serve(listening: socket.socket) -> None:
    """Here and now: connections that were made meanwhile wait."""
    from halteres.agent.faces.http.__main__ import main

    sys.stdout.flush()
    sys.exit(main(["--listen-fd", str(listening.detach())]))
