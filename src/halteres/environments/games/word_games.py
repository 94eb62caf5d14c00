"""Games about hidden words: Hangman, Wordle, WordSearch; and their words.

The words are a list of our own that comes with the package, or a file with one word a line.
"""

from __future__ import annotations

import hashlib
import random
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from halteres.environments.games.game import Game, Level, Move, boxed
from halteres.errors import InvalidConfig
from halteres.rollouts.rng import Split

FOLDER = Path(__file__).parents[1] / "data" / "words"
"""basic.txt has common words of 3 to 7 letters, long.txt of 8 to 10."""

LevelT = TypeVar("LevelT", bound=Level)
ActionT = TypeVar("ActionT")


@dataclass(frozen=True, slots=True, eq=False)
class WordList:
    """Words in their order, which is part of what a seed means."""

    basic: list[str]  # for all levels but the hard ones of WordSearch
    full: list[str]  # for those
    source: str  # where they come from, for errors
    sha256: str  # of `full`


@lru_cache(maxsize=4)
def load_words(file: str | None = None) -> WordList:
    """The bundled words, or those of a file, one a line. A file is read once per process.

    Raises:
        InvalidConfig: the file cannot be read as text, or has no words.
    """
    source = "The bundled word list" if file is None else f"The word list {file}"
    files = [FOLDER / "basic.txt", FOLDER / "long.txt"] if file is None else [Path(file)]
    try:
        texts = [one.read_text(encoding="utf-8") for one in files]
    except (OSError, ValueError) as error:
        raise InvalidConfig(
            f"{source} cannot be read.",
            f"{error}.",
            "Set `words` to a text file with one word a line.",
        ) from error
    basic, *others = ([line for line in text.splitlines() if line.strip()] for text in texts)
    full = sum(others, basic)
    if not full:
        raise InvalidConfig(f"{source} is empty.", next="Put one word on each line.")
    return WordList(basic, full, source, hashlib.sha256("\n".join(full).encode()).hexdigest())


@cache
def words_of_length(words: WordList, length: int) -> list[str]:
    """The basic words of so many letters, lower case and letters alone.

    Raises:
        InvalidConfig: there is none.
    """
    found = [
        word for word in words.basic if len(word) == length and word.isalpha() and word.islower()
    ]
    if not found:
        raise InvalidConfig(
            f"{words.source} has no word of {length} letters.",
            "This level of the game hides one.",
            "Add some, one a line in lower case, or leave `words` out: the bundled list has 3 to "
            "10 letters.",
        )
    return found


class WordGame(Game[LevelT, ActionT]):
    """A game that hides words. The list's hash is a parameter of its task, so that the task says
    what a seed means.
    """

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
        self.task = replace(
            self.task, parameters={**self.task.parameters, "words_sha256": self.words.sha256}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WordLength(Level):
    """A word of so many letters is hidden."""

    word_length: int


class HiddenWordGame(WordGame[WordLength, str]):
    """A game that hides one word of the basic list."""

    secret: str  # upper case, as all guesses

    def random_word(self, rng: random.Random) -> str:
        """A word of the level's length, upper case."""
        return rng.choice(words_of_length(self.words, self.level.word_length)).upper()


class Hangman(HiddenWordGame):
    """Guess letters or the whole word.

    Half of the reward is for letters, half for the word. Version 0 goes on when all letters are
    found, until the word is said; its examples of a letter and of a word are exchanged. Version 1
    corrects both.
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

    def _setup(self) -> None:
        self.secret = self.random_word(self.rng)
        self.board = ["_"] * len(self.secret)
        self.guessed = []

    def _rules(self) -> str:
        """With an example of a word, then of a letter."""
        word, letter = self._random_word(self.rng), self._random_letter(self.rng)
        if self.version == 0:
            word, letter = letter, word
        return (
            "You are playing Hangman.\n"
            f"The objective of the game is to guess the {self.level.word_length}-letter word by "
            "providing one letter"
            " guesses or the entire word.\n"
            "The cells that need to be populated with letters are represented by '_'.\n\n"
            "There are two ways you can answer. You can provide one letter guesses in the format "
            f"of {letter}, or you"
            f" can guess the entire word in the format of {word}.\n"
            "If the given letter is in the word, it will be revealed in the grid.\n"
            "If the given word is correct, you win.\n"
            "As you play, the history of your choices will be appended below. Use the information "
            "to figure out the"
            " word and win.\n"
            "Some rules:\n"
            "1. You can only guess one letter/word at a time.\n"
            f"2. You have to win within {self.level.max_turns} turns.\n\n"
        )

    def _suffix(self) -> str:
        columns = " ".join(f"C{column:02}" for column in range(len(self.board)))
        row = "".join(f"  {letter} " for letter in self.board)
        return (
            f"Here is the current state of the Hangman grid:\n{columns}\n{row}\n\nEnter your guess."
        )

    def _parse(self, found: re.Match[str]) -> str:
        return found[1].upper()

    def _move(self, action: str) -> Move:
        """One letter is a guess of that letter, more are a guess of the word."""
        won = f"Congratulations! You guessed the word '{self.secret}' correctly!"
        if len(action) > 1:
            guessed = f"At turn {self.turn}, You guessed '{action}' which is"
            if action == self.secret:
                return Move(won, self.board.count("_") / len(self.board) * 0.5 + 0.5, "success")
            if len(action) != len(self.secret):
                length = len(self.secret)
                return Move(
                    f"{guessed} of length {len(action)}, but the secret word is of length {length}."
                )
            return Move(f"{guessed} incorrect.")
        if action in self.guessed:
            return Move(
                f"At turn {self.turn}, you guessed '{action}', which has been already guessed "
                "before."
            )
        self.guessed.append(action)
        if action not in self.secret:
            return Move(
                f"At turn {self.turn}, you guessed a letter '{action}' that is not in the secret "
                "word."
            )
        pairs = zip(self.secret, self.board, strict=True)
        self.board = [letter if letter == action else shown for letter, shown in pairs]
        reward = self.secret.count(action) / len(self.secret) * 0.5
        if self.version > 0 and "_" not in self.board:
            return Move(won, reward + 0.5, "success")
        text = (
            f"At turn {self.turn}, you successfully guessed a letter '{action}' that is in the "
            "secret word."
        )
        return Move(text, reward)

    def _is_possible(self) -> bool:
        return len(self.board) == len(self.secret) == self.level.word_length

    def random_action(self, rng: random.Random) -> str:
        """A word or a letter."""
        return rng.choice([self._random_word, self._random_letter])(rng)

    def _random_word(self, rng: random.Random) -> str:
        return boxed(self.random_word(rng))

    def _random_letter(self, rng: random.Random) -> str:
        return boxed(rng.choice(string.ascii_uppercase))


class Wordle(HiddenWordGame):
    """Guess the word; half of the reward is for letters found in their place, half for the word.

    Any letters are a guess, in both versions: no list has all words. Version 0 shows the marks as a
    Python list and leaves tabs within a guess; version 1 shows them as letters and takes all blanks
    out.
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

    def _random_level(self) -> WordLength:
        """3 to 5 letters, five turns for each."""
        length = self.rng.randint(3, 5)
        return WordLength(word_length=length, max_turns=5 * length)

    def _setup(self) -> None:
        self.secret = self.random_word(self.rng)
        self.guesses = []
        self.found = [False] * len(self.secret)

    def _rules(self) -> str:
        return (
            "You are playing Wordle.\n"
            f"You have to guess the secret {self.level.word_length}-letter word within "
            f"{self.level.max_turns} turns.\n"
            "After you enter your guess, I will say mark your guess as follows:\n"
            "  - G (green): correct letter in the correct position\n"
            "  - Y (yellow): letter exists in the word but in the wrong position\n"
            "  - X (wrong): letter is not in the word\n"
            "After thinking, format your final answer inside \\boxed{...},"
            f" for example, {self.random_action(self.rng)}.\n"
            "As you play, the history of your guesses will be appended below. Use the information "
            "to complete the game"
            " before you run out of guesses.\n"
        )

    def _suffix(self) -> str:
        return "Enter your guess."

    def _parse(self, found: re.Match[str]) -> str:
        guess = found[1].upper()
        return guess.replace(" ", "") if self.version == 0 else "".join(guess.split())

    def _move(self, action: str) -> Move:
        guessed = f"At turn {self.turn}, you guessed {action}"
        if len(action) != len(self.secret):
            return Move(
                f"{guessed} which has {len(action)} letters but the secret word has "
                f"{len(self.secret)} letters."
            )
        if action in self.guesses:
            return Move(f"{guessed}, which has been already guessed before.")
        self.guesses.append(action)
        # G for a letter in its place, Y for one elsewhere in the secret, X for others; each letter
        # counts once.
        left = [
            hidden for letter, hidden in zip(action, self.secret, strict=True) if letter != hidden
        ]
        marks: list[str] = []
        for letter, hidden in zip(action, self.secret, strict=True):
            if letter != hidden and letter in left:
                left.remove(letter)
                marks.append("Y")
            else:
                marks.append("G" if letter == hidden else "X")
        newly_found = [
            mark == "G" and not before for mark, before in zip(marks, self.found, strict=True)
        ]
        self.found = [before or now for before, now in zip(self.found, newly_found, strict=True)]
        reward = 0.5 * sum(newly_found) / len(self.secret)
        if action == self.secret:
            text = (
                f"Congratulations! You guessed the secret word {self.secret} in {self.turn} turns."
            )
            return Move(text, reward + 0.5, "success")
        shown = str(marks) if self.version == 0 else "".join(marks)
        return Move(f"{guessed}\nFeedback:\n{action}\n{shown}", reward)

    def _is_possible(self) -> bool:
        return len(self.found) == len(self.secret) == self.level.word_length

    def random_action(self, rng: random.Random) -> str:
        """A word of the list."""
        return boxed(self.random_word(rng))


Line = tuple[int, int, int, int]
"""Start row, start column, end row, end column; from 0."""

Place = list[Any]
"""Row and column of a word's first letter, "across" or "down"; a list, because JSON has no
tuples.
"""

EMPTY = "."


@dataclass(frozen=True, slots=True, kw_only=True)
class WordCount(Level):
    """How many words are drawn, and from which list."""

    num_words: int = 5
    full_list: bool


class WordSearch(WordGame[WordCount, Line]):
    """Say where words begin and end.

    Version 0 pays a word again when its ends are exchanged, and never says which words are hidden.
    Version 1 pays it once and lists them.
    """

    name = "WordSearch"
    levels: ClassVar[Mapping[str, WordCount]] = {
        "easy": WordCount(full_list=False, max_turns=20),
        "hard": WordCount(full_list=True, max_turns=20),
    }
    random_levels = (levels["easy"], levels["hard"])
    corrected = ("easy", "hard", "random")
    pattern = re.compile(r"\\boxed\{(\d+)\s+(\d+)\s+(\d+)\s+(\d+)\}")
    state = ("grid", "places", "found", "marked", "attempts")
    format_error = (
        "At turn {turn}, you did not provide a valid guess in \\boxed{{start_row "
        "start_col end_row end_col}} format."
    )

    grid: list[list[str]]  # square; a capital letter in each cell
    places: dict[str, Place]  # by word, longest word first
    found: list[str]
    marked: list[list[int]]  # row and column of each cell of a word that was found
    attempts: list[list[int]]

    @property
    def exploitable(self) -> bool:
        """Version 0 pays a word twice."""
        return self.version == 0

    def _setup(self) -> None:
        words = self.words.full if self.level.full_list else self.words.basic
        drawn = [
            word.upper() for word in self.rng.sample(words, min(self.level.num_words, len(words)))
        ]
        self.grid, self.places = _hide(sorted(drawn, key=len, reverse=True), self.rng)
        self.found, self.marked, self.attempts = [], [], []

    def _rules(self) -> str:
        hidden = (
            ""
            if self.version == 0
            else f"\nThe hidden words are: {', '.join(sorted(self.places))}."
        )
        return (
            "You are participating in a Word Search challenge "
            f"({'Hardcore' if self.level.full_list else 'Basic'}).\n"
            "The objective is to find and highlight hidden words on the grid below.\n"
            "The rows and columns are numbered for your reference.\n\n"
            "Words you have already found are marked in square brackets [ ].\n"
            "Each row and column is numbered for clarity.\n\n"
            "To locate a word, specify the row and column of its start and end letters.\n"
            "Note that words are either across (horizontal) or down (vertical).\n"
            "Use the format \\boxed{start_row start_col end_row end_col} for submission.\n"
            "For instance: \\boxed{1 1 1 5} to find a word from row 1, col 1 to row 1, col 5.\n\n"
            "Guidelines:\n"
            f"- you have a maximum of {self.level.max_turns} turns to find all the words.\n"
            "- Each guess must be unique; you cannot repeat the same guess.\n"
            "- The history of your attempts will be recorded below.\n"
            f"- Make your guesses carefully and strategically!{hidden}"
        )

    def _suffix(self) -> str:
        columns = "   " + " ".join(f"C{column:02}" for column in range(len(self.grid)))
        marked = {(row, column) for row, column in self.marked}
        rows = [
            f"R{row:02} "
            + "".join(
                f"[{letter}] " if (row, column) in marked else f" {letter}  "
                for column, letter in enumerate(line)
            )
            for row, line in enumerate(self.grid)
        ]
        board = "\n".join([columns, *rows])
        return (
            f"Current Board:\n{board}\nWords Found: "
            f"{len(self.found)}/{len(self.places)}\nEnter your guess."
        )

    def _parse(self, found: re.Match[str]) -> Line:
        start_row, start_column, end_row, end_column = (int(number) for number in found.groups())
        return start_row, start_column, end_row, end_column

    def _move(self, action: Line) -> Move:
        tried_before = list(action) in self.attempts
        self.attempts.append(list(action))
        start_row, start_column, end_row, end_column = action
        ends = f"({start_row}, {start_column}) to ({end_row}, {end_column})"
        if max(action) >= len(self.grid):
            return Move(f"At turn {self.turn}, your tried coordinates {ends} are out of bounds.")
        if tried_before:
            return Move(f"At turn {self.turn}, you have already tried the coordinates {ends}.")
        if start_row != end_row and start_column != end_column:
            return Move(
                f"At turn {self.turn}, you tried {ends}, which is not valid because words must be "
                "either across"
                " (horizontal) or down (vertical)."
            )
        # the first placed word with these ends, either way round
        ways = (action, (*action[2:], *action[:2]))
        word = next((word for word in self.places if self._line(word) in ways), None)
        if word is None:
            return Move(
                f"At turn {self.turn}, incorrect attempt. No word found at coordinates {ends}."
            )
        if word not in self.found:
            self.found.append(word)
            self.marked += [list(cell) for cell in _span(word, self.places[word])]
        elif self.version > 0:
            return Move(f"At turn {self.turn}, you have already found the word '{word}'.")
        reward = 1 / len(self.places)
        if len(self.found) == len(self.places):
            return Move("Congratulations! You completed the Word Search puzzle!", reward, "success")
        return Move(
            f"At turn {self.turn}, correct! You found the word '{word}' at coordinates {ends}.",
            reward,
        )

    def _is_possible(self) -> bool:
        side = len(self.grid)
        ends = [self._line(word) for word in self.places]
        return (
            {len(row) for row in self.grid} == {side}
            and self.places.keys() >= {*self.found}
            and all(min(line) >= 0 and max(line) < side for line in ends)
            and all(len(cell) == 2 for cell in self.marked)
            and all(len(attempt) == 4 for attempt in self.attempts)
        )

    def random_action(self, rng: random.Random) -> str:
        """A line of the grid, across or down."""
        row, column, end = (rng.randrange(len(self.grid)) for _ in range(3))
        across = rng.random() < 0.5
        return f"\\boxed{{{row} {column} {row if across else end} {end if across else column}}}"

    def _line(self, word: str) -> Line:
        cells = _span(word, self.places[word])
        return (*cells[0], *cells[-1])


def _hide(words: list[str], rng: random.Random) -> tuple[list[list[str]], dict[str, Place]]:
    """A grid with the words, and where each of them is; one for which there is no room is left
    out.
    """
    directions = {word: rng.choice(["across", "down"]) for word in words}
    size = round(1.5 * max(len(word) for word in words))
    grid = [[EMPTY] * size for _ in range(size)]
    places: dict[str, Place] = {}
    for word in words:
        # Best place first: the centre for the first one, crossings for others, then anywhere.
        direction, middle, start = directions[word], size // 2, (size - len(word)) // 2
        if places:
            best = list(_crossings(word, direction, places, size))
            rng.shuffle(best)
        else:
            best = [
                [middle, start, direction] if direction == "across" else [start, middle, direction]
            ]
        anywhere = [[row, column, direction] for row in range(size) for column in range(size)]
        for place in best + anywhere:
            cells = list(zip(word, _span(word, place), strict=True))
            is_inside = max(cells[-1][1]) < size
            if is_inside and all(
                grid[row][column] in (EMPTY, letter) for letter, (row, column) in cells
            ):
                places[word] = place
                for letter, (row, column) in cells:
                    grid[row][column] = letter
                break
    for line in grid:
        line[:] = [
            rng.choice(string.ascii_uppercase) if letter == EMPTY else letter for letter in line
        ]
    return grid, places


def _crossings(
    word: str, direction: str, places: Mapping[str, Place], size: int
) -> Iterator[Place]:
    """Places at which a word shares a letter with a placed word of the other direction and begins
    inside the grid.
    """
    for placed, (placed_row, placed_column, placed_direction) in places.items():
        if placed_direction == direction:
            continue
        for index, letter in enumerate(word):
            for placed_index, placed_letter in enumerate(placed):
                down = direction == "down"
                row = placed_row - index if down else placed_row + placed_index
                column = placed_column + placed_index if down else placed_column - index
                if letter == placed_letter and 0 <= row < size and 0 <= column < size:
                    yield [row, column, direction]


def _span(word: str, place: Place) -> list[tuple[int, int]]:
    """The cells of a word, in its order."""
    row, column, direction = place
    return [
        (row, column + i) if direction == "across" else (row + i, column) for i in range(len(word))
    ]
