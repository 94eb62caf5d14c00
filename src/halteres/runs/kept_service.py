"""A run's service that is left running for the next question of a chat: the process that keeps it,
and how it is found.

Owns: kept_service.json in the run's directory, while the service is there; its end, IDLE_S after
the last question.
Never: stands in the way. Whoever wants the run's weights, or memory for a new run, ends it first
(`servers.end_kept`, `servers.end_all_kept`).

    python -m halteres.runs.kept_service RUN MODEL --lock-fd N
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from halteres import process
from halteres.config import environ
from halteres.errors import Conflict, HalteresError, NotReady
from halteres.files import replace_file
from halteres.process import identity
from halteres.runs.directory import RunDirectory, find_run
from halteres.runs.servers import (
    FREE_WITHIN_S,
    KEPT,
    KEPT_LOCK,
    READY_WITHIN_S,
    Kept,
    Server,
    kept_in,
    own_service,
    served,
)
from halteres.runs.state import is_locked, take_lock

IDLE_S = 300.0
"""How long a service without a question is kept: the memory that it holds is then free again."""

LOOK_EVERY_S = 0.5
ASK_EVERY_S = 0.05


def service_for_questions(run: RunDirectory, model: str) -> Server:
    """A service that can sample `model` and the run's checkpoints: of a run that goes on its own,
    else the one that is kept, else a new one, which is kept from now on.

    Args:
        run: whose weights are asked.
        model: its base model, a built-in name or a folder.

    Raises:
        NotReady: the run's state was in use all the time, or no service was ready in time.
    """
    own, state = own_service(run), run.state()
    if own is not None and not (state.is_relayed and state.terminal):
        return own
    ends = time.monotonic() + READY_WITHIN_S + FREE_WITHIN_S
    is_started = False
    while time.monotonic() < ends:
        if is_locked(run.path / KEPT_LOCK):
            kept = kept_in(run)
            if kept is not None and kept.url:
                # the time that it has begins anew
                with suppress(FileNotFoundError):
                    os.utime(run.path / KEPT)
                    return Server(url=kept.url, key=kept.key)
        elif is_started:
            raise _failure(run)
        else:
            is_started = _start(run, model)
        time.sleep(ASK_EVERY_S)
    raise NotReady(
        f"The service for run {run.run_id} was not ready in time.",
        f"It had {READY_WITHIN_S + FREE_WITHIN_S:.0f} s.",
        f"Read its log: {_log(run)}",
    )


def _start(run: RunDirectory, model: str) -> bool:
    """Start the process that keeps a service. False: another has just done so."""
    try:
        held = take_lock(run.path / KEPT_LOCK)
    except Conflict:
        return False
    try:
        (run.path / KEPT).unlink(missing_ok=True)
        _log(run).parent.mkdir(exist_ok=True)
        _log(run).unlink(missing_ok=True)
        module = "halteres.runs.kept_service"
        words = (sys.executable, "-m", module, run.run_id, model, "--lock-fd", str(held))
        variables = environ.for_loopback()
        if run.state().is_relayed:
            # its relay asks a service elsewhere, by a proxy if need be
            variables = environ.with_keys()
        process.detach(words, run.path, _log(run), variables, held)
    finally:
        os.close(held)
    return True


def _log(run: RunDirectory) -> Path:
    return run.log("chat")


def _failure(run: RunDirectory) -> HalteresError:
    """Why the process that was to keep a service has ended."""
    try:
        kept = msgspec.json.decode((run.path / KEPT).read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError):
        kept = None
    if kept is not None and kept.failure:
        return NotReady(*kept.failure)
    last = run.log_tail("chat", 1) or ["It said nothing."]
    return NotReady("The service for the chat did not start.", last[0], "Try: halteres doctor")


def main() -> int:
    """Keep a service until no question has come for IDLE_S, or a signal ends it."""
    parser = argparse.ArgumentParser(prog="python -m halteres.runs.kept_service")
    parser.add_argument("run")
    parser.add_argument("model")
    parser.add_argument("--lock-fd", type=int, required=True, help="held as long as it lives")
    arguments = parser.parse_args()
    process.begin("chat")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: ended.set())
    run = find_run(arguments.run)
    card = run.path / KEPT
    who = identity(os.getpid())
    # a process that needs the run's weights can end it from now on
    replace_file(card, msgspec.json.encode(Kept(process=who)))
    try:
        with served(arguments.model, run, log=run.log("chat_service"), given_up=ended) as at:
            kept = Kept(url=at.url, key=at.key, process=who)
            replace_file(card, msgspec.json.encode(kept), private=True)
            while not ended.wait(LOOK_EVERY_S) and _idle_s(card) <= IDLE_S:
                pass
            # it holds memory and the run's weights until it is gone, and answers no more
            with suppress(OSError):
                replace_file(card, msgspec.json.encode(Kept(process=who)))
        card.unlink(missing_ok=True)
    except HalteresError as error:
        words = (error.what, error.why, str(error.next))
        replace_file(card, msgspec.json.encode(Kept(process=who, failure=words)))
        return 1
    return 0


def _idle_s(card: Path) -> float:
    """How long ago the last question was; for ever where the run's directory is gone."""
    try:
        return time.time() - card.stat().st_mtime
    except OSError:
        return math.inf


if __name__ == "__main__":
    sys.exit(main())
