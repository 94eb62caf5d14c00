"""The base model that a service serves.

Owns: by which names clients may call it.
Never: reads weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from halteres.errors import NotFound, nearest
from halteres.models import builtin_path


@dataclass(frozen=True, slots=True)
class BaseModel:
    """One base model: its name and its folder, which also holds the tokenizer."""

    name: str
    folder: Path  # absolute

    def check(self, asked: str) -> str:
        """The name as the client wrote it: the SDK finds the tokenizer by that name or folder.

        Raises:
            NotFound: it is another model; the message names this one.
        """
        if asked == self.name or (asked.startswith("/") and Path(asked).resolve() == self.folder.resolve()):
            return asked
        raise NotFound(
            f"There is no base model '{asked}' here.",
            f"This service serves '{self.name}' (folder {self.folder}).",
            "Name that one, or start a service with --model.",
            did_you_mean=nearest(asked, [self.name]),
            allowed=[self.name, str(self.folder)],
        )


def base_model(named: str) -> BaseModel:
    """The base model behind a built-in name or a folder.

    Raises:
        NotFound: neither.
    """
    folder = builtin_path(named) or Path(named).expanduser().absolute()
    if not (folder / "config.json").is_file():
        raise NotFound(
            f"There is no model '{named}'.",
            f"{folder} holds no config.json.",
            "Name 'halteres/tiny' or a model folder in Hugging Face format.",
        )
    return BaseModel(named if builtin_path(named) else str(folder), folder)
