"""Wordle: find a hidden word from what each guess has in common with it."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from halteres.environments.games.game import Level, Move
from halteres.environments.games.words import WordGame


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretWord(Level):
    """Of so many letters."""

    word_length: int


class Wordle(WordGame[SecretWord, str]):
    """Guess the word; half of the reward is for letters found in their place, half for the word.

    Any letters are a guess, in both versions: no list has all words. Version 0 shows the marks as a Python list and
    leaves tabs within a guess; version 1 shows them as letters and takes all blanks out.
    """

    name = "Wordle"
    levels: ClassVar[Mapping[str, SecretWord]] = {
        "easy": SecretWord(word_length=3, max_turns=15),
        "hard": SecretWord(word_length=5, max_turns=25),
    }
    corrected = ("easy", "hard", "random")
    pattern = re.compile(r"\\boxed{([a-zA-Z]+(?:\s+[a-zA-Z]+)*)}")
    state = ("secret", "guesses", "found")

    secret: str  # upper case, as all guesses
    guesses: list[str]
    found: list[bool]  # for each letter of the secret, whether a guess had it in its place

    def random_level(self) -> SecretWord:
        """3 to 5 letters, five turns for each."""
        length = self.rng.randint(3, 5)
        return SecretWord(word_length=length, max_turns=5 * length)

    def setup(self) -> None:
        """Draw the word."""
        self.secret = self.rng.choice(self.words.of_length(self.level.word_length)).upper()
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
        return f"\\boxed{{{rng.choice(self.words.of_length(self.level.word_length)).upper()}}}"


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
