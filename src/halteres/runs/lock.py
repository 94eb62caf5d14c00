"""Locks on files, which the kernel frees with their last holder, however that one died.

A run's supervisor and a test's tester hold one that is taken or refused at once, handed on, asked after; others are
waited for, never without a deadline, and say who holds them.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from halteres.errors import Conflict, NotReady

LOOK_EVERY_S = 0.01


def take(file: Path) -> int:
    """The lock's descriptor. Conflict where another process holds it. It is not inherited unless handed on."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise Conflict(
            f"{file.parent} is held by a running supervisor.",
            "One directory is one run.",
            "Wait for it, stop it, or start another run.",
        ) from None
    return descriptor


@contextmanager
def taken(file: Path) -> Iterator[None]:
    """Hold the lock for the length of a block. Conflict where another process holds it."""
    descriptor = take(file)
    try:
        yield
    finally:
        os.close(descriptor)


def held(file: Path) -> bool:
    """Whether a process holds the lock. Whoever only asks hinders nobody who asks too."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:  # we may not look: nothing speaks against it
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def locked(file: Path, within_s: float, what: str, given_up: threading.Event | None = None) -> Iterator[None]:
    """Hold the lock for the length of a block; whoever comes later waits, `within_s` at most.

    NotReady, with `what` cannot be done now, where somebody else held it all the time, or `given_up` was set. The file
    is made where it is not there; its folder must be.
    """
    ends, given_up = time.monotonic() + within_s, given_up or threading.Event()
    while (descriptor := _attempt(file)) is None:
        if time.monotonic() > ends or given_up.wait(LOOK_EVERY_S):
            try:
                holder = f"Process {int(file.read_text())}"
            except (OSError, ValueError):
                holder = "Another process"
            raise NotReady(what, f"{holder} holds {file}.", "Try again in a moment.")
    try:
        yield
    finally:
        os.close(descriptor)


def _attempt(file: Path) -> int | None:
    """The lock's descriptor; None where another has it, or took the file away while we did."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), file.stat()):
            with suppress(OSError):  # a full disk: the lock holds all the same
                os.pwrite(descriptor, f"{os.getpid():<10}".encode(), 0)
            return descriptor
    os.close(descriptor)
    return None
