"""A training as a process: it holds its folder alone, shows its progress, and ends when it is asked to; the checkpoints
that it leaves."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from halteres.errors import Conflict, InvalidData, NotFound, ServerError

TRAINER_STATE = "trainer.pt"  # what a checkpoint of a training has beside the model


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a training in its folder, the newest last."""
    found = [one for one in folder.glob("checkpoint-*") if (one / TRAINER_STATE).is_file()]
    return sorted(found, key=lambda one: int(one.name.rpartition("-")[2]))


def read_trainer_state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint has beside the model: optimiser, random numbers, history."""
    file = checkpoint / TRAINER_STATE
    if not file.is_file():
        raise NotFound(f"There is no checkpoint in {checkpoint}.", f"{TRAINER_STATE} is missing.")
    try:
        return torch.load(file, weights_only=True, map_location="cpu")
    except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise InvalidData(
            f"The checkpoint {checkpoint} is damaged.",
            f"{TRAINER_STATE} cannot be read ({type(error).__name__}).",
            "Remove its folder: --resume then goes on from the one before, if there is one.",
        ) from error


@contextmanager
def alone_in(place: Path) -> Iterator[None]:
    """The folder is this training's alone until the block ends, or its process. ServerError where it cannot be written;
    Conflict where another process trains into it."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, "It is read-only")
        held = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ServerError(
            f"The folder {place} cannot be written.", f"{error.strerror}.", "Name another folder (--out)."
        ) from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(held)
        raise Conflict(
            f"Another process trains into {place}.", next="Wait for it, or name another folder (--out)."
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):
            place.rmdir()  # nothing was written
        os.close(held)


@contextmanager
def progress(total: int, *, shown: bool) -> Iterator[Callable[[str | None, int | None], None]]:
    """How to show a line, and the step that is done: a bar in a terminal, plain lines elsewhere, nothing where that is
    not wanted."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not (shown and console.is_terminal))
    with bar:
        task = bar.add_task("", total=total)

        def show(line: str | None, step: int | None) -> None:
            if step is not None and not bar.disable:
                bar.update(task, completed=step, description=line)  # None leaves it as it is
            elif line is not None and shown:
                console.print(line, highlight=False, markup=False, soft_wrap=True)

        yield show


@contextmanager
def termination() -> Iterator[threading.Event]:
    """Set when the process is asked to end; a second Ctrl-C ends it at once. Only a main thread can listen; another's
    process has its own ways."""
    ended = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield ended
        return

    def end(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and ended.is_set():
            raise KeyboardInterrupt
        if number == signal.SIGINT:
            sys.stderr.write("Ending after this step, with a checkpoint; Ctrl-C again ends at once.\n")
        ended.set()

    signals = [one for one in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(one) is not signal.SIG_IGN]
    before = [(one, signal.signal(one, end)) for one in signals]
    try:
        yield ended
    finally:
        for one, handler in before:
            signal.signal(one, handler)
