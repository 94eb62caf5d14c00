"""Games about hidden words, Hangman and Wordle, and the words of all word games.

The words are a list of our own that comes with the package, or a file with one word a line.
"""

from __future__ import annotations

import hashlib
import random
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from halteres.environments.games.game import Game, Level, Move
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WordLength(Level):
    """A word of so many letters is hidden."""

    word_length: int


class HiddenWordGame(WordGame[WordLength, str]):
    """A game that hides one word of the basic list."""

    secret: str  # upper case, as all guesses

    def random_word(self, rng: random.Random) -> str:
        """A word of the level's length, upper case."""
        return rng.choice(self.words.of_length(self.level.word_length)).upper()


class Hangman(HiddenWordGame):
    """Guess letters or the whole word.

    Half of the reward is for letters, half for the word. Version 0 goes on when all letters are found, until the word
    is said; its examples of a letter and of a word are exchanged. Version 1 corrects both.
    """

    name = "Hangman"
    levels: ClassVar[Mapping[str, WordLength]] = {
        "easy": WordLength(word_length=3, max_turns=10),
        "hard": WordLength(word_length=7, max_turns=20),
    }
    random_levels = (levels["easy"], WordLength(word_length=5, max_turns=15), levels["hard"])
    corrected = ("easy", "hard", "random")
    pattern = re.compile(r"\\boxed{([a-zA-Z]+)}", re.IGNORECASE)
    state = ("secret", "board", "guessed")
    format_error = "You did not provide a valid guess."

    board: list[str]  # a letter or "_" for each of the secret's
    guessed: list[str]  # letters

    def setup(self) -> None:
        """Draw the word."""
        self.secret = self.random_word(self.rng)
        self.board = ["_"] * len(self.secret)
        self.guessed = []

    def rules(self) -> str:
        """With an example of a word, then of a letter."""
        word, letter = self._random_word(self.rng), self._random_letter(self.rng)
        if self.version == 0:
            word, letter = letter, word
        return (
            "You are playing Hangman.\n"
            f"The objective of the game is to guess the {self.level.word_length}-letter word by providing one letter"
            " guesses or the entire word.\n"
            "The cells that need to be populated with letters are represented by '_'.\n\n"
            f"There are two ways you can answer. You can provide one letter guesses in the format of {letter}, or you"
            f" can guess the entire word in the format of {word}.\n"
            "If the given letter is in the word, it will be revealed in the grid.\n"
            "If the given word is correct, you win.\n"
            "As you play, the history of your choices will be appended below. Use the information to figure out the"
            " word and win.\n"
            "Some rules:\n"
            "1. You can only guess one letter/word at a time.\n"
            f"2. You have to win within {self.level.max_turns} turns.\n\n"
        )

    def suffix(self) -> str:
        """The letters found so far, under the numbers of their columns."""
        columns = " ".join(f"C{column:02}" for column in range(len(self.board)))
        row = "".join(f"  {letter} " for letter in self.board)
        return f"Here is the current state of the Hangman grid:\n{columns}\n{row}\n\nEnter your guess."

    def parse(self, found: re.Match[str]) -> str:
        """Letter or word."""
        return found[1].upper()

    def move(self, action: str) -> Move:
        """One letter is a guess of that letter, more are a guess of the word."""
        return self._guess_letter(action) if len(action) == 1 else self._guess_word(action)

    def random_action(self, rng: random.Random) -> str:
        """A word or a letter."""
        return rng.choice([self._random_word, self._random_letter])(rng)

    def _guess_word(self, word: str) -> Move:
        guessed = f"At turn {self.turn}, You guessed '{word}' which is"
        if word == self.secret:
            hidden = self.board.count("_") / len(self.board)
            return Move(self._congratulations(), hidden * 0.5 + 0.5, "success")
        if len(word) != len(self.secret):
            return Move(f"{guessed} of length {len(word)}, but the secret word is of length {len(self.secret)}.")
        return Move(f"{guessed} incorrect.")

    def _guess_letter(self, letter: str) -> Move:
        if letter in self.guessed:
            return Move(f"At turn {self.turn}, you guessed '{letter}', which has been already guessed before.")
        self.guessed.append(letter)
        if letter not in self.secret:
            return Move(f"At turn {self.turn}, you guessed a letter '{letter}' that is not in the secret word.")
        self.board = [
            hidden if hidden == letter else shown for hidden, shown in zip(self.secret, self.board, strict=True)
        ]
        reward = self.secret.count(letter) / len(self.secret) * 0.5
        if self.version > 0 and "_" not in self.board:
            return Move(self._congratulations(), reward + 0.5, "success")
        text = f"At turn {self.turn}, you successfully guessed a letter '{letter}' that is in the secret word."
        return Move(text, reward)

    def _congratulations(self) -> str:
        return f"Congratulations! You guessed the word '{self.secret}' correctly!"

    def _random_word(self, rng: random.Random) -> str:
        return f"\\boxed{{{self.random_word(rng)}}}"

    def _random_letter(self, rng: random.Random) -> str:
        return f"\\boxed{{{rng.choice(string.ascii_uppercase)}}}"


class Wordle(HiddenWordGame):
    """Guess the word; half of the reward is for letters found in their place, half for the word.

    Any letters are a guess, in both versions: no list has all words. Version 0 shows the marks as a Python list and
    leaves tabs within a guess; version 1 shows them as letters and takes all blanks out.
    """

    name = "Wordle"
    levels: ClassVar[Mapping[str, WordLength]] = {
        "easy": WordLength(word_length=3, max_turns=15),
        "hard": WordLength(word_length=5, max_turns=25),
    }
    corrected = ("easy", "hard", "random")
    pattern = re.compile(r"\\boxed{([a-zA-Z]+(?:\s+[a-zA-Z]+)*)}")
    state = ("secret", "guesses", "found")

    guesses: list[str]
    found: list[bool]  # for each letter of the secret, whether a guess had it in its place

    def random_level(self) -> WordLength:
        """3 to 5 letters, five turns for each."""
        length = self.rng.randint(3, 5)
        return WordLength(word_length=length, max_turns=5 * length)

    def setup(self) -> None:
        """Draw the word."""
        self.secret = self.random_word(self.rng)
        self.guesses = []
        self.found = [False] * len(self.secret)

    def rules(self) -> str:
        """With an example guess, which may be the word itself."""
        return (
            "You are playing Wordle.\n"
            f"You have to guess the secret {self.level.word_length}-letter word within {self.level.max_turns} turns.\n"
            "After you enter your guess, I will say mark your guess as follows:\n"
            "  - G (green): correct letter in the correct position\n"
            "  - Y (yellow): letter exists in the word but in the wrong position\n"
            "  - X (wrong): letter is not in the word\n"
            "After thinking, format your final answer inside \\boxed{...},"
            f" for example, {self.random_action(self.rng)}.\n"
            "As you play, the history of your guesses will be appended below. Use the information to complete the game"
            " before you run out of guesses.\n"
        )

    def suffix(self) -> str:
        """There is no board."""
        return "Enter your guess."

    def parse(self, found: re.Match[str]) -> str:
        """The letters, without the spaces between them."""
        guess = found[1].upper()
        return guess.replace(" ", "") if self.version == 0 else "".join(guess.split())

    def move(self, action: str) -> Move:
        """Mark a guess."""
        guessed = f"At turn {self.turn}, you guessed {action}"
        if len(action) != len(self.secret):
            return Move(
                f"{guessed} which has {len(action)} letters but the secret word has {len(self.secret)} letters."
            )
        if action in self.guesses:
            return Move(f"{guessed}, which has been already guessed before.")
        self.guesses.append(action)
        marks = _marks(action, self.secret)
        newly_found = [mark == "G" and not before for mark, before in zip(marks, self.found, strict=True)]
        self.found = [before or now for before, now in zip(self.found, newly_found, strict=True)]
        reward = 0.5 * sum(newly_found) / len(self.secret)
        if action == self.secret:
            text = f"Congratulations! You guessed the secret word {self.secret} in {self.turn} turns."
            return Move(text, reward + 0.5, "success")
        shown = str(marks) if self.version == 0 else "".join(marks)
        return Move(f"{guessed}\nFeedback:\n{action}\n{shown}", reward)

    def random_action(self, rng: random.Random) -> str:
        """A word of the list."""
        return f"\\boxed{{{self.random_word(rng)}}}"


def _marks(guess: str, secret: str) -> list[str]:
    """G for a letter in its place, Y for one elsewhere in the secret, X for others; each letter counts once."""
    left = [hidden for letter, hidden in zip(guess, secret, strict=True) if letter != hidden]
    marks: list[str] = []
    for letter, hidden in zip(guess, secret, strict=True):
        if letter == hidden:
            marks.append("G")
        elif letter in left:
            left.remove(letter)
            marks.append("Y")
        else:
            marks.append("X")
    return marks
