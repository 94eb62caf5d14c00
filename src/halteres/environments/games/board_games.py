"""Games on boards: FifteenPuzzle (slide tiles into the gap), Game2048 (merge tiles), TowerofHanoi
(move disks).
"""

from __future__ import annotations

import functools
import math
import operator
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from halteres.environments.games.game import DIRECTIONS, DirectionGame, Game, Level, Move, boxed
from halteres.errors import InvalidConfig, unknown
from halteres.rollouts.rng import Split

GAP = 0
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}
ALGORITHMS = ("monte_carlo", "pure_random", "gem-0.1.0")
NUM_SCRAMBLING_MOVES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame(Level):
    """A square of `side` times `side` cells, one of them the gap."""

    side: int


class FifteenPuzzle(DirectionGame[Frame]):
    """Order the tiles; at the turn limit, the cells that hold what they should are paid.

    Its option `init_algo` says how the first board is drawn: "monte_carlo" slides 100 tiles away
    from the goal; "pure_random" draws among all solvable boards; "gem-0.1.0" among all, as that
    release does, so that about half of them cannot be solved.

    v0: on the side of 2, sliding 100 tiles leads to one of two boards, both four moves from the
    goal. v1: there, the board is drawn among all solvable ones but the goal.
    """

    name = "FifteenPuzzle"
    levels: ClassVar[Mapping[str, Frame]] = {
        "easy": Frame(side=2, max_turns=10),
        "hard": Frame(side=4, max_turns=50),
    }
    random_levels = (levels["easy"], Frame(side=3, max_turns=20), levels["hard"])
    corrected = ("easy", "random")
    options: ClassVar[Mapping[str, Any]] = {"init_algo": "monte_carlo"}
    pattern = re.compile(r"\\boxed\{(up|down|left|right)\}")
    state = ("tiles",)
    format_error = "At turn {turn}, you did not provide a valid guess"

    tiles: list[int]  # row after row, GAP among them

    def __init__(
        self, id: str, *, split: Split = "train", base_seed: int = 0, **parameters: Any
    ) -> None:
        super().__init__(id, split=split, base_seed=base_seed, **parameters)
        self.init_algo: str = self.task.parameters["init_algo"]
        if self.init_algo not in ALGORITHMS:
            raise unknown(InvalidConfig, "init_algo", str(self.init_algo), ALGORITHMS)

    def _setup(self) -> None:
        small = self.version == 1 and self.level.side == 2
        draw = self._scrambled if self.init_algo == "monte_carlo" and not small else self._shuffled
        self.tiles = draw()
        while small and self.tiles == self._goal():
            self.tiles = draw()

    def _rules(self) -> str:
        greatest = self.level.side**2 - 1
        return (
            f"You are playing the {greatest}-Puzzle game.\n"
            f"You have to arrange the numbered tiles in ascending order from 1 to {greatest}, "
            "with the empty space"
            " located in the bottom-right corner.\n"
            "To make a move, you can slide a tile into the empty space (represented by a double "
            "underscore, e.g. __)"
            " by using one of the following commands:\n"
            "- 'up': Move the tile below the empty space up.\n"
            "- 'down': Move the tile above the empty space down.\n"
            "- 'left': Move the tile to the right of the empty space left.\n"
            "- 'right': Move the tile to the left of the empty space right.\n"
            "To submit your move, type the direction (e.g., 'up', 'down', 'left', or 'right') in "
            "\\boxed{...}.\n"
            "The current board layout is shown below\n"
            "Use logic and planning to solve the puzzle.\n"
        )

    def _suffix(self) -> str:
        side = self.level.side
        drawn = ["__" if tile == GAP else f"{tile:2}" for tile in self.tiles]
        board = "\n".join(
            " ".join(drawn[start : start + side]) for start in range(0, side**2, side)
        )
        return f"Here is the current board layout: \n{board}\n\nEnter your move."

    def _is_possible(self) -> bool:
        return sorted(self.tiles) == [*range(self.level.side**2)]

    def _move(self, action: str) -> Move:
        gap = self.tiles.index(GAP)
        tile = tiles_beside(gap, self.level.side).get(action)
        if tile is None:
            text = (
                f"At turn {self.turn}, you chose a move {action} that is outside the bounds of "
                "the board."
            )
            return Move(text)
        self.tiles[gap], self.tiles[tile] = self.tiles[tile], GAP
        if self.tiles == self._goal():
            return Move("Congratulations! You have solved the puzzle!", 1.0, "success")
        return Move(f"At turn {self.turn}, you made a valid move: {action}.\n")

    def _turn_limit_reward(self, action: str) -> float:
        """The share of cells, the gap's among them, that hold what they should."""
        return sum(map(operator.eq, self.tiles, self._goal())) / len(self.tiles)

    def _goal(self) -> list[int]:
        return [*range(1, self.level.side**2), GAP]

    def _scrambled(self) -> list[int]:
        """From the goal, moves that never take the one before back."""
        tiles = self._goal()
        gap, last = len(tiles) - 1, ""
        for _ in range(NUM_SCRAMBLING_MOVES):
            beside = tiles_beside(gap, self.level.side)
            last = self.rng.choice(
                [direction for direction in beside if direction != OPPOSITE.get(last)]
            )
            tile = beside[last]
            tiles[gap], tiles[tile] = tiles[tile], GAP
            gap = tile
        return tiles

    def _shuffled(self) -> list[int]:
        tiles = self._goal()
        self.rng.shuffle(tiles)
        # A move swaps two cells and moves the gap by one: the parities of swaps and of the gap's
        # way stay equal.
        gap_row, gap_column = divmod(tiles.index(GAP), self.level.side)
        order = [tile or len(tiles) for tile in tiles]
        num_inversions = sum(
            left > right for i, left in enumerate(order) for right in order[i + 1 :]
        )
        is_solvable = (num_inversions + 2 * (self.level.side - 1) - gap_row - gap_column) % 2 == 0
        if self.init_algo != "gem-0.1.0" and not is_solvable:
            one, other = self.rng.sample([tile for tile in tiles if tile != GAP], 2)
            first, second = tiles.index(one), tiles.index(other)
            tiles[first], tiles[second] = other, one
        return tiles


@functools.cache
def tiles_beside(gap: int, side: int) -> Mapping[str, int]:
    """The cells whose tiles can go into the gap, by their direction, in the order of DIRECTIONS."""
    row, column = divmod(gap, side)
    cells = {"up": gap + side, "down": gap - side, "left": gap + 1, "right": gap - 1}
    there = {"up": row < side - 1, "down": row > 0, "left": column < side - 1, "right": column > 0}
    return {direction: cells[direction] for direction in DIRECTIONS if there[direction]}


SIDE = 4
EMPTY = 0

Rows = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(Level):
    """A power of two."""

    tile: int


class Game2048(DirectionGame[Target]):
    """Merge tiles; each doubling of the largest one is paid an equal share of the way to the
    target.

    A move is paid before the new tile appears: a new 4 that is the largest tile is paid with the
    next move.
    """

    name = "Game2048"
    levels: ClassVar[Mapping[str, Target]] = {
        "easy": Target(tile=64, max_turns=50),
        "hard": Target(tile=512, max_turns=50),
        "extreme-hard": Target(tile=2048, max_turns=100),
    }
    random_levels = (Target(tile=16, max_turns=20), Target(tile=32, max_turns=30), levels["easy"])
    state = ("rows", "largest", "largest_at_start")
    format_error = (
        "At turn {turn}, you did not provide a valid move. Please use \\boxed{{direction}} format."
    )
    turn_limit = "You have reached the maximum number of turns ({max_turns})."

    rows: Rows
    largest: int  # tile so far, as far as it was paid
    largest_at_start: int

    def _setup(self) -> None:
        self.rows = [[EMPTY] * SIDE for _ in range(SIDE)]
        self._add_tile()
        self._add_tile()
        self.largest = self.largest_at_start = max(map(max, self.rows))

    def _rules(self) -> str:
        return (
            "You are playing 2048.\n"
            f"Your goal is to reach the {self.level.tile} tile by sliding and merging tiles.\n"
            f"You have {self.level.max_turns} turns maximum.\n\n"
            "Rules:\n"
            "- When two tiles with the same number touch, they merge into one tile with double "
            "the value.\n"
            "- After each move, a new tile (2 or 4) appears in a random empty spot.\n"
            "- You can move tiles in four directions: 'up', 'down', 'left', 'right'.\n\n"
            "To submit your move, type the direction in \\boxed{...}.\n"
            f"For example: {self.random_action(self.rng)}\n\n"
        )

    def _suffix(self) -> str:
        board = "\n".join(" ".join(f"{tile or '.':>4}" for tile in row) for row in self.rows)
        return f"Current board:\n{board}\nEnter your move."

    def _is_possible(self) -> bool:
        tiles = [tile for row in self.rows for tile in row]
        return (
            [len(row) for row in self.rows] == [SIDE] * SIDE
            and all(tile == EMPTY or (tile > 1 and tile.bit_count() == 1) for tile in tiles)
            and self.largest_at_start in (2, 4)
            and self.largest_at_start <= self.largest <= self.level.tile
        )

    def _move(self, action: str) -> Move:
        rows = slid(self.rows, action)
        if rows == self.rows:
            return Move(
                f"At turn {self.turn}, you chose move '{action}' which doesn't change the board "
                "state. Try a different"
                " direction."
            )
        self.rows, reward = rows, 0.0
        largest = min(max(map(max, rows)), self.level.tile)
        if largest > self.largest:
            doublings = math.log2(largest) - math.log2(self.largest)
            reward = doublings / (math.log2(self.level.tile) - math.log2(self.largest_at_start))
            self.largest = largest
        self._add_tile()
        if self.largest >= self.level.tile:
            text = f"Congratulations! You reached the {self.level.tile} tile in {self.turn} turns!"
            return Move(text, reward, "success")
        is_full = not any(EMPTY in row for row in self.rows)
        if is_full and all(slid(self.rows, direction) == self.rows for direction in ("left", "up")):
            return Move("Game over! No more moves possible.", reward, "failure")
        return Move(f"At turn {self.turn}, you moved {action}", reward)

    def _add_tile(self) -> None:
        empty = [
            (row, column)
            for row in range(SIDE)
            for column in range(SIDE)
            if self.rows[row][column] == EMPTY
        ]
        row, column = self.rng.choice(empty)
        self.rows[row][column] = 2 if self.rng.random() < 0.9 else 4


def slid(rows: Rows, direction: str) -> Rows:
    """The board after a move, before a new tile; unchanged for what is no direction."""
    match direction:
        case "left":
            return [_merged(row) for row in rows]
        case "right":
            return [_merged(row[::-1])[::-1] for row in rows]
        case "up" | "down":
            columns = slid(
                [list(column) for column in zip(*rows, strict=True)],
                "left" if direction == "up" else "right",
            )
            return [list(row) for row in zip(*columns, strict=True)]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Disks(Level):
    """Disk 1 is the smallest."""

    num_disks: int


class TowerOfHanoi(Game[Disks, tuple[str, str]]):
    """Move disks; at the turn limit, those on C are paid."""

    name = "TowerofHanoi"
    levels: ClassVar[Mapping[str, Disks]] = {
        "easy": Disks(num_disks=3, max_turns=10),
        "hard": Disks(num_disks=5, max_turns=35),
    }
    random_levels = (levels["easy"], Disks(num_disks=4, max_turns=20), levels["hard"])
    # GEM's `\s*,?\s*` matches the same, in time that grows with the square of the spaces.
    pattern = re.compile(r"\\boxed\{([ABCabc])\s*(?:,\s*)?([ABCabc])\}")
    state = ("towers",)
    format_error = "You did not provide a valid action."

    towers: dict[str, list[int]]  # disks by tower, the lowest first

    def _setup(self) -> None:
        self.towers = {"A": list(range(self.level.num_disks, 0, -1)), "B": [], "C": []}

    def _rules(self) -> str:
        return (
            f"You are playing Tower of Hanoi with {self.level.num_disks} disks.\n"
            "You have to move the disks from tower A to tower C.\n"
            "To move a disk, type the source tower and the target tower (e.g., '\\boxed{A C}').\n"
            "Note that you can only move the top disk of a tower, and that a bigger disk cannot "
            "be placed on a smaller"
            " disk.\n"
            "As you play, the history of your moves will be displayed.\n"
        )

    def _suffix(self) -> str:
        towers = "\n".join(f"{tower}: {disks}" for tower, disks in self.towers.items())
        return f"Here is the current state of the tower of hanoi:\n{towers}\n\nEnter your move."

    def _parse(self, found: re.Match[str]) -> tuple[str, str]:
        return found[1].upper(), found[2].upper()

    def _move(self, action: tuple[str, str]) -> Move:
        source, target = action
        if not self.towers[source]:
            return Move(
                f"At turn {self.turn}, you tried to move from tower {source}, which is empty."
            )
        disk = self.towers[source][-1]
        if self.towers[target] and disk > self.towers[target][-1]:
            return Move(
                f"At turn {self.turn}, you tried to move from tower {source} to tower {target}, "
                "but the top disk on"
                f" tower {source} is larger than the top disk on tower {target}."
            )
        self.towers[source].pop()
        self.towers[target].append(disk)
        if len(self.towers["C"]) == self.level.num_disks:
            return Move("Congratulations! You solved the Tower of Hanoi Puzzle", 1.0, "success")
        return Move(
            f"At turn {self.turn}, you moved disk {disk} from tower {source} to tower {target}."
        )

    def _turn_limit_reward(self, action: tuple[str, str]) -> float:
        """The share of disks on C."""
        return len(self.towers["C"]) / self.level.num_disks

    def _is_possible(self) -> bool:
        disks = sorted(disk for tower in self.towers.values() for disk in tower)
        return [*self.towers] == ["A", "B", "C"] and disks == [*range(1, self.level.num_disks + 1)]

    def random_action(self, rng: random.Random) -> str:
        """Any two towers, perhaps the same."""
        return boxed(rng.choice("ABC"), rng.choice("ABC"))
