"""The supervisor of one run: `python -m halteres.runs.supervision.supervisor DIR`.

Owns: the process: lock, signals, and how the run's end is written (weights, results, picture, and last the state).
Never: decides what happens in between (`controller`).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from halteres import process
from halteres.config import environ
from halteres.errors import Conflict, HalteresError, ServerError, boundary
from halteres.runs import identity, lock
from halteres.runs.directory import RunDirectory
from halteres.runs.servers import new_secret
from halteres.runs.state import RESERVE, Failure, Phase, RunState, Status
from halteres.runs.stop import WAKE
from halteres.runs.supervision.conclusion import conclude, export_adapter, final_checkpoint
from halteres.runs.supervision.controller import RunController
from halteres.runs.supervision.messages import StopAsked, Verdict
from halteres.runs.supervision.roles import RolesOf, cast
from halteres.runs.supervision.run_context import prepare_run
from halteres.runs.supervision.state_writer import StateWriter

_log = logging.getLogger("halteres.runs.supervision.supervisor")


async def supervise(run: RunDirectory, casting: RolesOf = cast) -> Status:
    """Supervise one run to its end; the lock is the caller's. Returns its final status."""
    environ.set_run_secret(new_secret())  # first: whatever is written from here on is searched for it
    writer = StateWriter(run)
    if writer.state.terminal:
        raise Conflict(f"Run {run.run_id} has ended already ({writer.state.status}).", "", "Resume it as a new run.")
    async with writer.beating():
        try:
            with boundary(
                ServerError, "The supervisor"
            ):  # whatever goes wrong here, the run must end with a true state
                verdict = await _attempt(writer, casting)
        except HalteresError as error:
            _log.exception("The supervisor failed.")
            verdict = Verdict(status="failed", error=error)
        return await _close(writer, verdict)


async def _attempt(writer: StateWriter, casting: RolesOf) -> Verdict:
    prepared = prepare_run(writer)
    try:
        controller = RunController(writer, prepared, casting)
        _obey_signals(controller)
        # From here on a stop request may wake us; one that came earlier is found by the first look.
        phase: Phase = "trainer" if writer.state.kind == "reward" else "api"
        writer.update(status="starting", phase=phase, started_at=time.time(), supervisor=identity.identity(os.getpid()))
        return await controller.run_to_verdict()
    finally:
        prepared.close()


def _obey_signals(controller: RunController) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, controller.ask_to_stop, StopAsked("now", number.name))
    loop.add_signal_handler(WAKE, controller.look_for_stop)


async def _close(writer: StateWriter, verdict: Verdict) -> Status:
    """Write the end: weights, results, picture, and only then the state that says so."""
    run = writer.run
    (run.path / RESERVE).unlink(missing_ok=True)
    verdict, exported = await asyncio.to_thread(_with_weights, writer, verdict)
    newest = run.newest_checkpoint()
    resumable = verdict.status != "completed" and newest is not None
    end: dict[str, Any] = {
        "status": verdict.status,
        "phase": writer.state.phase if verdict.status == "failed" else None,
        "error": verdict.error.sentence if verdict.error else None,
        "code": verdict.error.code if verdict.error else verdict.code,
        "exit": verdict.error.details.get("exit") if verdict.error else None,
        "failure": Failure.of(verdict.error) if verdict.error else None,
        "note": verdict.note,
        "resumable": resumable,
        "last_checkpoint": newest or writer.state.last_checkpoint,
        "ended_at": time.time(),
    }
    end = writer.without_secrets(end)
    if exported:
        writer.event("weights", folder=str(exported))
    for failure in await asyncio.to_thread(_concluded, run, msgspec.structs.replace(writer.state, **end)):
        writer.event("conclusion_failed", error=failure)
    writer.update(**end)
    return verdict.status


def _concluded(run: RunDirectory, state: RunState) -> list[str]:
    """What could not be made, in sentences. A defect of ours is one of them: the end must be written."""
    try:
        with boundary(ServerError, "Concluding"):
            return conclude(run, state)
    except HalteresError as error:
        _log.exception("The run could not be concluded.")
        return [error.sentence]


def _with_weights(writer: StateWriter, verdict: Verdict) -> tuple[Verdict, Path | None]:
    """Copy the final weights out of the service's state. A completed run without them has failed."""
    elsewhere = writer.state.service_given or writer.state.kind == "reward"
    if elsewhere or final_checkpoint(writer.run) is None:
        return verdict, None  # kept by somebody else's service or written by the trainer itself, or there are none
    try:
        with boundary(ServerError, "Copying the final weights"):
            return verdict, export_adapter(writer.run)
    except HalteresError as error:
        if verdict.status != "completed":
            return verdict, None
        return Verdict(status="failed", error=error, note=verdict.note), None


def main(arguments: Sequence[str] | None = None, casting: RolesOf = cast) -> int:
    """Supervise the run in DIR. Exit code 0 whenever its end is on disk; 1 where it could not be supervised at all."""
    process.begin("supervisor")
    parser = argparse.ArgumentParser(
        prog="python -m halteres.runs.supervision.supervisor", description="Supervise one run."
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--lock-fd", type=int, help="the run's lock, held already by whoever started this")
    given = parser.parse_args(arguments)
    run = RunDirectory(given.directory.absolute())
    try:
        if given.lock_fd is None:
            lock.take(run.path / "lock")  # held until this process ends
        else:
            os.set_inheritable(given.lock_fd, False)  # children must not hold it after us
        process.adopt_orphans()
        try:
            status = asyncio.run(supervise(run, casting))
        finally:
            process.end_orphans()
        _log.info("Run %s: %s.", run.run_id, status)
    except HalteresError as error:
        sys.stderr.write(f"error: {error.sentence}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
