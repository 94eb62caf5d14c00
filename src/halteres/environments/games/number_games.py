"""Games with numbers: GuessTheNumber (hints of "lower" and "higher"), Mastermind (black and white
pegs), Sudoku.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from halteres.environments.games.game import Game, Level, Move, boxed


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

    def _random_level(self) -> NumberRange:
        """6 to 51 numbers, the smallest of them 1 to 10; the wider the range, the more turns."""
        low = self.rng.randint(1, 10)
        high = self.rng.randint(low + 5, low + 50)
        return NumberRange(
            min_number=low, max_number=high, max_turns=math.ceil(math.sqrt(high - low)) + 1
        )

    def _setup(self) -> None:
        self.number = self.rng.randint(self.level.min_number, self.level.max_number)
        self.guesses = []

    def _rules(self) -> str:
        return (
            "You are playing Guess The Number.\n"
            f"You have to guess the number between {self.level.min_number} and "
            f"{self.level.max_number} (inclusive)"
            f" within {self.level.max_turns} turns.\n"
            "As you enter your guess, the game will provide you with hints such as the target "
            "number is 'higher' or"
            " 'lower'.\n"
            "You may provide your response in any manner. Only the number that is wrapped inside "
            "\\boxed{} will be"
            f" considered as your guess, for example, {self.random_action(self.rng)}.\n"
            "As you play, the history of your guesses will be appended below. Use the information "
            "to complete the game"
            " before you run out of guesses.\n"
            "Enter your first guess to start the game.\n"
        )

    def _suffix(self) -> str:
        return "Enter your next guess."

    def _parse(self, found: re.Match[str]) -> int | None:
        """GEM takes 0 for no guess at all."""
        return int(found[1]) or None

    def _move(self, action: int) -> Move:
        guessed = f"At turn {self.turn}, you guessed {action},"
        if not self.level.min_number <= action <= self.level.max_number:
            return Move(f"{guessed} which is outside the range specified.")
        if action in self.guesses:
            return Move(f"{guessed} which has been already guessed before.")
        self.guesses.append(action)
        if action == self.number:
            text = (
                f"Congratulations! You guessed the correct number {self.number} in {self.turn} "
                "turns."
            )
            return Move(text, 1.0, "success")
        hint = "lower" if action > self.number else "higher"
        return Move(f"{guessed} and the target number is {hint} than {action}.")

    def _turn_limit_reward(self, action: int) -> float:
        """1 less the distance as a share of the range, for a guess that was made before too."""
        if not self.level.min_number <= action <= self.level.max_number:
            return 0.0
        return 1 - abs(action - self.number) / (self.level.max_number - self.level.min_number)

    def _is_possible(self) -> bool:
        return self.level.min_number <= self.number <= self.level.max_number

    def random_action(self, rng: random.Random) -> str:
        """Any number of the range."""
        return boxed(rng.randint(self.level.min_number, self.level.max_number))


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

    def _setup(self) -> None:
        self.code = self.rng.sample(range(1, self.level.num_digits + 1), self.level.length)
        self.guesses = []
        self.most_black = 0

    def _rules(self) -> str:
        return (
            "You are playing Mastermind.\n"
            f"You have to guess the secret {self.level.length} digit code within "
            f"{self.level.max_turns} turns.\n"
            f"The code consists of digits from 1 to {self.level.num_digits} (inclusive). "
            "Duplicate numbers are not"
            " allowed.\n"
            "After you enter your guess, I will say mark your guess with black and white pegs, "
            "where a black peg"
            " indicates a correct digit in the correct position, while a white peg indicates a "
            "correct digit in the"
            " wrong position.\n"
            f"After thinking, format your final answer inside \\boxed{{...}}, for example,"
            f" {self.random_action(self.rng)}.\n"
            "As you play, the history of your guesses will be appended below. Use the information "
            "to complete the game"
            " before you run out of guesses.\n"
            "Enter your first guess to start the game.\n"
        )

    def _suffix(self) -> str:
        return "Enter your guess."

    def _parse(self, found: re.Match[str]) -> list[int]:
        return [int(digits) for digits in found[1].split()]

    def _move(self, action: list[int]) -> Move:
        guessed = f"At turn {self.turn}, you guessed {action}"
        if len(action) != self.level.length:
            return Move(
                f"{guessed} which has {len(action)} entries but the code has length "
                f"{self.level.length}."
            )
        if not all(1 <= digit <= self.level.num_digits for digit in action):
            return Move(
                f"{guessed}, which has numbers outside the range 1 to {self.level.num_digits}."
            )
        if action in self.guesses:
            return Move(f"{guessed}, which has been already guessed before.")
        self.guesses.append(action)
        black = sum(digit == hidden for digit, hidden in zip(action, self.code, strict=True))
        white = len(set(action) & set(self.code)) - black
        reward = max(0, black - self.most_black) / self.level.length
        self.most_black = max(self.most_black, black)
        if black == self.level.length:
            text = (
                f"Congratulations! You guessed the correct code {self.code} in {self.turn} turns."
            )
            return Move(text, reward, "success")
        return Move(
            f"{guessed}. This guess receives {black} black peg(s) and {white} white peg(s).", reward
        )

    def _is_possible(self) -> bool:
        return len(self.code) == self.level.length and 0 <= self.most_black <= self.level.length

    def random_action(self, rng: random.Random) -> str:
        """A guess that may be the code."""
        return boxed(*rng.sample(range(1, self.level.num_digits + 1), self.level.length))


EMPTY = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Puzzle(Level):
    """A grid of `side` times `side` cells."""

    side: int
    # cells of the full grid that are tried; one stays where the solution would not be the only one
    num_removals: int


class Sudoku(Game[Puzzle, tuple[int, int, int]]):
    """Place digits; each that the solution has there is paid."""

    name = "Sudoku"
    levels: ClassVar[Mapping[str, Puzzle]] = {
        "easy": Puzzle(side=4, num_removals=10, max_turns=15),
        "hard": Puzzle(side=9, num_removals=50, max_turns=50),
    }
    random_levels = (levels["easy"], levels["hard"])
    pattern = re.compile(r"\\boxed\{(\d+)\s(\d+)\s(\d+)\}")
    state = ("solution", "cells", "num_empty_at_start")
    format_error = "You did not provide a valid guess."

    solution: list[int]  # digits, row after row
    cells: list[int]  # the same with EMPTY cells
    num_empty_at_start: int

    def _setup(self) -> None:
        grid = Grid(self.level.side)
        grid.fill(self.rng)
        self.solution = list(grid.cells)
        order = list(range(len(grid.cells)))
        self.rng.shuffle(order)
        for _ in range(self.level.num_removals):
            grid.remove_if_unique(order.pop())
        self.cells = grid.cells
        self.num_empty_at_start = self.cells.count(EMPTY)

    def _rules(self) -> str:
        side = self.level.side
        return (
            f"You are playing {'A simple version of' if side == 4 else ''} Sudoku.\n"
            f"Each row is numbered from 1 to {side}, and each column is also numbered from 1 to "
            f"{side}.\n"
            "Empty cells are represented by '.', and pre-filled cells contain digits from 1 to "
            f"{side}.\n\n"
            f"Your objective is to fill the empty cells in the {side}x{side} grid with digits "
            f"from 1 to {side} such"
            " that:\n"
            f"1. Each row contains all digits from 1 to {side} without repetition.\n"
            f"2. Each column contains all digits from 1 to {side} without repetition.\n"
            f"3. Each of the nine {side}x{side} subgrids contains all digits from 1 to {side} "
            "without repetition.\n\n"
            "Rules and Instructions:\n"
            "1. **Do not overwrite** the initial numbers provided in the grid.\n"
            "2. **Only fill** empty cells represented by '.'.\n"
            "3. You may respond in any manner you prefer, but ensure that your response includes "
            "the format of"
            " '\\boxed{row column number}', e.g. \\boxed{1 1 5}.\n"
            "4. **Ensure** that your move does not violate Sudoku rules. Invalid moves, including "
            "overwriting"
            " pre-filled cells and placing two numbers in one row/col/sub-grid will result in "
            "penalties.\n"
            "The history of your moves will be appended as you play more rounds. Use the history "
            "of your move to"
            " improve your decision making by avoiding the moves you have tried. Good luck!\n\n"
        )

    def _suffix(self) -> str:
        side = self.level.side
        box = math.isqrt(side)
        headings = [
            f"C{column + 1}" + ("  " if (column + 1) % box == 0 else "") for column in range(side)
        ]
        lines = ["   " + " ".join(headings)]
        for row in range(side):
            digits = [str(digit or ".") for digit in self.cells[row * side : (row + 1) * side]]
            boxes = ["  ".join(digits[start : start + box]) for start in range(0, side, box)]
            lines.append(f"R{row + 1}  {' |  '.join(boxes)}")
            if (row + 1) % box == 0 and row + 1 < side:
                lines.append("   " + "- " * 2 * (side - 1))
        board = "\n".join(lines)
        return f"Here is the current board layout:\n{board}\nEnter your move."

    def _parse(self, found: re.Match[str]) -> tuple[int, int, int]:
        return int(found[1]), int(found[2]), int(found[3])

    def _move(self, action: tuple[int, int, int]) -> Move:
        row, column, digit = action
        tried = f"At turn {self.turn}, you tried to place {digit} at R{row} C{column}, which"
        if not all(1 <= number <= self.level.side for number in action):
            return Move(f"{tried} is out of bounds.")
        cell = (row - 1) * self.level.side + column - 1
        if self.cells[cell] != EMPTY:
            return Move(f"{tried} is already filled. You cannot overwrite pre-filled cells.")
        if self.solution[cell] != digit:
            return Move(f"{tried} violates Sudoku rules.")
        self.cells[cell] = digit
        reward = 1 / self.num_empty_at_start
        if EMPTY not in self.cells:
            return Move("Congratulations! You have completed the Sudoku puzzle!", reward, "success")
        return Move(
            f"At turn {self.turn}, you placed {digit} at R{row} C{column}, which is correct.",
            reward,
        )

    def _is_possible(self) -> bool:
        side = self.level.side
        return (
            len(self.cells) == len(self.solution) == side**2
            and set(self.cells) | {EMPTY} <= {EMPTY, *self.solution}
            and set(self.solution) == {*range(1, side + 1)}
            and self.cells.count(EMPTY) <= self.num_empty_at_start <= side**2
            and self.num_empty_at_start > 0
        )

    def random_action(self, rng: random.Random) -> str:
        """Any digit in any cell."""
        return boxed(*(rng.randint(1, self.level.side) for _ in range(3)))


class Grid:
    """Cells of digits, and which digits every row, column and box holds.

    Sets of digits are bit masks: bit d - 1 stands for digit d.
    """

    def __init__(self, side: int) -> None:
        box = math.isqrt(side)
        self.side = side
        self.cells = [EMPTY] * side**2
        self._units = [  # of each cell: its row, its column, its box
            (row, side + column, 2 * side + row // box * box + column // box)
            for row in range(side)
            for column in range(side)
        ]
        self._held = [0] * (3 * side)  # by unit

    def fill(self, rng: random.Random, cell: int = 0) -> bool:
        """Fill the cells from this one on by backtracking; False where it cannot be done.

        The digits are shuffled at every entry to a cell: that is the order of GEM's draws.
        """
        if cell == len(self.cells):
            return True
        digits = list(range(1, self.side + 1))
        rng.shuffle(digits)
        possible = self._possible(cell)
        for digit in digits:
            if possible >> digit - 1 & 1:
                self._toggle(cell, digit)
                if self.fill(rng, cell + 1):
                    return True
                self._toggle(cell, digit)
        return False

    def remove_if_unique(self, cell: int) -> None:
        """Empty a cell of a grid with one solution, unless it had more then."""
        digit = self.cells[cell]
        self._toggle(cell, digit)
        for other in range(1, self.side + 1):
            # A second solution must differ here: with this digit, the grid has the one solution
            # that it had before.
            if other != digit and self._possible(cell) >> other - 1 & 1:
                self._toggle(cell, other)
                is_solvable = self._is_solvable(
                    [empty for empty, held in enumerate(self.cells) if held == EMPTY]
                )
                self._toggle(cell, other)
                if is_solvable:
                    self._toggle(cell, digit)
                    return

    def _is_solvable(self, empty: list[int]) -> bool:
        """Whether these cells, all that are empty, can be filled; the grid is left as it was."""
        fewest, next_cell = self.side + 1, -1
        for cell in empty:
            num_possible = self._possible(cell).bit_count()
            if num_possible < fewest:
                fewest, next_cell = num_possible, cell
                if fewest < 2:
                    break
        if next_cell < 0:
            return True
        rest = [cell for cell in empty if cell != next_cell]
        possible = self._possible(next_cell)
        for digit in range(1, self.side + 1):
            if possible >> digit - 1 & 1:
                self._toggle(next_cell, digit)
                is_solvable = self._is_solvable(rest)
                self._toggle(next_cell, digit)
                if is_solvable:
                    return True
        return False

    def _possible(self, cell: int) -> int:
        row, column, box = self._units[cell]
        return ~(self._held[row] | self._held[column] | self._held[box]) & (1 << self.side) - 1

    def _toggle(self, cell: int, digit: int) -> None:
        """Put a digit into an empty cell, or take it out again."""
        self.cells[cell] ^= digit
        for unit in self._units[cell]:
            self._held[unit] ^= 1 << digit - 1
