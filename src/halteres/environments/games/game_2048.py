"""Game2048: slide and merge tiles until one reaches the target."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from halteres.environments.games.game import Game, Level, Move

SIDE = 4
EMPTY = 0
DIRECTIONS = ("up", "down", "left", "right")

Rows = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(Level):
    """A power of two."""

    tile: int


class Game2048(Game[Target, str]):
    """Merge tiles; each doubling of the largest one is paid an equal share of the way to the target.

    A move is paid before the new tile appears: a new 4 that is the largest tile is paid with the next move.
    """

    name = "Game2048"
    levels: ClassVar[Mapping[str, Target]] = {
        "easy": Target(tile=64, max_turns=50),
        "hard": Target(tile=512, max_turns=50),
        "extreme-hard": Target(tile=2048, max_turns=100),
    }
    random_levels = (Target(tile=16, max_turns=20), Target(tile=32, max_turns=30), levels["easy"])
    pattern = re.compile(r"\\boxed\{(up|down|left|right)\}", re.IGNORECASE)
    state = ("rows", "largest", "largest_at_start")
    format_error = "At turn {turn}, you did not provide a valid move. Please use \\boxed{{direction}} format."
    turn_limit = "You have reached the maximum number of turns ({max_turns})."

    rows: Rows
    largest: int  # tile so far, as far as it was paid
    largest_at_start: int

    def setup(self) -> None:
        """Draw two tiles."""
        self.rows = [[EMPTY] * SIDE for _ in range(SIDE)]
        self._add_tile()
        self._add_tile()
        self.largest = self.largest_at_start = max(map(max, self.rows))

    def rules(self) -> str:
        """With an example move."""
        return (
            "You are playing 2048.\n"
            f"Your goal is to reach the {self.level.tile} tile by sliding and merging tiles.\n"
            f"You have {self.level.max_turns} turns maximum.\n\n"
            "Rules:\n"
            "- When two tiles with the same number touch, they merge into one tile with double the value.\n"
            "- After each move, a new tile (2 or 4) appears in a random empty spot.\n"
            "- You can move tiles in four directions: 'up', 'down', 'left', 'right'.\n\n"
            "To submit your move, type the direction in \\boxed{...}.\n"
            f"For example: {self.random_action(self.rng)}\n\n"
        )

    def suffix(self) -> str:
        """The board."""
        board = "\n".join(" ".join(f"{tile or '.':>4}" for tile in row) for row in self.rows)
        return f"Current board:\n{board}\nEnter your move."

    def parse(self, found: re.Match[str]) -> str:
        """A direction, or a look-alike: ignoring case, the pattern takes a dotless i for an i."""
        return found[1].lower()

    def move(self, action: str) -> Move:
        """Slide all tiles."""
        rows = slid(self.rows, action)
        if rows == self.rows:
            return Move(
                f"At turn {self.turn}, you chose move '{action}' which doesn't change the board state. Try a different"
                " direction."
            )
        self.rows = rows
        reward = self._progress()
        self._add_tile()
        if self.largest >= self.level.tile:
            text = f"Congratulations! You reached the {self.level.tile} tile in {self.turn} turns!"
            return Move(text, reward, "success")
        if self._is_stuck():
            return Move("Game over! No more moves possible.", reward, "failure")
        return Move(f"At turn {self.turn}, you moved {action}", reward)

    def random_action(self, rng: random.Random) -> str:
        """Any direction."""
        return f"\\boxed{{{rng.choice(DIRECTIONS)}}}"

    def _progress(self) -> float:
        """What the largest tile is paid, beyond what was paid already."""
        largest = min(max(map(max, self.rows)), self.level.tile)
        if largest <= self.largest:
            return 0.0
        doublings = math.log2(largest) - math.log2(self.largest)
        self.largest = largest
        return doublings / (math.log2(self.level.tile) - math.log2(self.largest_at_start))

    def _add_tile(self) -> None:
        empty = [(row, column) for row in range(SIDE) for column in range(SIDE) if self.rows[row][column] == EMPTY]
        row, column = self.rng.choice(empty)
        self.rows[row][column] = 2 if self.rng.random() < 0.9 else 4

    def _is_stuck(self) -> bool:
        if any(EMPTY in row for row in self.rows):
            return False
        return slid(self.rows, "left") == self.rows and slid(self.rows, "up") == self.rows


def slid(rows: Rows, direction: str) -> Rows:
    """The board after a move, before a new tile; unchanged for what is no direction."""
    match direction:
        case "left":
            return [_merged(row) for row in rows]
        case "right":
            return [_merged(row[::-1])[::-1] for row in rows]
        case "up":
            return _transposed(slid(_transposed(rows), "left"))
        case "down":
            return _transposed(slid(_transposed(rows), "right"))
        case _:
            return rows


def _merged(row: list[int]) -> list[int]:
    """Tiles slid to the front; two equal ones that meet become one, which merges no further."""
    tiles: list[int] = []
    may_merge = False
    for tile in filter(None, row):
        if may_merge and tiles[-1] == tile:
            tiles[-1] *= 2
            may_merge = False
        else:
            tiles.append(tile)
            may_merge = True
    return tiles + [EMPTY] * (len(row) - len(tiles))


def _transposed(rows: Rows) -> Rows:
    return [list(column) for column in zip(*rows, strict=True)]
