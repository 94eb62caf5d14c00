"""Groups that could not be delivered, on disk until they can.

Owns: a folder of letters, one file each, written whole; how much it may hold.
Never: sends.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halteres.files import replace_file

log = logging.getLogger(__name__)

LARGEST_BYTES = 1024**3
"""Of all letters together. No group is begun while the server is away, so there are about as many as workers."""

_SUFFIX, _DAMAGED = ".group", ".damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """One group on its way to the trajectory server."""

    key: str  # Idempotency-Key: the same at every attempt, of whichever process
    body: Mapping[str, Any]  # without the sender's env_id, which may be another by then


class Outbox:
    """The folder of one environment; without one (None), nothing is ever kept."""

    def __init__(self, folder: Path | None, largest_bytes: int = LARGEST_BYTES) -> None:
        self._folder, self._largest_bytes = folder, largest_bytes
        self._numbers = itertools.count()

    def keep(self, letter: Letter) -> bool:
        """Write a letter down. False where there is no folder, no room, or the disk refuses."""
        if self._folder is None:
            return False
        content = json.dumps({"key": letter.key, "body": letter.body}).encode()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if len(content) + sum(file.stat().st_size for file in self._files()) > self._largest_bytes:
                log.warning("%s holds %d MiB already.", self._folder, self._largest_bytes // 1024**2)
                return False
            replace_file(self._folder / f"{time.time_ns():020}-{next(self._numbers)}{_SUFFIX}", content)
        except OSError as error:
            log.warning("A group cannot be kept in %s: %s.", self._folder, error.strerror)
            return False
        return True

    @property
    def is_empty(self) -> bool:
        """Whether no letter is kept."""
        return not self._files()

    def letters(self) -> Iterator[tuple[Path, Letter]]:
        """Every letter with its file, the oldest first; a file that is none is moved out of the way."""
        for file in self._files():
            letter = _read(file)
            if letter is not None:
                yield file, letter

    def clear(self) -> None:
        """Forget all letters."""
        for file in self._files():
            file.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{_SUFFIX}")) if self._folder is not None else []


def _read(file: Path) -> Letter | None:
    try:
        told = json.loads(file.read_bytes())
        return Letter(key=str(told["key"]), body=dict(told["body"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s holds no group (%s); it is left there under another name.", file, error)
        file.rename(file.with_suffix(_DAMAGED))
        return None
