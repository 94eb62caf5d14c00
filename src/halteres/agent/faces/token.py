"""The token of this machine's HTTP faces: HALTERES_HOME/token.

Owns: the file, made once, for its owner alone to read; comparing without telling how far a guess was right.
Never: goes on with a token whose file was replaced, logs it, reads a header.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import os
import secrets
import threading
from pathlib import Path

from halteres.config import environ
from halteres.errors import InvalidConfig

FILE = "token"

SHORTEST = 16
"""Characters; a file that holds less was cut off, or written by a person who should not have."""


def token() -> str:
    """The token; made at first use.

    Raises:
        InvalidConfig: the file cannot be made or read, or holds no token.
    """
    file = environ.home() / FILE
    try:
        if not file.exists():
            _make(file)
        looked = file.stat()
        found = _read(file, looked.st_ino, looked.st_mtime_ns, looked.st_ctime_ns, looked.st_size)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"The token file {file} cannot be used.", f"{error}.", "Mend it, or remove it.") from error
    if len(found) < SHORTEST:
        raise InvalidConfig(
            f"The token file {file} holds no token.",
            f"A token has {SHORTEST} characters or more.",
            "Remove the file; a new one is made.",
        )
    return found


def is_token(given: str) -> bool:
    """Whether this is the token; takes as long for a near miss as for any other."""
    return hmac.compare_digest(given.encode(), token().encode())


@functools.lru_cache(maxsize=1)
def _read(file: Path, *_looked: int) -> str:
    """What the file holds; read once while it looks the same."""
    return file.read_text().strip()


def _make(file: Path) -> None:
    """Write beside, then link: of two processes that do this at once one wins, and both read the winner's."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{FILE}.{os.getpid()}.{threading.get_ident()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(f"{secrets.token_urlsafe(32)}\n")
        with contextlib.suppress(FileExistsError):
            os.link(beside, file)
    finally:
        beside.unlink()
