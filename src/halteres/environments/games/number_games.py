"""Games about hidden numbers: GuessTheNumber (hints of "lower" and "higher") and Mastermind (black and white pegs)."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Code(Level):
    """Digits from 1 to `num_digits`, each at most once."""

    length: int
    num_digits: int


class Mastermind(Game[Code, list[int]]):
    """Guess a code; each black peg beyond the best guess so far is paid."""

    name = "Mastermind"
    levels: ClassVar[Mapping[str, Code]] = {
        "easy": Code(length=2, num_digits=6, max_turns=10),
        "hard": Code(length=4, num_digits=8, max_turns=30),
    }
    random_levels = (
        Code(length=2, num_digits=4, max_turns=10),
        Code(length=4, num_digits=6, max_turns=20),
        levels["hard"],
    )
    pattern = re.compile(r"\\boxed\{(\d+(?:\s+\d+)*)\}")
    state = ("code", "guesses", "most_black")
    suffix_at_reset = False  # as in GEM

    code: list[int]
    guesses: list[list[int]]
    most_black: int

    def setup(self) -> None:
        """Draw the code."""
        self.code = self.rng.sample(range(1, self.level.num_digits + 1), self.level.length)
        self.guesses = []
        self.most_black = 0

    def rules(self) -> str:
        """With an example guess."""
        return (
            "You are playing Mastermind.\n"
            f"You have to guess the secret {self.level.length} digit code within {self.level.max_turns} turns.\n"
            f"The code consists of digits from 1 to {self.level.num_digits} (inclusive). Duplicate numbers are not"
            " allowed.\n"
            "After you enter your guess, I will say mark your guess with black and white pegs, where a black peg"
            " indicates a correct digit in the correct position, while a white peg indicates a correct digit in the"
            " wrong position.\n"
            f"After thinking, format your final answer inside \\boxed{{...}}, for example,"
            f" {self.random_action(self.rng)}.\n"
            "As you play, the history of your guesses will be appended below. Use the information to complete the game"
            " before you run out of guesses.\n"
            "Enter your first guess to start the game.\n"
        )

    def suffix(self) -> str:
        """There is no board."""
        return "Enter your guess."

    def parse(self, found: re.Match[str]) -> list[int]:
        """Any count of any numbers."""
        return [int(digits) for digits in found[1].split()]

    def move(self, action: list[int]) -> Move:
        """Compare a guess with the code."""
        guessed = f"At turn {self.turn}, you guessed {action}"
        if len(action) != self.level.length:
            return Move(f"{guessed} which has {len(action)} entries but the code has length {self.level.length}.")
        if not all(1 <= digit <= self.level.num_digits for digit in action):
            return Move(f"{guessed}, which has numbers outside the range 1 to {self.level.num_digits}.")
        if action in self.guesses:
            return Move(f"{guessed}, which has been already guessed before.")
        self.guesses.append(action)
        black = sum(digit == hidden for digit, hidden in zip(action, self.code, strict=True))
        white = len(set(action) & set(self.code)) - black
        reward = max(0, black - self.most_black) / self.level.length
        self.most_black = max(self.most_black, black)
        if black == self.level.length:
            text = f"Congratulations! You guessed the correct code {self.code} in {self.turn} turns."
            return Move(text, reward, "success")
        return Move(f"{guessed}. This guess receives {black} black peg(s) and {white} white peg(s).", reward)

    def random_action(self, rng: random.Random) -> str:
        """A guess that may be the code."""
        digits = rng.sample(range(1, self.level.num_digits + 1), self.level.length)
        return f"\\boxed{{{' '.join(map(str, digits))}}}"
