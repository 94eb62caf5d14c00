"""The trajectory server's process: `python -m halteres.trajectories`, `halteres serve
trajectories`, `run-api`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from halteres import process
from halteres.errors import HalteresError, InvalidConfig
from halteres.loopback import HOST, is_loopback, open_listener
from halteres.trajectories.options import Options, options_of, parser
from halteres.trajectories.server import serve

log = logging.getLogger(__name__)

_OPEN = "Whoever reaches this address can read the queue, fill it and reset it: there is no token."
_READABLE = (
    "Token and data are readable on the way: let a proxy end TLS before it, or stay in a "
    "safe network."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    return _run(parser().parse_args(arguments))


def run_api(arguments: Sequence[str] | None = None) -> int:
    """`run-api`: the command of the original, with its flags."""
    accepted = parser("run-api")
    accepted.add_argument(
        "--reload", action="store_true", help="accepted, and of no use: this server's code is fixed"
    )
    given = accepted.parse_args(arguments)
    if given.reload:
        sys.stdout.write(
            "--reload is of no use here: the code of this server does not change while it runs.\n"
        )
    if given.host == HOST and given.listen_fd is None:
        sys.stdout.write(
            f"Only this machine is served ({HOST}; the original served everybody). "
            "For others: --host 0.0.0.0 with --token-file FILE, or with --insecure.\n"
        )
    sys.stdout.flush()
    return _run(given)


def _run(arguments: argparse.Namespace) -> int:
    process.begin("api", private=True)
    try:
        options = options_of(arguments)
        beyond = options.token is not None or options.insecure
        try:
            listening = open_listener(
                options.port, options.listen_fd, host=options.host, beyond=beyond
            )
        except InvalidConfig as error:
            advice = (
                "Give it a token (--token-file FILE, or HALTERES_TRAJECTORY_TOKEN), or say "
                "--insecure."
            )
            raise InvalidConfig(error.what, error.why, error.next or advice) from error
        with listening:
            if not is_loopback(listening.getsockname()[0]):
                log.warning(_READABLE if options.token else _OPEN)
            _announce_file(options)
            serve(options, listening)
    except HalteresError as error:
        sys.stderr.write(f"error: {error.sentence}\n")
        return 1
    return 0


def _announce_file(options: Options) -> None:
    """Which file the queue is in, and whether it is new: of a mistyped path, one is made too. Makes
    the folder.
    """
    if "://" in options.database:
        return
    file = Path(options.database).expanduser().resolve()
    try:
        new = (
            ""
            if file.exists()
            else ", a new file"
            if file.parent.exists()
            else ", a new file in a new folder"
        )
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(
            f"The folder of the database {file} cannot be made.",
            f"{error.strerror or error}.",
            "Name a file in a folder of yours: --database FILE.",
        ) from error
    sys.stdout.write(f"The queue is in {file}{new}.\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
