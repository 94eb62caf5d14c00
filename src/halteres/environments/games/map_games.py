"""Games on a map: Minesweeper (open all cells without a mine) and Sokoban (push boxes onto
targets).
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from halteres.environments.games.game import DIRECTIONS, DirectionGame, Game, Level, Move, boxed
from halteres.errors import EnvironmentFailed

MINE = -1
UNKNOWN, FLAG = ".", "F"


@dataclass(frozen=True, slots=True, kw_only=True)
class Minefield(Level):
    """A square of `side` times `side` cells."""

    side: int
    num_mines: int


class Minesweeper(Game[Minefield, tuple[str, int, int]]):
    """Reveal and flag cells; every opened cell is paid.

    v0: won only if every mine is flagged when the last safe cell is opened; otherwise play runs to
    the turn limit. v1: won as soon as all safe cells are open.
    """

    name = "Minesweeper"
    levels: ClassVar[Mapping[str, Minefield]] = {
        "easy": Minefield(side=5, num_mines=5, max_turns=25),
        "hard": Minefield(side=8, num_mines=12, max_turns=64),
    }
    corrected = ("easy", "hard", "random")
    pattern = re.compile(r"\\boxed\{([a-zA-Z]+)\s(\d+)\s(\d+)\}")
    state = ("counts", "shown")

    # of mines around each cell, row after row; MINE at a mine; all 0 until the first reveal
    counts: list[int]
    shown: list[str]  # what the player sees of each cell: UNKNOWN, FLAG or its count

    def _random_level(self) -> Minefield:
        """A side of 5 to 8, a fifth of the cells mined."""
        side = self.rng.randint(5, 8)
        return Minefield(side=side, num_mines=side**2 // 5, max_turns=side**2)

    def _setup(self) -> None:
        """Nothing is drawn: the mines are laid around the first reveal."""
        self.counts = [0] * self.level.side**2
        self.shown = [UNKNOWN] * self.level.side**2

    def _rules(self) -> str:
        row, column = self._random_cell(self.rng)
        flag_row, flag_column = self._random_cell(self.rng)
        return (
            "You are playing the Minesweeper game.\n"
            "The objective of the game is to reveal all cells that do not contain mines.\n"
            "To make a move, you can either reveal a cell or place a flag on a suspected mine "
            "location using one of"
            " the following commands:\n"
            "- 'reveal': Reveal the contents of a specific cell.\n"
            "- 'flag': Place or remove a flag on a specific cell to mark it as a potential mine.\n"
            "To submit your move, type the command followed by the row and column in \\boxed{}.\n"
            "For example:\n"
            f"- \\boxed{{reveal {row} {column}}} to reveal the cell in Row {row}, Column "
            f"{column}.\n"
            f"- \\boxed{{flag {flag_row} {flag_column}}} to place or remove a flag on the cell in "
            f"Row {flag_row},"
            f" Column {flag_column}.\n"
            "The current board layout is shown below. Cells that are unrevealed are represented "
            "by a dot ('.'),"
            " revealed numbers show the count of adjacent mines, and flagged cells are marked "
            "with an 'F'.\n"
            "Use logic and deduction to avoid revealing cells with mines!\n"
            "Be mindful not to choose revealed or flagged cells.\n"
        )

    def _suffix(self) -> str:
        side = self.level.side
        heading = " ".join(f"{column:2}" for column in range(side))
        rows = [
            f"{row:2}  {'  '.join(self.shown[row * side : (row + 1) * side])} \n"
            for row in range(side)
        ]
        return (
            f"Here is the current board layout:\n   {heading}\n{''.join(rows)}\nEnter your guess."
        )

    def _parse(self, found: re.Match[str]) -> tuple[str, int, int]:
        return found[1].lower(), int(found[2]), int(found[3])

    def _move(self, action: tuple[str, int, int]) -> Move:
        command, row, column = action
        side, turn = self.level.side, f"At turn {self.turn}, you"
        if not (row < side and column < side):
            return Move(
                f"{turn} chose cell ({row}, {column}), which is outside the bounds of the grid."
            )
        cell = row * side + column
        if command == "flag":
            if self.shown[cell] not in (UNKNOWN, FLAG):
                return Move(
                    f"{turn} chose to flag cell ({row}, {column}), which has already been revealed."
                )
            added = self.shown[cell] == UNKNOWN
            self.shown[cell] = FLAG if added else UNKNOWN
            return Move(
                f"{turn} {'added' if added else 'removed'} a flag on cell ({row}, {column})."
            )
        if command != "reveal":
            return Move(
                f"{turn} chose an invalid action '{command}'. Valid actions are 'reveal' or 'flag'."
            )
        if MINE not in self.counts:
            self._lay_mines(row, column)
        if self.counts[cell] == MINE:  # a flag does not protect
            return Move(f"Game over! You hit a mine at ({row}, {column})", 0.0, "failure")
        if self.shown[cell] != UNKNOWN:
            return Move(
                f"{turn} chose to reveal cell ({row}, {column}), which has already been revealed."
            )
        reward = self._open(cell) / (side**2 - self.level.num_mines)
        of_mines = [
            shown for count, shown in zip(self.counts, self.shown, strict=True) if count == MINE
        ]
        of_others = [
            shown for count, shown in zip(self.counts, self.shown, strict=True) if count != MINE
        ]
        are_flagged = self.version > 0 or set(of_mines) == {FLAG}
        if are_flagged and not {UNKNOWN, FLAG} & set(of_others):
            return Move(
                "Congratulations! You have successfully cleared the Minesweeper board.",
                reward,
                "success",
            )
        return Move(f"{turn} successfully revealed cell ({row}, {column}).", reward)

    def _is_possible(self) -> bool:
        num_cells = self.level.side**2
        return (
            len(self.counts) == len(self.shown) == num_cells
            and set(self.counts) <= {MINE, *range(9)}
            and set(self.shown) <= {UNKNOWN, FLAG, *map(str, range(9))}
        )

    def random_action(self, rng: random.Random) -> str:
        """Nine reveals to a flag."""
        return boxed(rng.choice(["reveal"] * 9 + ["flag"]), *self._random_cell(rng))

    def _lay_mines(self, safe_row: int, safe_column: int) -> None:
        num_laid = 0
        while num_laid < self.level.num_mines:
            row, column = self._random_cell(self.rng)
            cell = row * self.level.side + column
            if (
                self.counts[cell] != MINE
                and max(abs(row - safe_row), abs(column - safe_column)) > 1
            ):
                self.counts[cell] = MINE
                num_laid += 1
        for cell, around in enumerate(neighbours_of(self.level.side)):
            if self.counts[cell] != MINE:
                self.counts[cell] = sum(self.counts[other] == MINE for other in around)

    def _open(self, cell: int) -> int:
        """Open a safe cell and, where no mine is around it, its neighbours in turn; how many were
        opened.
        """
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


WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER = range(6)
SYMBOLS = "#_O√XP"
FREE = (FLOOR, TARGET)
BOXES = (BOX_ON_TARGET, BOX)

MASKS = ("000111000", "010010010", "000110010", "000110110", "000011010")
"""Three rows of three cells: what becomes floor around a position of the walk that carves a
room.
"""

TURN_SHARE = 0.35
"""Of the steps of that walk, those before which it takes a new direction."""

NUM_SEEDS, TRIES_PER_SEED = 50, 1000

DEEPEST, MOST_STATES = 299, 300_000
"""Moves back from the solved room, the solved room included, and rooms looked at."""

# H rows, W columns; a room is one row after another, H * W cells


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomSize(Level):
    """The walls around it included."""

    height: int
    width: int
    num_boxes: int


class Sokoban(DirectionGame[RoomSize]):
    """Push all boxes onto targets; at the turn limit, boxes on targets are paid by their share."""

    name = "Sokoban"
    levels: ClassVar[Mapping[str, RoomSize]] = {
        "easy": RoomSize(height=6, width=6, num_boxes=2, max_turns=20),
        "hard": RoomSize(height=8, width=8, num_boxes=4, max_turns=50),
    }
    random_levels = (levels["easy"], RoomSize(height=8, width=8, num_boxes=5, max_turns=50))
    state = ("cells", "structure")
    format_error = "At turn {turn}, your submitted action is not valid."

    cells: list[int]  # the room as it is
    structure: list[int]  # the same without player and boxes

    def _setup(self) -> None:
        """Make the room from generators of its own."""
        cells, structure = _make_room(self.level, self.seed)
        self.cells, self.structure = list(cells), list(structure)

    def _rules(self) -> str:
        example = self.random_action(self.rng)
        direction = example.removeprefix("\\boxed{").removesuffix("}")
        return (
            "You are solving the Sokoban puzzle. You are the player and you need to push all "
            "boxes to targets.\n"
            "When you are right next to a box, you can push it by moving in the same direction.\n"
            "You cannot push a box through a wall or another box, and you cannot pull a box.\n"
            f"you have to complete the puzzle within {self.level.max_turns} turns.\n"
            "On the board, objects are represented as:\n"
            "- The player (you) appears as 'P'\n"
            "- Walls are represented with '#'\n"
            "- Boxes are marked as 'X'\n"
            "- Empty goals are shown with 'O'\n"
            "- Boxes on goals are visualized with '√'\n"
            "- Empty floor is shown as '_'\n\n"
            "To submit your move, type the command in \\boxed{}.\n"
            f"For example: {example} to move {direction}.\n"
            "Use logic and deduction to push all boxes onto the target positions!"
        )

    def _suffix(self) -> str:
        symbols = [SYMBOLS[cell] for cell in self.cells]
        width = self.level.width
        rows = "".join(
            " ".join(symbols[start : start + width]) + "\n"
            for start in range(0, len(symbols), width)
        )
        return f"Here is the current board layout:\n{rows}\nEnter your move."

    def _parse(self, found: re.Match[str]) -> str | None:
        """A direction, but no look-alike."""
        direction = found[1].lower()
        return direction if direction in DIRECTIONS else None

    def _move(self, action: str) -> Move:
        step = _steps(self.level.width)[DIRECTIONS.index(action)]
        player = self.cells.index(PLAYER)
        ahead, behind = player + step, player + 2 * step
        pushes = self.cells[ahead] in BOXES
        if self.cells[ahead] == WALL or (pushes and self.cells[behind] not in FREE):
            return Move(
                f"At turn {self.turn}, you cannot move {action} - you would collide with wall or "
                "other boxes!"
            )
        if pushes:
            self.cells[behind] = BOX_ON_TARGET if self.structure[behind] == TARGET else BOX
        self.cells[ahead], self.cells[player] = PLAYER, self.structure[player]
        if self.cells.count(BOX_ON_TARGET) == self.level.num_boxes:
            return Move("Congratulations! You have solved the Sokoban puzzle!", 1.0, "success")
        return Move(
            f"At turn {self.turn}, you {'pushed a box while you ' if pushes else ''}moved {action}."
        )

    def _is_possible(self) -> bool:
        height, width = self.level.height, self.level.width
        if len(self.cells) != height * width or len(self.structure) != height * width:
            return False
        edge = [
            place
            for place in range(height * width)
            if place // width in (0, height - 1) or place % width in (0, width - 1)
        ]
        return (
            all(self.cells[place] == self.structure[place] == WALL for place in edge)
            and self.cells.count(PLAYER) == 1
            and set(self.cells) <= {*range(len(SYMBOLS))}
            and set(self.structure) <= {WALL, *FREE}
        )

    def _turn_limit_reward(self, action: str) -> float:
        """The share of boxes on targets."""
        return self.cells.count(BOX_ON_TARGET) / self.level.num_boxes


@functools.lru_cache(maxsize=256)
def _make_room(level: RoomSize, seed: int) -> tuple[bytes, bytes]:
    """A room that can be solved, with its structure; cached, because all rollouts of a group begin
    in it.

    Raises:
        EnvironmentFailed: no room of this size and so many boxes was found.
    """
    import numpy  # the only user of numpy among the games, which are to be imported in milliseconds

    for offset in range(NUM_SEEDS):
        walk = random.Random(seed + offset)  # noqa: S311 - games, not secrets
        places = numpy.random.default_rng(seed + offset)
        for _ in range(TRIES_PER_SEED):
            room = _carve(level.height, level.width, walk)
            floor = [position for position, cell in enumerate(room) if cell == FLOOR]
            if len(floor) <= level.num_boxes + 1:
                continue
            for content in (PLAYER, *[TARGET] * level.num_boxes):
                room[floor.pop(int(places.integers(len(floor))))] = content
            structure = bytes(FLOOR if cell == PLAYER else cell for cell in room)
            solved = bytes(BOX if cell == TARGET else cell for cell in room)
            if not _is_dead(solved, structure, level.width):
                cells = _play_backwards(solved, structure, level.width)
                if cells is not None and not _is_dead(cells, structure, level.width):
                    return cells, structure
    raise EnvironmentFailed(
        f"No Sokoban room of {level.height} by {level.width} cells with {level.num_boxes} boxes "
        "was found.",
        f"{NUM_SEEDS * TRIES_PER_SEED} were tried, from seed {seed} on.",
        "Take another seed.",
    )


def _carve(height: int, width: int, rng: random.Random) -> list[int]:
    """Walls, and the floor that a random walk leaves."""
    room = [WALL] * (height * width)
    directions = [(1, 0), (0, 1), (-1, 0), (0, -1)]
    [(down, right)] = rng.sample(directions, 1)
    row, column = rng.randint(1, height - 1), rng.randint(1, width - 1)
    for _ in range(int(1.7 * (height + width))):
        if rng.random() < TURN_SHARE:
            [(down, right)] = rng.sample(directions, 1)
        row = max(min(row + down, height - 2), 1)
        column = max(min(column + right, width - 2), 1)
        [mask] = rng.sample(MASKS, 1)
        for index, filled in enumerate(mask):
            r, c = row - 1 + index // 3, column - 1 + index % 3
            if filled == "1" and 0 < r < height - 1 and 0 < c < width - 1:
                room[r * width + c] = FLOOR
    return room


def _is_dead(cells: bytes, structure: bytes, width: int) -> bool:
    """Whether some box is in a corner or, where there are several, can be pushed nowhere.

    The corner is GEM's, which is none: walls above and below a cell count, above and to the left do
    not.
    """
    boxes = [position for position, cell in enumerate(cells) if cell in BOXES]
    for box in boxes:
        walls = [index for index, step in enumerate(_steps(width)) if structure[box + step] == WALL]
        in_corner = len(walls) > 2 or (len(walls) == 2 and walls[1] - walls[0] in (1, 3))
        pushes = (
            cells[box + step] in FREE and cells[box - step] in (*FREE, PLAYER)
            for step in _steps(width)
        )
        if (in_corner and structure[box] != TARGET) or (len(boxes) > 1 and not any(pushes)):
            return True
    return False


def _play_backwards(solved: bytes, structure: bytes, width: int) -> bytes | None:
    """The room from which most has to be done: pulls on the way to it, times the distances of boxes
    from their targets.

    Depth-first over the player's steps; whoever steps away from a box drags it along. Rooms in
    which a target is taken do not count; None where there is no other. Boxes are sets of bits, one
    for each cell; a box that was never dragged is not the same as one that was dragged back.
    """
    targets = tuple(position for position, cell in enumerate(structure) if cell == TARGET)
    all_targets = sum(1 << target for target in targets)
    best, best_score = None, 0
    seen: set[tuple[int, int, int]] = set()
    # player, boxes untouched and dragged; each target's box, pulls, depth
    stack = [((solved.index(PLAYER), all_targets, 0), targets, 0, 1)]
    while stack and len(seen) < MOST_STATES:
        room, boxes, num_pulls, depth = stack.pop()
        if room in seen:
            continue
        seen.add(room)
        player, untouched, dragged = room
        taken = untouched | dragged
        if num_pulls and not (taken | 1 << player) & all_targets:
            distances = (
                abs(target // width - box // width) + abs(target % width - box % width)
                for target, box in zip(targets, boxes, strict=True)
            )
            score = num_pulls * sum(distances)
            if score > best_score:
                best, best_score = room, score
        if depth == DEEPEST:
            continue
        for step in (1, -1, width, -width):  # what is pushed last is looked at first
            ahead, behind = player + step, player - step
            if structure[ahead] == WALL or taken >> ahead & 1:
                continue
            if not taken >> behind & 1:
                stack.append(((ahead, untouched, dragged), boxes, num_pulls, depth + 1))
                continue
            others = ~(1 << behind)
            after = (ahead, untouched & others, dragged & others | 1 << player)
            moved = tuple(player if box == behind else box for box in boxes)
            stack.append((after, moved, num_pulls + 1, depth + 1))
    if best is None:
        return None
    player, untouched, dragged = best
    cells = [
        BOX if (untouched | dragged) >> position & 1 else cell
        for position, cell in enumerate(structure)
    ]
    cells[player] = PLAYER
    return bytes(cells)


def _steps(width: int) -> tuple[int, int, int, int]:
    """Up, down, left, right, as differences of positions."""
    return -width, width, -1, 1
