"""Episodes of the games for comparing ours with GEM's: random, skilled and malformed actions; what
came of them.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from halteres.environments.games import IDS, make
from halteres.environments.games.board_games import DIRECTIONS, FifteenPuzzle, TowerOfHanoi
from halteres.environments.games.game import FORMAT_ERROR_REWARD, Game
from halteres.environments.games.map_games import (
    BOX,
    BOX_ON_TARGET,
    FLAG,
    FLOOR,
    MINE,
    PLAYER,
    TARGET,
    UNKNOWN,
    Minesweeper,
    RoomSize,
    Sokoban,
)
from halteres.environments.games.map_games import DIRECTIONS as STEPS
from halteres.environments.games.number_games import EMPTY, GuessTheNumber, Mastermind, Sudoku
from halteres.environments.games.word_games import Hangman, Wordle, WordSearch, load_words

GEM = ("gem-games", "gem-llm==0.1.0", "requests")
"""The arguments of `scripts/client` for the package that ours are compared with."""

PROGRAM = Path(__file__).with_name("gem_program.py")
RAISED = "raised"
TOLERANCE = 1e-12

Transcript = list[Any]
"""[observation, suffix] of the reset, then [observation, reward, terminated, truncated, suffix] of
each step.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What was played, of the same meaning for ours and for GEM's."""

    id: str
    seed: int
    actions: list[str]
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])  # ours, not GEM's


def v0_ids(family: str) -> list[str]:
    """A family's ids that GEM has too."""
    return [id for id in IDS if id.startswith(f"game:{family}-v0-")]


def draw_episodes(id: str, num_actions: int, seed: int = 0, **parameters: Any) -> Iterator[Episode]:
    """Episodes of that many actions together, each played to its end."""
    rng = random.Random(f"{id}/{seed}")
    game = make(id, **parameters)
    while num_actions > 0:
        episode = Episode(id=id, seed=rng.randrange(2**32), actions=[], parameters=parameters)
        game.reset(episode.seed)
        skill, carelessness = rng.choice([0.0, 0.5, 1.0]), rng.choice([0.0, 0.02, 0.2])
        done = False
        while not done:
            action = draw_action(game, rng, skill, carelessness)
            episode.actions.append(action)
            _, _, done, _, _ = game.step(action)
        num_actions -= len(episode.actions)
        yield episode


def draw_action(game: Game[Any, Any], rng: random.Random, skill: float, carelessness: float) -> str:
    """A careless action may be malformed; a skilled one leads towards the end of the game."""
    solve = SOLVERS.get(game.name)
    skilled = solve is not None and rng.random() < skill
    action = (solve(game, rng) if solve and skilled else None) or game.random_action(rng)
    if rng.random() < carelessness:
        return rng.choice([rng.choice(MALFORMED), mutated(action, rng), mutated(action, rng)])
    return (
        rng.choice(DRESSINGS).format(action=action, other=game.random_action(rng))
        if rng.random() < 0.3
        else action
    )


DRESSINGS = (
    "I think it is {action}.",
    "{other} no, {action}",
    "Let me see:\n\n{action}\n",
    "{action} or \\boxed{{?}}",
    "<think>{other}</think> {action} {action}",
)

MALFORMED = (
    "",
    "I do not know.",
    "\\boxed{}",
    "\\boxed{ }",
    "\\boxed{0}",
    "\\boxed{-1}",
    "\\boxed{3.5}",
    "\\boxed{1 2 3}",
    "\\boxed{1 1 1 1}",
    "\\boxed{٣}",
    "\\boxed{١ ٢}",
    "\\boxed{³}",
    "\\boxed{" + "9" * 4301 + "}",
    "\\boxed{" + "9" * 4300 + "}",
    "\\boxed{1 1 " + "7" * 5000 + "}",
    "\\boxed{reveal 0 " + "7" * 5000 + "}",
    "\\boxed{Reveal 0 0}",
    "\\boxed{FLAG 1 1}",
    "\\boxed{dig 1 1}",
    "\\boxed{reveal 1, 1}",
    "\\boxed{UP}",
    "\\BOXED{up}",
    "\\boxed{rıght}",
    "\\boxed{rİght}",
    "\\boxed{ſ}",
    "\\boxed{ up }",
    "\\boxed{A A}",
    "\\boxed{a,b}",
    "\\boxed{A ,  C}",
    "\\boxed{AC}",
    "\\boxed{\\boxed{1}}",
    "\\boxed{\\text{up}}",
    "boxed{1}",
    "\\boxed{1",
)


def mutated(action: str, rng: random.Random) -> str:
    """One or two characters taken out, put in or replaced."""
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(action) + 1)
        action = (
            action[:at] + rng.choice(["", *"019 ,{}\tABcup\\٣ı"]) + action[at + rng.randint(0, 1) :]
        )
    return action


def play(episode: Episode) -> Transcript:
    """What ours makes of it."""
    game = make(episode.id, **episode.parameters)
    observation, info = game.reset(episode.seed)
    transcript: Transcript = [[observation, info.get("suffix")]]
    for action in episode.actions:
        *result, info = game.step(action)
        transcript.append([*result, info.get("suffix")])
    return transcript


def play_with_gem(
    python: str, episodes: list[Episode], folder: Path, source: Path | None = None
) -> list[Transcript]:
    """What GEM makes of them; `source` is a folder with another state of its package."""
    asked, answered = folder / "episodes.json", folder / "transcripts.json"
    asked.write_text(json.dumps([asdict(episode) for episode in episodes]))
    variables = {"NLTK_DATA": str(folder)} | ({"PYTHONPATH": str(source)} if source else {})
    corpus = folder / "corpora" / "words"
    corpus.mkdir(parents=True)
    for name, words in (("en-basic", load_words().basic), ("en", load_words().full)):
        (corpus / name).write_text("\n".join(words))
    subprocess.run(
        [python, PROGRAM, asked, answered], check=True, env=variables, timeout=600, cwd=folder
    )
    return json.loads(answered.read_text())


def difference(ours: Transcript, gems: Transcript) -> str | None:
    """The first place where they differ; where GEM raises, ours has to answer with a format
    error.
    """
    for turn, (our, gem) in enumerate(zip(ours, gems, strict=True)):
        if gem[0] == RAISED and our[1:3] == [FORMAT_ERROR_REWARD, True]:
            continue
        if turn and abs(our[1] - gem[1]) <= TOLERANCE:
            gem = [gem[0], our[1], *gem[2:]]
        if our != gem:
            return f"turn {turn}: ours {our!r}, GEM's {gem!r}"
    return None


def guess_the_number(game: GuessTheNumber, rng: random.Random) -> str:
    return f"\\boxed{{{game.number}}}"


def guess_the_code(game: Mastermind, rng: random.Random) -> str:
    """At first only some digits in their places."""
    code = [
        digit if rng.random() < 0.7 else rng.randint(1, game.level.num_digits)
        for digit in game.code
    ]
    return f"\\boxed{{{' '.join(map(str, code))}}}"


def open_or_flag(game: Minesweeper, rng: random.Random) -> str | None:
    """Flags first, so that the last reveal wins."""
    if MINE not in game.counts:
        return None
    unflagged = [
        cell for cell, count in enumerate(game.counts) if count == MINE and game.shown[cell] != FLAG
    ]
    closed = [
        cell
        for cell, count in enumerate(game.counts)
        if count != MINE and game.shown[cell] == UNKNOWN
    ]
    if not unflagged and not closed:
        return None
    row, column = divmod(rng.choice(unflagged or closed), game.level.side)
    return f"\\boxed{{{'flag' if unflagged else 'reveal'} {row} {column}}}"


def place_a_digit(game: Sudoku, rng: random.Random) -> str:
    cell = rng.choice([cell for cell, digit in enumerate(game.cells) if digit == EMPTY])
    row, column = divmod(cell, game.level.side)
    return f"\\boxed{{{row + 1} {column + 1} {game.solution[cell]}}}"


def move_a_disk(game: TowerOfHanoi, rng: random.Random) -> str:
    """The first move of a shortest way to the end."""
    at = {disk: tower for tower, disks in game.towers.items() for disk in disks}
    target = "C"
    moved = ("A", "B")
    for disk in range(game.level.num_disks, 0, -1):
        if at[disk] != target:
            moved = (at[disk], target)
            target = ({"A", "B", "C"} - {at[disk], target}).pop()
    return f"\\boxed{{{moved[0]} {moved[1]}}}"


def slide_a_tile(game: FifteenPuzzle, rng: random.Random) -> str | None:
    """The first move of a shortest way to the end, where the board is small enough to look for
    it.
    """
    if game.level.side > 2:
        return None
    start, goal = tuple(game.tiles), (1, 2, 3, 0)
    came: dict[tuple[int, ...], tuple[tuple[int, ...], str]] = {goal: (goal, "")}
    waiting = deque([goal])
    reverse = {"up": 2, "down": -2, "left": 1, "right": -1}  # of the gap, backwards from the goal
    while waiting:
        tiles = waiting.popleft()
        gap = tiles.index(0)
        for direction in DIRECTIONS:
            other = gap - reverse[direction]
            if not 0 <= other < 4 or (direction in ("left", "right") and other // 2 != gap // 2):
                continue
            before = list(tiles)
            before[gap], before[other] = before[other], 0
            if tuple(before) not in came:
                came[tuple(before)] = (tiles, direction)
                waiting.append(tuple(before))
    return f"\\boxed{{{came[start][1]}}}" if start in came and start != goal else None


def push_a_box(game: Sokoban, rng: random.Random) -> str | None:
    """The first move of a shortest way to the end, where the room is small enough to look for
    it.
    """
    if game.level.num_boxes > 2:
        return None
    key = (tuple(game.cells), tuple(game.structure))
    if key not in WAYS:
        way = way_out(game.cells, game.structure, game.level)
        for cells, direction in way:
            WAYS[(cells, key[1])] = direction
        if not way:
            WAYS[key] = None
    return f"\\boxed{{{WAYS[key]}}}" if WAYS[key] else None


WAYS: dict[tuple[tuple[int, ...], tuple[int, ...]], str | None] = {}
"""The next move by room and its structure."""


def way_out(
    cells: list[int], structure: list[int], level: RoomSize
) -> list[tuple[tuple[int, ...], str]]:
    """Rooms from this one on, and the move in each of them; none where the room is solved, or
    cannot be.
    """
    start = tuple(cells)
    came: dict[tuple[int, ...], tuple[tuple[int, ...], str]] = {start: (start, "")}
    waiting = deque([start])
    while waiting and waiting[0].count(BOX_ON_TARGET) < level.num_boxes:
        before = waiting.popleft()
        for direction, after in moves(before, structure, level.width):
            if after not in came:
                came[after] = (before, direction)
                waiting.append(after)
    way: list[tuple[tuple[int, ...], str]] = []
    at = waiting[0] if waiting else start
    while at != start:
        at, direction = came[at]
        way.append((at, direction))
    return way


def moves(
    cells: tuple[int, ...], structure: list[int], width: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Possible moves in a room, and the room after each; Sokoban's rules, said once more."""
    at = cells.index(PLAYER)
    for direction, step in zip(STEPS, (-width, width, -1, 1), strict=True):
        after = list(cells)
        if cells[at + step] in (BOX, BOX_ON_TARGET):
            if cells[at + 2 * step] not in (FLOOR, TARGET):
                continue
            after[at + 2 * step] = BOX_ON_TARGET if structure[at + 2 * step] == TARGET else BOX
        elif cells[at + step] not in (FLOOR, TARGET):
            continue
        after[at], after[at + step] = structure[at], PLAYER
        yield direction, tuple(after)


def guess_a_letter(game: Hangman, rng: random.Random) -> str:
    """Sometimes the whole word; it alone ends the game."""
    hidden = [letter for letter in game.secret if letter not in game.guessed]
    return f"\\boxed{{{rng.choice(hidden) if hidden and rng.random() < 0.8 else game.secret}}}"


def guess_the_word(game: Wordle, rng: random.Random) -> str:
    """At first only some letters in their places."""
    letters = [letter if rng.random() < 0.7 else rng.choice(game.secret) for letter in game.secret]
    return f"\\boxed{{{''.join(letters).lower()}}}"


def find_a_word(game: WordSearch, rng: random.Random) -> str:
    """Either way round, a word that was found before too."""
    word, (row, column, direction) = rng.choice(list(game.places.items()))
    length = len(word) - 1
    ends = [
        (row, column),
        (row, column + length) if direction == "across" else (row + length, column),
    ]
    rng.shuffle(ends)
    return f"\\boxed{{{ends[0][0]} {ends[0][1]} {ends[1][0]} {ends[1][1]}}}"


SOLVERS: dict[str, Callable[[Any, random.Random], str | None]] = {
    "GuessTheNumber": guess_the_number,
    "Mastermind": guess_the_code,
    "Minesweeper": open_or_flag,
    "Sudoku": place_a_digit,
    "TowerofHanoi": move_a_disk,
    "FifteenPuzzle": slide_a_tile,
    "Sokoban": push_a_box,
    "Hangman": guess_a_letter,
    "Wordle": guess_the_word,
    "WordSearch": find_a_word,
}
"""A good action by family, found by looking behind the board; None where there is none to be found
quickly.
"""
