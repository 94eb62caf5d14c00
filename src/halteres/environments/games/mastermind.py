"""Mastermind: find a hidden code of digits from black and white pegs."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from halteres.environments.games.game import Game, Level, Move


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
    random_levels: ClassVar[Sequence[Code]] = (
        Code(length=2, num_digits=4, max_turns=10),
        Code(length=4, num_digits=6, max_turns=20),
        Code(length=4, num_digits=8, max_turns=30),
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
