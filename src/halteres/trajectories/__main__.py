"""`python -m halteres.trajectories`: the trajectory server as a process.

Owns: its arguments, its socket, its exit code.
Never: binds anything but 127.0.0.1.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from pathlib import Path

import uvicorn

from halteres import process
from halteres.errors import Conflict, HalteresError
from halteres.trajectories.app import create_app
from halteres.trajectories.sqlite import SqliteStore

HOST = "127.0.0.1"

GRACE_S = 3
"""How long requests may take to end after SIGTERM."""


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    process.begin("api")
    arguments = _parser().parse_args(argv)
    try:
        serve(arguments.database, listen(arguments.port, arguments.listen_fd))
    except KeyboardInterrupt:  # uvicorn ended in order on SIGINT and raises it anew
        return 0
    except HalteresError as error:
        sys.stderr.write(f"error: {error.sentence}\n")
        return 1
    return 0


def listen(port: int, descriptor: int | None) -> socket.socket:
    """A listening socket on the loopback: the inherited one, or a new one on `port`.

    Raises:
        Conflict: the port is taken.
    """
    if descriptor is not None:
        return socket.socket(fileno=descriptor)
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((HOST, port))
    except OSError as error:
        bound.close()
        raise Conflict(
            f"Port {port} cannot be used.", f"{error.strerror}.", "Choose another with --port, or 0 for a free one."
        ) from error
    bound.listen(1024)
    return bound


def serve(database: Path, listening: socket.socket) -> None:
    """Serve a database on a socket."""
    store = SqliteStore(database)
    config = uvicorn.Config(
        create_app(store),
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_keep_alive=75,  # longer than the clients': who closes first leaves the other a broken request
        timeout_graceful_shutdown=GRACE_S,
    )
    with listening:
        asyncio.run(uvicorn.Server(config).serve(sockets=[listening]))
    store.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m halteres.trajectories", description="The trajectory server.")
    parser.add_argument("--database", type=Path, required=True, help="SQLite file; made if missing")
    parser.add_argument("--port", type=int, default=8000, help="port on 127.0.0.1; 0: a free one")
    parser.add_argument("--listen-fd", type=int, help="inherited socket that listens already; --port is ignored")
    return parser


if __name__ == "__main__":
    sys.exit(main())
