"""`python -m halteres.agent.faces.http`: the control server as a process.

Owns: its arguments, its exit code.
Never: serves anything but the loopback.
"""

from __future__ import annotations

import argparse
import logging
import sys

from halteres import process
from halteres.agent.faces.http.server import serve
from halteres.errors import HalteresError
from halteres.loopback import open_listener


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    process.begin("control")
    logging.getLogger("mcp").setLevel(logging.WARNING)
    arguments = _parser().parse_args(argv)
    try:
        serve(open_listener(arguments.port, arguments.listen_fd), arguments.auth)
    except HalteresError as error:
        sys.stderr.write(f"error: {error.sentence}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m halteres.agent.faces.http", description="The control server.")
    parser.add_argument("--port", type=int, default=8080, help="port on 127.0.0.1; 0: a free one")
    parser.add_argument("--listen-fd", type=int, help="inherited socket that listens already; --port is ignored")
    parser.add_argument("--auth", choices=("open", "token"), default="open", help="of the seed's routes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
