"""The service's process: `python -m halteres.service --state DIR --port P --engine torch|scripted ...`.

Owns: its arguments and exit codes.
Never: loads torch (the engine's process does).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from halteres.engine.process import EngineCommand, EngineProcess
from halteres.errors import HalteresError
from halteres.loopback import open_listener
from halteres.models import TINY
from halteres.process import begin
from halteres.service.base import base_model
from halteres.service.server import serve

log = logging.getLogger(__name__)


def main() -> int:
    """Run until SIGTERM, SIGINT or the end of the lifeline; exit code 0, or 1 with one sentence."""
    options = _parser().parse_args()
    begin("service")
    try:
        asyncio.run(_run(options))
    except HalteresError as error:
        sys.stderr.write(f"error: {error.sentence}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


async def _run(options: argparse.Namespace) -> None:
    base = base_model(options.model)
    command = EngineCommand(backend=options.engine, folder=base.folder, name=base.name, threads=options.threads)
    host = EngineProcess(
        command,
        options.state / "engine.log",
        on_death=lambda why: log.error("%s", why),
        on_restart=lambda: log.warning("The engine runs again; adapters that were not saved are gone."),
    )
    with open_listener(options.port, options.listen_fd) as bound:
        await serve(options.state, base, host, bound)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m halteres.service", description="The training service.")
    parser.add_argument("--state", type=Path, required=True, help="directory that everything durable is kept in")
    parser.add_argument("--port", type=int, default=8001, help="on 127.0.0.1; 0 takes a free one")
    parser.add_argument("--listen-fd", type=int, help="an inherited socket that listens already")
    parser.add_argument("--engine", choices=("torch", "scripted"), default="torch")
    parser.add_argument("--model", default=TINY, help="a built-in name or a model folder")
    parser.add_argument("--threads", type=int, help="of the engine; default: cores - 1, at least 1")
    return parser


if __name__ == "__main__":
    sys.exit(main())
