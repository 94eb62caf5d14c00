"""Whether a run is supervised: the flock on its `lock` file.

Owns: taking and handing on that lock. The kernel frees it with its last holder, however that one died.
Never: writes anything into the file.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halteres.errors import Conflict


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


def held(file: Path) -> bool:
    """Whether a process holds the lock. Whoever only asks hinders nobody who asks too."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
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
def taken(file: Path) -> Iterator[None]:
    """Hold the lock for the length of a block. Conflict where another process holds it."""
    descriptor = take(file)
    try:
        yield
    finally:
        os.close(descriptor)
