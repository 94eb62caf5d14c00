"""The folder that a training writes: its checkpoints, and that it is one training's at a time.

Owns: which checkpoints there are; reading what a checkpoint has beside the model; the lock on the folder, which the
kernel frees with its process.
Never: writes a checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from halteres.errors import Conflict, InvalidData, NotFound, ServerError

TRAINER_STATE = "trainer.pt"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a training, the newest last."""
    found = [one for one in folder.glob("checkpoint-*") if (one / TRAINER_STATE).is_file()]
    return sorted(found, key=lambda one: int(one.name.rpartition("-")[2]))


def read_trainer_state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint has beside the model: optimiser, random numbers, history.

    Raises:
        NotFound: there is no checkpoint.
        InvalidData: it is damaged.
    """
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
    """The folder is there, can be written, and is this training's alone until the block ends.

    Raises:
        ServerError: it cannot be made, or not be written.
        Conflict: another process trains into it.
    """
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
