"""`python -m halteres.trajectories`: the trajectory server as a process.

Owns: its arguments, its exit code, its end when the database is lost.
Never: decides; serves anything but the loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from contextlib import closing
from pathlib import Path

import uvicorn

from halteres import process
from halteres.errors import HalteresError
from halteres.loopback import Server, open_listener, url_of
from halteres.trajectories.app import create_app
from halteres.trajectories.stores.sqlite import SqliteStore
from halteres.trajectories.stores.store import StoreFailed

log = logging.getLogger(__name__)

GRACE_S = 3
"""How long requests may take to end after SIGTERM."""


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    process.begin("api")
    arguments = _parser().parse_args(argv)
    try:
        serve(arguments.database, open_listener(arguments.port, arguments.listen_fd))
    except HalteresError as error:
        sys.stderr.write(f"error: {error.sentence}\n")
        return 1
    return 0


def serve(database: Path, listening: socket.socket) -> None:
    """Serve a database on a socket.

    Raises:
        Conflict, StoreFailed: the database cannot be opened.
        StoreFailed: it was lost on the way; whoever starts the process again finds what was acknowledged.
    """
    lost: list[StoreFailed] = []

    def end(failure: StoreFailed) -> None:
        lost.append(failure)
        server.end()

    with listening, closing(SqliteStore(database)) as store:
        config = uvicorn.Config(
            create_app(store, on_loss=end),
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_keep_alive=75,  # longer than the clients': who closes first leaves the other a broken request
            timeout_graceful_shutdown=GRACE_S,
        )
        server = Server(config)
        log.info("The trajectory server answers on %s (database %s).", url_of(listening), database)
        try:
            asyncio.run(server.serve(sockets=[listening]))
        except SystemExit:  # uvicorn's, when the app does not start; ours says why
            if not lost:
                raise
    if lost:
        raise lost[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m halteres.trajectories", description="The trajectory server.")
    parser.add_argument("--database", type=Path, required=True, help="SQLite file; made if missing")
    parser.add_argument("--port", type=int, default=8000, help="port on 127.0.0.1; 0: a free one")
    parser.add_argument("--listen-fd", type=int, help="inherited socket that listens already; --port is ignored")
    return parser


if __name__ == "__main__":
    sys.exit(main())
