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
from halteres.config.settings import InferenceSettings
from halteres.errors import Conflict, HalteresError, NotReady
from halteres.files import replace_file
from halteres.models import model_folder
from halteres.models.shape import read_shape
from halteres.process import identity
from halteres.runs.directory import RunDirectory, find_run
from halteres.runs.planning.resources import sampling_bytes, this_machine, workload_of
from halteres.runs.servers import (
    FREE_WITHIN_S,
    KEPT,
    KEPT_LOCK,
    READY_WITHIN_S,
    Kept,
    Server,
    end_all_kept,
    kept_in,
    needs_relay,
    own_service,
    served,
    service_arguments,
)
from halteres.runs.state import is_locked, take_lock

IDLE_S = 300.0
"""How long a service without a question is kept: the memory that it holds is then free again."""

LOOK_EVERY_S = 0.5
ASK_EVERY_S = 0.05


class ServiceSearch:
    """The search for a service that can sample a run's base model and its checkpoints: of a run
    that goes on its own, else the one that is kept, else a new one, which is kept from now on.

    Args:
        run: whose weights are asked.
        model: its base model, a built-in name or a folder.
    """

    def __init__(self, run: RunDirectory, model: str) -> None:
        self._run, self._model = run, model
        self._ends = time.monotonic() + READY_WITHIN_S + FREE_WITHIN_S
        self._is_first, self._is_started, self._was_there = True, False, False

    def look(self) -> Server | None:
        """The service; None while it starts: look again, in ASK_EVERY_S.

        Raises:
            NotReady: the run starts its own just now, the model does not fit into the memory that
                is free, the run's state was in use all the time, or no service was ready in time.
        """
        run = self._run
        if self._is_first:
            self._is_first = False
            own, state = own_service(run), run.state()
            if own is None:
                _check_at_rest(run)
            elif not needs_relay(state):
                return own
        if time.monotonic() > self._ends:
            raise NotReady(
                f"The service for run {run.run_id} was not ready in time.",
                f"It had {READY_WITHIN_S + FREE_WITHIN_S:.0f} s.",
                f"Read its log: {_log(run)}",
            )
        if is_locked(run.path / KEPT_LOCK):
            self._was_there = True
            kept = kept_in(run)
            if kept is not None and kept.url:
                # the time that it has begins anew
                with suppress(FileNotFoundError):
                    os.utime(run.path / KEPT)
                    return Server(url=kept.url, key=kept.key)
        elif self._is_started or (self._was_there and _left_failure(run)):
            raise _failure(run)
        else:
            self._is_started = _start(run, self._model)
        return None


def _check_at_rest(run: RunDirectory) -> None:
    """Refuse a run that starts the service of its own just now: two cannot have its weights."""
    state = run.state()
    if state.terminal:
        return
    raise NotReady(
        f"Run {run.run_id} has no service yet.",
        f"It is {state.status}{f': {state.phase}' if state.phase else ''}.",
        "Ask again in a moment.",
    )


def _check_memory(run: RunDirectory, model: str) -> None:
    """Refuse a model that does not fit into the memory that is free; services that other chats have
    left give theirs back first.
    """
    if run.state().is_relayed:
        # a relay loads no model
        return
    folder = model_folder(model, environ.home() / "models") or Path(model)
    try:
        shape = read_shape(folder)
    except (OSError, ValueError):
        # the service itself says what is wrong with it
        return
    work = workload_of(run.settings())
    for is_last in (False, True):
        here = this_machine()
        free = here.model_memory.free
        needed = sampling_bytes(shape, work, on_gpu=here.gpu is not None)
        if free is None or needed <= free:
            return
        if not is_last:
            end_all_kept()
    raise NotReady(
        f"The model of run {run.run_id} does not fit into the memory that is free.",
        f"To sample from it takes about {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are free.",
        "End what else uses the memory, then ask again.",
    )


def _start(run: RunDirectory, model: str) -> bool:
    """Start the process that keeps a service. False: another has just done so."""
    _check_memory(run, model)
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
    words = _left_failure(run)
    if words is not None:
        return NotReady(*words)
    last = run.log_tail("chat", 1) or ["It said nothing."]
    return NotReady("The service for the chat did not start.", last[0], "Try: halteres doctor")


def _left_failure(run: RunDirectory) -> tuple[str, str, str] | None:
    """What the process that was to keep a service has left: what, why, next."""
    try:
        kept = msgspec.json.decode((run.path / KEPT).read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError):
        return None
    return kept.failure


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
        as_in_run = service_arguments(without_further_processes(run.settings().inference))
        log = run.log("chat_service")
        with served(arguments.model, run, arguments=as_in_run, log=log, given_up=ended) as at:
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


def without_further_processes(inference: InferenceSettings) -> InferenceSettings:
    """How the engine of a run computes, in the one process that answers a chat."""
    return inference.model_copy(update={"samplers": 0, "trainer_ranks": 1, "shard": False})


def _idle_s(card: Path) -> float:
    """How long ago the last question was; for ever where the run's directory is gone."""
    try:
        return time.time() - card.stat().st_mtime
    except OSError:
        return math.inf


if __name__ == "__main__":
    sys.exit(main())
