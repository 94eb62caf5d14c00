"""Text games of several turns, played by the rules, words and random draws of GEM.

Owns: the games of GEM under its ids; their levels, prompts, rewards and ends; corrected variants
(`-v1-`). Never: touches a process-wide generator, imports GEM, reads a clock; executes what a
policy wrote, but in a cage. Guarantees: a task and a seed are the whole initial state; a saved game
goes on identically in another process; an action of any text gives a result, never an exception.
"""

from __future__ import annotations

from typing import Any

from halteres.config.gem_ids import not_a_game
from halteres.environments.games.board_games import FifteenPuzzle, Game2048, TowerOfHanoi
from halteres.environments.games.game import Game
from halteres.environments.games.map_games import Minesweeper, Sokoban
from halteres.environments.games.number_games import GuessTheNumber, Mastermind, Sudoku
from halteres.environments.games.word_games import Hangman, Wordle, WordSearch
from halteres.rollouts.rng import Split

FAMILIES: tuple[type[Game[Any, Any]], ...] = (
    GuessTheNumber,
    Mastermind,
    Minesweeper,
    FifteenPuzzle,
    Sudoku,
    TowerOfHanoi,
    Game2048,
    Sokoban,
    Hangman,
    Wordle,
    WordSearch,
)
"""One line each."""


_FAMILY_OF = {
    f"game:{family.name}-{version}-{level}": family
    for family in FAMILIES
    for version, levels in (("v0", (*family.levels, "random")), ("v1", family.corrected))
    for level in levels
}

IDS: tuple[str, ...] = tuple(_FAMILY_OF)
"""All games: `game:<family>-v0-<level>` is GEM's, `-v1-` is ours, where GEM's has a defect."""


def make(id: str, *, split: Split = "train", base_seed: int = 0, **options: Any) -> Game[Any, Any]:
    """The game of an id, to be `reset` before it is played.

    Args:
        id: one of `IDS`.
        split: of the seeds that `reset` takes when it is given none; training and evaluation never
            share a sequence.
        base_seed: of the same.
        options: of the family, e.g. `init_algo` of FifteenPuzzle.

    Raises:
        NotFound: no game has this id; the nearest is named.
        InvalidConfig: it is an id of GEM's that is no game played here; the family has no such
            option, or not with this value.
    """
    if id not in _FAMILY_OF:
        raise not_a_game(id, IDS)
    return _FAMILY_OF[id](id, split=split, base_seed=base_seed, **options)
