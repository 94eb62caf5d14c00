"""The tester's process: `python -m halteres.agent.trial FOLDER --lock-fd N`.

Owns: the process: its lock, its deadline, that it leaves a result however it ends in order.
Never: tests anything itself (`tester`).
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from halteres import process
from halteres.agent.trial.folder import TestFolder
from halteres.agent.trial.report import report
from halteres.agent.trial.request import Request
from halteres.agent.trial.tester import Tester
from halteres.errors import HalteresError, ServerError, boundary
from halteres.redaction import Redactor
from halteres.runs import lock

BEYOND_S = 60
"""So long after the test's deadline the kernel ends this process, should nothing else have; children end with it."""


def main() -> int:
    """Test, and write the result. Exit code 0, or 1 where the test itself failed."""
    parser = argparse.ArgumentParser(prog="python -m halteres.agent.trial")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lock-fd", type=int, help="descriptor of the test's lock, taken already")
    options = parser.parse_args()
    process.begin("tester")
    folder = TestFolder(options.folder)
    if options.lock_fd is None:
        lock.take(folder.lock)
    request = folder.request()
    signal.alarm(int(request.within_s) + BEYOND_S)
    try:
        with boundary(ServerError, "The test"):
            asyncio.run(_test(folder, request))
    except HalteresError as error:
        sys.stderr.write(f"error: {Redactor.of_this_process().text(error.sentence)}\n")
        if folder.result() is None:  # else all was measured, and only what comes after it went wrong
            _write(folder, request, error)
        return 1
    return 0


class Interrupted(HalteresError):
    """The test was ended from outside, or by its deadline."""

    code = "process_exited"


async def _test(folder: TestFolder, request: Request) -> None:
    """Test until it is done. SIGTERM and the deadline end it in order."""
    loop, testing = asyncio.get_running_loop(), asyncio.ensure_future(_tester(folder, request).run())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, testing.cancel)
    try:
        await asyncio.wait_for(testing, request.within_s)
    except TimeoutError as error:
        raise Interrupted("The test was ended at its deadline.", f"It had {request.within_s:.0f} s.") from error
    except asyncio.CancelledError as error:
        raise Interrupted("The test was ended by a signal.") from error


def _tester(folder: TestFolder, request: Request) -> Tester:
    """Its result is there as soon as all is measured, before services are closed: who waits for it waits no longer."""
    return Tester(folder, request, done=lambda: _write(folder, request, None))


def _write(folder: TestFolder, request: Request, error: HalteresError | None) -> None:
    body = report(folder, request, "failed" if error else "done")
    if error:
        body |= {"error": error.sentence, "code": error.code}
    folder.write("result.json", Redactor.of_this_process().json(body))


if __name__ == "__main__":
    sys.exit(main())
