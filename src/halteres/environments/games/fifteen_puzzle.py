"""FifteenPuzzle: slide tiles into the gap until they stand in order."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from halteres.environments.games.game import Game, Level, Move
from halteres.errors import InvalidConfig, unknown
from halteres.rollouts.rng import Split

GAP = 0
DIRECTIONS = ("up", "down", "left", "right")
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}
ALGORITHMS = ("monte_carlo", "pure_random", "gem-0.1.0")
NUM_SCRAMBLING_MOVES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame(Level):
    """A square of `side` times `side` cells, one of them the gap."""

    side: int


class FifteenPuzzle(Game[Frame, str]):
    """Order the tiles; at the turn limit, the cells that hold what they should are paid.

    Its option `init_algo` says how the first board is drawn: "monte_carlo" slides 100 tiles away from the goal;
    "pure_random" draws among all solvable boards; "gem-0.1.0" among all, as that release does, so that about half of
    them cannot be solved.

    v0: on the side of 2, sliding 100 tiles leads to one of two boards, both four moves from the goal.
    v1: there, the board is drawn among all solvable ones but the goal.
    """

    name = "FifteenPuzzle"
    levels: ClassVar[Mapping[str, Frame]] = {"easy": Frame(side=2, max_turns=10), "hard": Frame(side=4, max_turns=50)}
    random_levels = (levels["easy"], Frame(side=3, max_turns=20), levels["hard"])
    corrected = ("easy", "random")
    options: ClassVar[Mapping[str, Any]] = {"init_algo": "monte_carlo"}
    pattern = re.compile(r"\\boxed\{(up|down|left|right)\}")
    state = ("tiles",)
    format_error = "At turn {turn}, you did not provide a valid guess"

    tiles: list[int]  # row after row, GAP among them

    def __init__(self, id: str, *, split: Split = "train", base_seed: int = 0, **parameters: Any) -> None:
        super().__init__(id, split=split, base_seed=base_seed, **parameters)
        self.init_algo: str = self.task.parameters["init_algo"]
        if self.init_algo not in ALGORITHMS:
            raise unknown(InvalidConfig, "init_algo", str(self.init_algo), ALGORITHMS)

    def setup(self) -> None:
        """Draw a board."""
        small = self.version == 1 and self.level.side == 2
        draw = self._scrambled if self.init_algo == "monte_carlo" and not small else self._shuffled
        self.tiles = draw()
        while small and self.tiles == self._goal():
            self.tiles = draw()

    def rules(self) -> str:
        """The same for every board of a size."""
        greatest = self.level.side**2 - 1
        return (
            f"You are playing the {greatest}-Puzzle game.\n"
            f"You have to arrange the numbered tiles in ascending order from 1 to {greatest}, with the empty space"
            " located in the bottom-right corner.\n"
            "To make a move, you can slide a tile into the empty space (represented by a double underscore, e.g. __)"
            " by using one of the following commands:\n"
            "- 'up': Move the tile below the empty space up.\n"
            "- 'down': Move the tile above the empty space down.\n"
            "- 'left': Move the tile to the right of the empty space left.\n"
            "- 'right': Move the tile to the left of the empty space right.\n"
            "To submit your move, type the direction (e.g., 'up', 'down', 'left', or 'right') in \\boxed{...}.\n"
            "The current board layout is shown below\n"
            "Use logic and planning to solve the puzzle.\n"
        )

    def suffix(self) -> str:
        """The board."""
        side = self.level.side
        drawn = ["__" if tile == GAP else f"{tile:2}" for tile in self.tiles]
        board = "\n".join(" ".join(drawn[start : start + side]) for start in range(0, side**2, side))
        return f"Here is the current board layout: \n{board}\n\nEnter your move."

    def parse(self, found: re.Match[str]) -> str:
        """The direction in which a tile is to go."""
        return found[1]

    def move(self, action: str) -> Move:
        """Slide a tile into the gap."""
        gap = self.tiles.index(GAP)
        tile = tiles_beside(gap, self.level.side).get(action)
        if tile is None:
            text = f"At turn {self.turn}, you chose a move {action} that is outside the bounds of the board."
            return Move(text)
        self.tiles[gap], self.tiles[tile] = self.tiles[tile], GAP
        if self.tiles == self._goal():
            return Move("Congratulations! You have solved the puzzle!", 1.0, "success")
        return Move(f"At turn {self.turn}, you made a valid move: {action}.\n")

    def turn_limit_reward(self, action: str) -> float:
        """The share of cells, the gap's among them, that hold what they should."""
        right = sum(tile == wanted for tile, wanted in zip(self.tiles, self._goal(), strict=True))
        return right / len(self.tiles)

    def random_action(self, rng: random.Random) -> str:
        """Any direction."""
        return f"\\boxed{{{rng.choice(DIRECTIONS)}}}"

    def _goal(self) -> list[int]:
        return [*range(1, self.level.side**2), GAP]

    def _scrambled(self) -> list[int]:
        """From the goal, moves that never take the one before back."""
        tiles = self._goal()
        gap, last = len(tiles) - 1, ""
        for _ in range(NUM_SCRAMBLING_MOVES):
            beside = tiles_beside(gap, self.level.side)
            last = self.rng.choice([direction for direction in beside if direction != OPPOSITE.get(last)])
            tile = beside[last]
            tiles[gap], tiles[tile] = tiles[tile], GAP
            gap = tile
        return tiles

    def _shuffled(self) -> list[int]:
        tiles = self._goal()
        self.rng.shuffle(tiles)
        if self.init_algo != "gem-0.1.0" and not self._is_solvable(tiles):
            one, other = self.rng.sample([tile for tile in tiles if tile != GAP], 2)
            first, second = tiles.index(one), tiles.index(other)
            tiles[first], tiles[second] = other, one
        return tiles

    def _is_solvable(self, tiles: list[int]) -> bool:
        """A move swaps two cells and moves the gap by one: the parities of swaps and of the gap's way stay equal."""
        gap_row, gap_column = divmod(tiles.index(GAP), self.level.side)
        distance = 2 * (self.level.side - 1) - gap_row - gap_column
        return (_num_inversions(tiles) + distance) % 2 == 0


@functools.cache
def tiles_beside(gap: int, side: int) -> Mapping[str, int]:
    """The cells whose tiles can go into the gap, by their direction, in the order of DIRECTIONS."""
    row, column = divmod(gap, side)
    cells = {"up": gap + side, "down": gap - side, "left": gap + 1, "right": gap - 1}
    there = {"up": row < side - 1, "down": row > 0, "left": column < side - 1, "right": column > 0}
    return {direction: cells[direction] for direction in DIRECTIONS if there[direction]}


def _num_inversions(tiles: list[int]) -> int:
    """Pairs out of order, the gap counted as the greatest."""
    order = [tile or len(tiles) for tile in tiles]
    return sum(left > right for i, left in enumerate(order) for right in order[i + 1 :])
