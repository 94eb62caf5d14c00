"""Words for the word games: a list of our own that comes with the package, or one word a line from a file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from halteres.environments.games.game import Game, Level
from halteres.errors import InvalidConfig
from halteres.rollouts.rng import Split

FOLDER = Path(__file__).parents[1] / "data" / "words"
"""basic.txt has common words of 3 to 7 letters, long.txt of 8 to 10."""

LevelT = TypeVar("LevelT", bound=Level)
ActionT = TypeVar("ActionT")


class WordList:
    """Words in their order, which is part of what a seed means.

    Args:
        basic: for all levels but the hard ones of WordSearch.
        full: for those.
        source: where they come from, for errors.
    """

    def __init__(self, basic: Sequence[str], full: Sequence[str], source: str) -> None:
        self.basic, self.full, self.source = tuple(basic), tuple(full), source
        self.sha256 = hashlib.sha256("\n".join(full).encode()).hexdigest()
        self._by_length: dict[int, tuple[str, ...]] = {}

    def of_length(self, length: int) -> tuple[str, ...]:
        """The basic words of so many letters, lower case and letters alone.

        Raises:
            InvalidConfig: there is none.
        """
        if length not in self._by_length:
            self._by_length[length] = tuple(
                word for word in self.basic if len(word) == length and word.isalpha() and word.islower()
            )
        if not self._by_length[length]:
            raise InvalidConfig(
                f"{self.source} has no word of {length} letters.",
                "This level of the game hides one.",
                "Add some, one a line in lower case, or leave `words` out: the bundled list has 3 to 10 letters.",
            )
        return self._by_length[length]


@lru_cache(maxsize=4)
def load_words(file: str | None = None) -> WordList:
    """The bundled words, or those of a file, one a line. A file is read once per process.

    Raises:
        InvalidConfig: the file cannot be read as text, or has no words.
    """
    if file is None:
        basic, long = (_lines((FOLDER / name).read_text()) for name in ("basic.txt", "long.txt"))
        return WordList(basic, basic + long, "The bundled word list")
    try:
        words = _lines(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfig(
            f"The word list {file} cannot be read.", f"{error}.", "Set `words` to a text file with one word a line."
        ) from error
    if not words:
        raise InvalidConfig(f"The word list {file} is empty.", next="Put one word on each line.")
    return WordList(words, words, f"The word list {file}")


class WordGame(Game[LevelT, ActionT]):
    """A game that hides words. The list's hash is a parameter of its task, so that the task says what a seed means."""

    options: ClassVar[Mapping[str, Any]] = {"words": None, "words_sha256": None}

    def __init__(
        self,
        id: str,
        *,
        split: Split = "train",
        base_seed: int = 0,
        words: str | Path | None = None,
        words_sha256: str | None = None,
        **parameters: Any,
    ) -> None:
        file = None if words is None else str(words)
        self.words = load_words(file)
        if words_sha256 not in (None, self.words.sha256):
            raise InvalidConfig(
                f"{self.words.source} is another one than the task names.",
                f"The hash of its words is {self.words.sha256}, words_sha256 is {words_sha256}.",
                "Set `words` to the list that the task was made with, or leave words_sha256 out.",
            )
        super().__init__(id, split=split, base_seed=base_seed, words=file, **parameters)
        self.task = replace(self.task, parameters={**self.task.parameters, "words_sha256": self.words.sha256})


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]
