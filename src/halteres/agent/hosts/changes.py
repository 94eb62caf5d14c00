"""A change of one file, and a plan of several: nothing is written before everything is known to be possible.

A change is made whole or not at all, over links, with the file's own permissions, with a backup of what was there
before us, and not if somebody else changed the file meanwhile.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from halteres.errors import Conflict, ServerError
from halteres.files import replacing

Verb = Literal["write", "update", "remove", "leave", "keep"]

BACKUP: Final = ".halteres.bak"
"""What a backup's name ends with."""

_PRIVATE: Final = 0o600


class NotWritable(ServerError):
    """A file of a host's cannot be read or written."""

    code = "not_writable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a file is to hold instead of what it holds."""

    file: Path
    before: bytes | None  # None: there is none
    after: bytes | None  # None: it goes
    keeps: bool = False  # whether a backup is to be made, where there is none yet
    within: Path | None = None  # folders below this one go where nothing is left in them

    @property
    def is_nothing(self) -> bool:
        """Whether all is as it is to be."""
        return self.before == self.after

    def make(self) -> None:
        """Make it.

        Raises:
            Conflict: the file is no longer what it was when this was planned.
            NotWritable: the file system refuses.
        """
        if self.is_nothing:
            return
        if content(self.file) != self.before:
            raise Conflict(f"{self.file} was changed just now by somebody else.", "Nothing was written.", "Try again.")
        try:
            self._remove() if self.after is None else self._write(self.after)
        except OSError as error:
            raise _refused(self.file, error) from error

    def _write(self, after: bytes) -> None:
        target = Path(os.path.realpath(self.file))  # a link to a file elsewhere stays one
        target.parent.mkdir(parents=True, exist_ok=True)
        backup = backup_of(self.file)
        if self.keeps and self.before is not None and not backup.exists():
            _put(backup, self.before, _mode(target))
        _put(target, after, _mode(target))

    def _remove(self) -> None:
        self.file.unlink()
        folder = self.file.parent
        while self.within and self.within in folder.parents and not any(folder.iterdir()):
            folder.rmdir()
            folder = folder.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that a person is told of: a settings file, a skill."""

    what: str  # its path
    changes: tuple[Change, ...]
    beside: tuple[Change, ...] = ()  # made too, and nobody's to know
    kept: str = ""  # why it stays though it was to change

    @property
    def verb(self) -> Verb:
        """What becomes of it. `leave`: nothing, for it is as it is to be."""
        real = [change for change in self.changes if not change.is_nothing]
        if self.kept:
            return "keep"
        if not real:
            return "leave"
        if all(change.after is None for change in real):
            return "remove"
        return "write" if all(change.before is None for change in real) else "update"

    @property
    def backup(self) -> Path | None:
        """Where what was there before us is kept, if this step changes it."""
        keeping = (change for change in self.changes if change.keeps and change.before and not change.is_nothing)
        return next((backup_of(change.file) for change in keeping), None)


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps, in their order."""

    steps: tuple[Step, ...]

    def carry_out(self) -> None:
        """Make every change. What was made before one fails stays; the same command again does the rest.

        Raises:
            Conflict, NotWritable: of the first change that cannot be made.
        """
        for step in self.steps:
            for change in (*step.changes, *step.beside):
                change.make()


def content(file: Path) -> bytes | None:
    """What a file holds; None where there is none.

    Raises:
        NotWritable: it cannot be read.
    """
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refused(file, error) from error


def backup_of(file: Path) -> Path:
    """Where a file's backup is."""
    return file.with_name(file.name + BACKUP)


def _put(file: Path, content: bytes, mode: int | None) -> None:
    """Whoever may not read the file may not read it while it is written either: a host's settings can hold keys."""
    with replacing(file) as beside:
        beside.touch(mode=0o666 if mode is None else _PRIVATE)
        beside.write_bytes(content)
        if mode is not None:
            beside.chmod(mode)


def _mode(file: Path) -> int | None:
    try:
        return stat.S_IMODE(file.stat().st_mode)
    except FileNotFoundError:
        return None


def _refused(file: Path, error: OSError) -> NotWritable:
    return NotWritable(f"{file} cannot be used.", f"{error.strerror or error}.", "See to its permissions.")
