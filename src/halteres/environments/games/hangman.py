"""Hangman: find a hidden word by its letters."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from halteres.environments.games.game import Level, Move
from halteres.environments.games.words import WordGame


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenWord(Level):
    """Of so many letters."""

    word_length: int


class Hangman(WordGame[HiddenWord, str]):
    """Guess letters or the whole word.

    Half of the reward is for letters, half for the word. Version 0 goes on when all letters are found, until the word
    is said; its examples of a letter and of a word are exchanged. Version 1 corrects both.
    """

    name = "Hangman"
    levels: ClassVar[Mapping[str, HiddenWord]] = {
        "easy": HiddenWord(word_length=3, max_turns=10),
        "hard": HiddenWord(word_length=7, max_turns=20),
    }
    random_levels = (levels["easy"], HiddenWord(word_length=5, max_turns=15), levels["hard"])
    corrected = ("easy", "hard", "random")
    pattern = re.compile(r"\\boxed{([a-zA-Z]+)}", re.IGNORECASE)
    state = ("secret", "board", "guessed")
    format_error = "You did not provide a valid guess."

    secret: str  # upper case, as all guesses
    board: list[str]  # a letter or "_" for each of the secret's
    guessed: list[str]  # letters

    def setup(self) -> None:
        """Draw the word."""
        self.secret = self.rng.choice(self.words.of_length(self.level.word_length)).upper()
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
        return f"\\boxed{{{rng.choice(self.words.of_length(self.level.word_length)).upper()}}}"

    def _random_letter(self, rng: random.Random) -> str:
        return f"\\boxed{{{rng.choice(string.ascii_uppercase)}}}"
