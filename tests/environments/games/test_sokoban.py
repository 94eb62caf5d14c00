"""Rules of Sokoban, and its rooms."""

from __future__ import annotations

import pytest

from environments.games.episodes import way_out
from halteres.environments.games import make
from halteres.environments.games.map_games import (
    BOX,
    BOX_ON_TARGET,
    FLOOR,
    PLAYER,
    SYMBOLS,
    TARGET,
    Sokoban,
)

ROOM = """
# # # # # #
# P _ _ _ #
# _ X _ _ #
# _ O _ X #
# _ _ O _ #
# # # # # #
"""


def playing(room: str = ROOM) -> Sokoban:
    """An episode in a room of one's own."""
    game = make("game:Sokoban-v0-easy")
    assert isinstance(game, Sokoban)
    game.reset(1)
    game.cells = [SYMBOLS.index(symbol) for symbol in room.split()]
    under = {PLAYER: FLOOR, BOX: FLOOR, BOX_ON_TARGET: TARGET}
    game.structure = [under.get(cell, cell) for cell in game.cells]
    return game


def walk(game: Sokoban, *directions: str) -> str:
    """What the last step says."""
    return [game.step(f"\\boxed{{{direction}}}")[0] for direction in directions][-1]


def board(game: Sokoban) -> str:
    """As the policy sees it."""
    return (
        game._suffix()
        .removeprefix("Here is the current board layout:\n")
        .removesuffix("\nEnter your move.")
    )


def test_the_board_is_shown_by_symbols() -> None:
    assert board(playing()) == ROOM.lstrip()


def test_a_box_is_pushed_ahead_and_a_target_is_there_again_when_left() -> None:
    game = playing()
    assert walk(game, "right") == "At turn 1, you moved right."
    assert walk(game, "down") == "At turn 2, you pushed a box while you moved down."
    assert board(game).splitlines()[3] == "# _ √ _ X #"
    walk(game, "down")
    assert board(game).splitlines()[3:5] == ["# _ P _ X #", "# _ X O _ #"]
    walk(game, "up")
    assert board(game).splitlines()[3] == "# _ O _ X #"


@pytest.mark.parametrize("direction", ["up", "left"])
def test_walls_and_boxes_that_cannot_be_pushed_stop_the_player(direction: str) -> None:
    blocked = ROOM.replace("P _ _ _", "_ _ _ _").replace(
        "# _ X _ _", "# X P X #" if direction == "left" else "# _ P X _"
    )
    blocked = blocked.replace("# _ _ _ _ #", "# _ # _ _ #", 1)
    game = playing(blocked)
    before = board(game)
    observation, reward, terminated, _, _ = game.step(f"\\boxed{{{direction}}}")
    assert (
        observation
        == f"At turn 1, you cannot move {direction} - you would collide with wall or other boxes!"
    )
    assert (reward, terminated, board(game)) == (0.0, False, before)


def test_all_boxes_on_targets_win_and_nothing_pays_before() -> None:
    game = playing(
        ROOM.replace("X _ _ #\n# _ O _ X #\n# _ _ O _ #", "X _ _ #\n# _ O _ _ #\n# _ _ √ _ #")
    )
    results = [game.step(f"\\boxed{{{direction}}}") for direction in ("RIGHT", "down")]
    assert [result[1] for result in results] == [0.0, 1.0]
    assert results[1][0] == "Congratulations! You have solved the Sokoban puzzle!"
    assert results[1][2:4] == (True, False)


def test_the_turn_limit_pays_the_share_of_boxes_on_targets() -> None:
    game = playing()
    game.turn = 18
    results = [game.step(f"\\boxed{{{direction}}}") for direction in ("right", "down")]
    assert results[1][:4] == ("You have reached the maximum number of turns.", 0.5, True, True)


def test_a_dotless_i_is_a_format_error() -> None:
    """GEM raises."""
    observation, reward, terminated, _, _ = playing().step("\\boxed{rıght}")
    assert (observation, reward, terminated) == (
        "At turn 1, your submitted action is not valid.",
        -0.1,
        True,
    )


def test_rooms_can_be_solved() -> None:
    game = make("game:Sokoban-v0-easy")
    assert isinstance(game, Sokoban)
    for seed in range(5):
        game.reset(seed)
        assert way_out(game.cells, game.structure, game.level), f"seed {seed}"
