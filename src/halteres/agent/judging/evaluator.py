"""The evaluation's process: `python -m halteres.agent.judging.evaluator FOLDER --lock-fd N`.

Owns: the service it samples from (the run's own where it is alive, or one that was named), that a result is left
however it goes.
Never: reads the run's figures, answers anybody.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import Any

from halteres import process
from halteres.agent.judging.evaluation import Request, request_in
from halteres.agent.trial.folder import TestFolder
from halteres.config import environ
from halteres.errors import HalteresError, ServerError, boundary
from halteres.redaction import Redactor
from halteres.runs import lock
from halteres.runs.measurement import WITHIN_S, measure
from halteres.runs.servers import FREE_WITHIN_S, READY_WITHIN_S, Server, served


def main() -> int:
    """Evaluate, and write the result. Exit code 0, or 1 where it failed."""
    parser = argparse.ArgumentParser(prog="python -m halteres.agent.judging.evaluator")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lock-fd", type=int, help="descriptor of the folder's lock, taken already")
    options = parser.parse_args()
    process.begin("evaluator")
    folder = TestFolder(options.folder)
    if options.lock_fd is None:
        lock.take(folder.lock)
    longest = FREE_WITHIN_S + READY_WITHIN_S + WITHIN_S
    signal.alarm(int(longest) + 60)  # should nothing else have ended it; its children end with it
    began = time.monotonic()
    try:
        with boundary(ServerError, "The evaluation"):
            result: dict[str, Any] = {"status": "done", "figures": _figures(folder, request_in(folder))}
    except HalteresError as error:
        result = {"status": "failed", "error": error.sentence, "code": error.code}
        sys.stderr.write(f"error: {Redactor.of_this_process().text(error.sentence)}\n")
    seconds = round(time.monotonic() - began, 1)
    folder.write("result.json", Redactor.of_this_process().json({**result, "seconds": seconds}))
    return 0 if result["status"] == "done" else 1


def _figures(folder: TestFolder, request: Request) -> dict[str, Any]:
    exam, wanted = request.exam, {"eval_tasks": request.num_tasks} if request.num_tasks else {}
    if request.service_url:
        return measure(exam, Server(url=request.service_url, key=environ.api_key()), wanted, folder.path)
    state = None if exam.run else folder.path / "service.log"
    with served(exam.base, exam.run, arguments=request.service, log=state) as service:
        return measure(exam, service, wanted, folder.path)


if __name__ == "__main__":
    sys.exit(main())
