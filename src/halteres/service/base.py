"""The base model that a service serves.

Owns: by which names clients may call it.
Never: reads weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from halteres.config import environ
from halteres.errors import NotFound, nearest, shortened
from halteres.models import builtin_names, builtin_path, model_folder, names_of, on_shelf

LONGEST_PATH = 4096
"""Characters; every part of one is looked up on disk."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """One base model: its name and its folder, which also holds the tokenizer."""

    name: str
    folder: Path  # absolute
    shelf: Path  # where other names of it may be registered, also while it is served

    @property
    def names(self) -> tuple[str, ...]:
        """Every name it answers to, its own first; its folder's path is another."""
        return tuple(dict.fromkeys((self.name, *names_of(self.folder, self.shelf))))

    def answers_to(self, asked: str) -> bool:
        """Whether a client's name means this model: its name, its folder's path, a name registered for that folder."""
        if asked in (self.name, str(self.folder)):
            return True
        if not asked.startswith("/") or len(asked) > LONGEST_PATH:
            return asked in self.names
        try:
            return Path(asked).resolve() == self.folder.resolve()
        except (OSError, ValueError):  # no path at all: too long, a zero byte
            return False

    def check(self, asked: str) -> str:
        """The name as the client wrote it: the SDK finds the tokenizer by that name or folder.

        Raises:
            NotFound: it is another model; the message names this one.
        """
        if self.answers_to(asked):
            return asked
        raise NotFound(
            f"There is no base model '{shortened(asked)}' here.",
            f"This service serves '{self.name}' (folder {self.folder}).",
            "Name that one, or start a service with --model.",
            did_you_mean=nearest(asked, self.names),
            allowed=[*self.names, str(self.folder)],
        )


def base_model(named: str) -> BaseModel:
    """The base model behind a built-in name, a name on the shelf, or a folder.

    Raises:
        NotFound: none of them.
    """
    shelf = environ.home() / "models"
    folder = model_folder(named, shelf)
    if folder is None:
        raise _missing(named, shelf)
    known = builtin_path(named) is not None or folder.is_relative_to(shelf)
    return BaseModel(named if known and not Path(named).is_absolute() else str(folder), folder, shelf)


def _missing(named: str, shelf: Path) -> NotFound:
    there = Path(named).expanduser()
    place = there if there.is_absolute() or there.is_dir() else shelf / named
    known = [*builtin_names(), *(name for name, _ in on_shelf(shelf))]
    return NotFound(
        f"There is no model '{named}'.",
        f"{place.absolute()} holds no config.json.",
        f"Name a folder in Hugging Face format or one of {', '.join(known)}, or register one: `halteres models add`"
        " (a folder, a GGUF file, a name of the hub).",
        did_you_mean=nearest(named, known),
        allowed=known,
    )
