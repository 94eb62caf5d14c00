"""Minesweeper: open all cells without a mine."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from halteres.environments.games.game import Game, Level, Move

MINE = -1
UNKNOWN, FLAG = ".", "F"


@dataclass(frozen=True, slots=True, kw_only=True)
class Minefield(Level):
    """A square of `side` times `side` cells."""

    side: int
    num_mines: int


class Minesweeper(Game[Minefield, tuple[str, int, int]]):
    """Reveal and flag cells; every opened cell is paid.

    v0: won only if every mine is flagged when the last safe cell is opened; otherwise play runs to the turn limit.
    v1: won as soon as all safe cells are open.
    """

    name = "Minesweeper"
    levels: ClassVar[Mapping[str, Minefield]] = {
        "easy": Minefield(side=5, num_mines=5, max_turns=25),
        "hard": Minefield(side=8, num_mines=12, max_turns=64),
    }
    corrected = ("easy", "hard", "random")
    pattern = re.compile(r"\\boxed\{([a-zA-Z]+)\s(\d+)\s(\d+)\}")
    state = ("counts", "shown")

    counts: list[int]  # of mines around each cell, row after row; MINE at a mine; all 0 until the first reveal
    shown: list[str]  # what the player sees of each cell: UNKNOWN, FLAG or its count

    def random_level(self) -> Minefield:
        """A side of 5 to 8, a fifth of the cells mined."""
        side = self.rng.randint(5, 8)
        return Minefield(side=side, num_mines=side**2 // 5, max_turns=side**2)

    def setup(self) -> None:
        """Nothing is drawn: the mines are laid around the first reveal."""
        self.counts = [0] * self.level.side**2
        self.shown = [UNKNOWN] * self.level.side**2

    def rules(self) -> str:
        """With an example of each command."""
        row, column = self._random_cell(self.rng)
        flag_row, flag_column = self._random_cell(self.rng)
        return (
            "You are playing the Minesweeper game.\n"
            "The objective of the game is to reveal all cells that do not contain mines.\n"
            "To make a move, you can either reveal a cell or place a flag on a suspected mine location using one of"
            " the following commands:\n"
            "- 'reveal': Reveal the contents of a specific cell.\n"
            "- 'flag': Place or remove a flag on a specific cell to mark it as a potential mine.\n"
            "To submit your move, type the command followed by the row and column in \\boxed{}.\n"
            "For example:\n"
            f"- \\boxed{{reveal {row} {column}}} to reveal the cell in Row {row}, Column {column}.\n"
            f"- \\boxed{{flag {flag_row} {flag_column}}} to place or remove a flag on the cell in Row {flag_row},"
            f" Column {flag_column}.\n"
            "The current board layout is shown below. Cells that are unrevealed are represented by a dot ('.'),"
            " revealed numbers show the count of adjacent mines, and flagged cells are marked with an 'F'.\n"
            "Use logic and deduction to avoid revealing cells with mines!\n"
            "Be mindful not to choose revealed or flagged cells.\n"
        )

    def suffix(self) -> str:
        """The board."""
        side = self.level.side
        heading = " ".join(f"{column:2}" for column in range(side))
        rows = [f"{row:2}  {'  '.join(self.shown[row * side : (row + 1) * side])} \n" for row in range(side)]
        return f"Here is the current board layout:\n   {heading}\n{''.join(rows)}\nEnter your guess."

    def parse(self, found: re.Match[str]) -> tuple[str, int, int]:
        """Any word, and a row and a column from 0 on."""
        return found[1].lower(), int(found[2]), int(found[3])

    def move(self, action: tuple[str, int, int]) -> Move:
        """Reveal or flag a cell."""
        command, row, column = action
        if not (row < self.level.side and column < self.level.side):
            return Move(
                f"At turn {self.turn}, you chose cell ({row}, {column}), which is outside the bounds of the grid."
            )
        if command == "reveal":
            return self._reveal(row, column)
        if command == "flag":
            return self._flag(row, column)
        return Move(
            f"At turn {self.turn}, you chose an invalid action '{command}'. Valid actions are 'reveal' or 'flag'."
        )

    def random_action(self, rng: random.Random) -> str:
        """Nine reveals to a flag."""
        command = rng.choice(["reveal"] * 9 + ["flag"])
        row, column = self._random_cell(rng)
        return f"\\boxed{{{command} {row} {column}}}"

    def _reveal(self, row: int, column: int) -> Move:
        cell = row * self.level.side + column
        if MINE not in self.counts:
            self._lay_mines(row, column)
        if self.counts[cell] == MINE:  # a flag does not protect
            return Move(f"Game over! You hit a mine at ({row}, {column})", 0.0, "failure")
        if self.shown[cell] != UNKNOWN:
            return Move(
                f"At turn {self.turn}, you chose to reveal cell ({row}, {column}), which has already been revealed."
            )
        reward = self._open(cell) / (self.level.side**2 - self.level.num_mines)
        if self._is_won():
            return Move("Congratulations! You have successfully cleared the Minesweeper board.", reward, "success")
        return Move(f"At turn {self.turn}, you successfully revealed cell ({row}, {column}).", reward)

    def _flag(self, row: int, column: int) -> Move:
        cell = row * self.level.side + column
        if self.shown[cell] not in (UNKNOWN, FLAG):
            return Move(
                f"At turn {self.turn}, you chose to flag cell ({row}, {column}), which has already been revealed."
            )
        added = self.shown[cell] == UNKNOWN
        self.shown[cell] = FLAG if added else UNKNOWN
        return Move(f"At turn {self.turn}, you {'added' if added else 'removed'} a flag on cell ({row}, {column}).")

    def _lay_mines(self, safe_row: int, safe_column: int) -> None:
        num_laid = 0
        while num_laid < self.level.num_mines:
            row, column = self._random_cell(self.rng)
            cell = row * self.level.side + column
            if self.counts[cell] != MINE and max(abs(row - safe_row), abs(column - safe_column)) > 1:
                self.counts[cell] = MINE
                num_laid += 1
        for cell, around in enumerate(neighbours_of(self.level.side)):
            if self.counts[cell] != MINE:
                self.counts[cell] = sum(self.counts[other] == MINE for other in around)

    def _open(self, cell: int) -> int:
        """Open a safe cell and, where no mine is around it, its neighbours in turn; how many were opened."""
        neighbours = neighbours_of(self.level.side)
        opened = [cell]
        self.shown[cell] = str(self.counts[cell])
        for current in opened:  # which grows meanwhile
            if self.counts[current] == 0:
                for other in neighbours[current]:
                    if self.shown[other] == UNKNOWN:
                        self.shown[other] = str(self.counts[other])
                        opened.append(other)
        return len(opened)

    def _is_won(self) -> bool:
        if self.version == 0 and any(
            shown != FLAG for count, shown in zip(self.counts, self.shown, strict=True) if count == MINE
        ):
            return False
        return all(
            shown not in (UNKNOWN, FLAG) for count, shown in zip(self.counts, self.shown, strict=True) if count != MINE
        )

    def _random_cell(self, rng: random.Random) -> tuple[int, int]:
        return rng.randint(0, self.level.side - 1), rng.randint(0, self.level.side - 1)


@functools.cache
def neighbours_of(side: int) -> tuple[tuple[int, ...], ...]:
    """For each cell of a square, row after row, the up to eight cells around it."""

    def around(row: int, column: int) -> tuple[int, ...]:
        rows = range(max(row - 1, 0), min(row + 2, side))
        columns = range(max(column - 1, 0), min(column + 2, side))
        return tuple(r * side + c for r in rows for c in columns if (r, c) != (row, column))

    return tuple(around(row, column) for row in range(side) for column in range(side))
