"""Sokoban: push boxes onto targets, in rooms that are made by playing backwards."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from halteres.environments.games.game import Game, Level, Move
from halteres.errors import EnvironmentFailed

WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER = range(6)
SYMBOLS = "#_O√XP"
FREE = (FLOOR, TARGET)
BOXES = (BOX_ON_TARGET, BOX)

DIRECTIONS = ("up", "down", "left", "right")

MASKS = ("000111000", "010010010", "000110010", "000110110", "000011010")
"""Three rows of three cells: what becomes floor around a position of the walk that carves a room."""

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


class Sokoban(Game[RoomSize, str]):
    """Push all boxes onto targets; at the turn limit, boxes on targets are paid by their share."""

    name = "Sokoban"
    levels: ClassVar[Mapping[str, RoomSize]] = {
        "easy": RoomSize(height=6, width=6, num_boxes=2, max_turns=20),
        "hard": RoomSize(height=8, width=8, num_boxes=4, max_turns=50),
    }
    random_levels = (levels["easy"], RoomSize(height=8, width=8, num_boxes=5, max_turns=50))
    pattern = re.compile(r"\\boxed\{(up|down|left|right)\}", re.IGNORECASE)
    state = ("cells", "structure")
    format_error = "At turn {turn}, your submitted action is not valid."

    cells: list[int]  # the room as it is
    structure: list[int]  # the same without player and boxes

    def setup(self) -> None:
        """Make the room from generators of its own."""
        cells, structure = _make_room(self.level, self.seed)
        self.cells, self.structure = list(cells), list(structure)

    def rules(self) -> str:
        """With an example move."""
        example = self.random_action(self.rng)
        direction = example.removeprefix("\\boxed{").removesuffix("}")
        return (
            "You are solving the Sokoban puzzle. You are the player and you need to push all boxes to targets.\n"
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

    def suffix(self) -> str:
        """The room."""
        symbols = [SYMBOLS[cell] for cell in self.cells]
        width = self.level.width
        rows = "".join(" ".join(symbols[start : start + width]) + "\n" for start in range(0, len(symbols), width))
        return f"Here is the current board layout:\n{rows}\nEnter your move."

    def parse(self, found: re.Match[str]) -> str | None:
        """A direction; the pattern, which ignores case, takes a dotless i for an i."""
        direction = found[1].lower()
        return direction if direction in DIRECTIONS else None

    def move(self, action: str) -> Move:
        """Walk, or push a box that has a free cell behind it."""
        step = _steps(self.level.width)[DIRECTIONS.index(action)]
        player = self.cells.index(PLAYER)
        ahead, behind = player + step, player + 2 * step
        pushes = self.cells[ahead] in BOXES
        if self.cells[ahead] == WALL or (pushes and self.cells[behind] not in FREE):
            return Move(f"At turn {self.turn}, you cannot move {action} - you would collide with wall or other boxes!")
        if pushes:
            self.cells[behind] = BOX_ON_TARGET if self.structure[behind] == TARGET else BOX
        self.cells[ahead], self.cells[player] = PLAYER, self.structure[player]
        if self.cells.count(BOX_ON_TARGET) == self.level.num_boxes:
            return Move("Congratulations! You have solved the Sokoban puzzle!", 1.0, "success")
        return Move(f"At turn {self.turn}, you {'pushed a box while you ' if pushes else ''}moved {action}.")

    def turn_limit_reward(self, action: str) -> float:
        """The share of boxes on targets."""
        return self.cells.count(BOX_ON_TARGET) / self.level.num_boxes

    def random_action(self, rng: random.Random) -> str:
        """Any direction."""
        return f"\\boxed{{{rng.choice(DIRECTIONS)}}}"


@lru_cache(maxsize=256)
def _make_room(level: RoomSize, seed: int) -> tuple[bytes, bytes]:
    """A room that can be solved, with its structure; kept, because all rollouts of a group begin in it.

    Raises:
        EnvironmentFailed: no room of this size and so many boxes was found.
    """
    tries = (room for offset in range(NUM_SEEDS) for room in _tries(level, seed + offset))
    for room in tries:
        structure = bytes(FLOOR if cell == PLAYER else cell for cell in room)
        solved = bytes(BOX if cell == TARGET else cell for cell in room)
        if not _is_dead(solved, structure, level.width):
            cells = _play_backwards(solved, structure, level.width)
            if cells is not None and not _is_dead(cells, structure, level.width):
                return cells, structure
    raise EnvironmentFailed(
        f"No Sokoban room of {level.height} by {level.width} cells with {level.num_boxes} boxes was found.",
        f"{NUM_SEEDS * TRIES_PER_SEED} were tried, from seed {seed} on.",
        "Take another seed.",
    )


def _tries(level: RoomSize, seed: int) -> Iterator[list[int]]:
    """Rooms with player and targets, as many as are tried with one seed."""
    import numpy  # the only user of numpy among the games, which are to be imported in milliseconds

    walk, places = random.Random(seed), numpy.random.default_rng(seed)  # noqa: S311 - games, not secrets
    for _ in range(TRIES_PER_SEED):
        room = _carve(level.height, level.width, walk)
        floor = [position for position, cell in enumerate(room) if cell == FLOOR]
        if len(floor) > level.num_boxes + 1:
            for content in (PLAYER, *[TARGET] * level.num_boxes):
                room[floor.pop(int(places.integers(len(floor))))] = content
            yield room


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
    """Whether some box is in a corner or, where there are several, can be pushed nowhere."""
    boxes = [position for position, cell in enumerate(cells) if cell in BOXES]
    return any(_is_cornered(position, structure, width) for position in boxes) or (
        len(boxes) > 1 and any(_is_frozen(position, cells, width) for position in boxes)
    )


def _is_cornered(position: int, structure: bytes, width: int) -> bool:
    """GEM's corner, which is none: walls above and below a cell count, above and to the left do not."""
    walls = [index for index, step in enumerate(_steps(width)) if structure[position + step] == WALL]
    if structure[position] == TARGET or len(walls) < 2:
        return False
    return len(walls) > 2 or walls[1] - walls[0] in (1, 3)


def _is_frozen(position: int, cells: bytes, width: int) -> bool:
    return not any(
        cells[position + step] in FREE and cells[position - step] in (*FREE, PLAYER) for step in _steps(width)
    )


def _play_backwards(solved: bytes, structure: bytes, width: int) -> bytes | None:
    """The room from which most has to be done: pulls on the way to it, times the distances of boxes from their targets.

    Depth-first over the player's steps; whoever steps away from a box drags it along. Rooms in which a target is
    taken do not count; None where there is no other. Boxes are sets of bits, one for each cell; a box that was never
    dragged is not the same as one that was dragged back.
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
            score = num_pulls * _distances(targets, boxes, width)
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
    cells = [BOX if (untouched | dragged) >> position & 1 else cell for position, cell in enumerate(structure)]
    cells[player] = PLAYER
    return bytes(cells)


def _distances(targets: Sequence[int], boxes: Sequence[int], width: int) -> int:
    """The sum of rows and columns between targets and their boxes."""
    return sum(
        abs(target // width - box // width) + abs(target % width - box % width)
        for target, box in zip(targets, boxes, strict=True)
    )


def _steps(width: int) -> tuple[int, int, int, int]:
    """Up, down, left, right, as differences of positions."""
    return -width, width, -1, 1
