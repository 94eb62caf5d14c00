"""GuessTheNumber: find a hidden number from hints of "lower" and "higher"."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from halteres.environments.games.game import Game, Level, Move


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRange(Level):
    """Both ends belong to it."""

    min_number: int
    max_number: int


class GuessTheNumber(Game[NumberRange, int]):
    """Guess a number; at the turn limit, the last guess is paid by its distance."""

    name = "GuessTheNumber"
    levels: ClassVar[Mapping[str, NumberRange]] = {
        "easy": NumberRange(min_number=1, max_number=10, max_turns=4),
        "hard": NumberRange(min_number=1, max_number=50, max_turns=7),
    }
    pattern = re.compile(r"\\boxed\{(\d+)\}")
    state = ("number", "guesses")

    number: int
    guesses: list[int]

    def random_level(self) -> NumberRange:
        """6 to 51 numbers, the smallest of them 1 to 10; the wider the range, the more turns."""
        low = self.rng.randint(1, 10)
        high = self.rng.randint(low + 5, low + 50)
        return NumberRange(min_number=low, max_number=high, max_turns=math.ceil(math.sqrt(high - low)) + 1)

    def setup(self) -> None:
        """Draw the number."""
        self.number = self.rng.randint(self.level.min_number, self.level.max_number)
        self.guesses = []

    def rules(self) -> str:
        """With an example guess."""
        return (
            "You are playing Guess The Number.\n"
            f"You have to guess the number between {self.level.min_number} and {self.level.max_number} (inclusive)"
            f" within {self.level.max_turns} turns.\n"
            "As you enter your guess, the game will provide you with hints such as the target number is 'higher' or"
            " 'lower'.\n"
            "You may provide your response in any manner. Only the number that is wrapped inside \\boxed{} will be"
            f" considered as your guess, for example, {self.random_action(self.rng)}.\n"
            "As you play, the history of your guesses will be appended below. Use the information to complete the game"
            " before you run out of guesses.\n"
            "Enter your first guess to start the game.\n"
        )

    def suffix(self) -> str:
        """There is no board."""
        return "Enter your next guess."

    def parse(self, found: re.Match[str]) -> int | None:
        """GEM takes 0 for no guess at all."""
        return int(found[1]) or None

    def move(self, action: int) -> Move:
        """Compare a guess with the number."""
        guessed = f"At turn {self.turn}, you guessed {action},"
        if not self.level.min_number <= action <= self.level.max_number:
            return Move(f"{guessed} which is outside the range specified.")
        if action in self.guesses:
            return Move(f"{guessed} which has been already guessed before.")
        self.guesses.append(action)
        if action == self.number:
            text = f"Congratulations! You guessed the correct number {self.number} in {self.turn} turns."
            return Move(text, 1.0, "success")
        hint = "lower" if action > self.number else "higher"
        return Move(f"{guessed} and the target number is {hint} than {action}.")

    def turn_limit_reward(self, action: int) -> float:
        """1 less the distance as a share of the range, for a guess that was made before too."""
        if not self.level.min_number <= action <= self.level.max_number:
            return 0.0
        return 1 - abs(action - self.number) / (self.level.max_number - self.level.min_number)

    def random_action(self, rng: random.Random) -> str:
        """Any number of the range."""
        return f"\\boxed{{{rng.randint(self.level.min_number, self.level.max_number)}}}"
