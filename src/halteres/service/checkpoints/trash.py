"""Where deleted folders go for an instant.

Owns: that a folder is there whole, or is not there: it is renamed first and removed then.
Never: decides what goes.
"""

from __future__ import annotations

import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from halteres.errors import ServerError


class Trash:
    """A folder beside those that are deleted, on the same disk."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def take(self, folder: Path) -> None:
        """From here on the folder's name is free; one that is missing is gone already.

        Raises:
            ServerError: it cannot be moved; it is then still there.
        """
        try:
            self._place.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):
                folder.rename(self._place / uuid.uuid4().hex)
        except OSError as error:
            raise ServerError(f"The folder {folder} cannot be deleted.", f"{error.strerror}.") from error

    def empty(self) -> None:
        """Remove what was taken; what cannot be removed now is removed the next time."""
        for folder in self._place.glob("*"):
            shutil.rmtree(folder, ignore_errors=True)
