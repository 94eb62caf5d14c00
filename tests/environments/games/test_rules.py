"""The rules of each family, on positions made by hand."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from halteres.environments.games import IDS, make
from halteres.environments.games.board_games import slid
from halteres.environments.games.map_games import UNKNOWN, neighbours_of


def begun(id: str, seed: int = 0, **position: Any) -> Any:
    """A game at its first turn, parts of its state set."""
    game = make(id)
    game.reset(seed)
    for name, value in position.items():
        assert name in game.state
        setattr(game, name, value)
    return game


def played(game: Any, *actions: str) -> tuple[str, float, str | None]:
    """Observation, reward and outcome of the last of some boxed actions."""
    result: Any = None
    for action in actions:
        result = game.step(f"\\boxed{{{action}}}")
    return result[0], result[1], result[4]["outcome"]


def test_the_last_box_of_an_answer_counts() -> None:
    game = begun("game:GuessTheNumber-v0-easy", number=4)
    assert game.step("\\boxed{9}? No: \\boxed{4}. \\boxed{}")[1] == 1.0


def test_guess_the_number_hints_and_pays_the_right_guess() -> None:
    game = begun("game:GuessTheNumber-v0-easy", number=4)
    text = "At turn 1, you guessed 7, and the target number is lower than 7."
    assert played(game, "7") == (text, 0.0, None)
    text = "At turn 2, you guessed 7, which has been already guessed before."
    assert played(game, "7") == (text, 0.0, None)
    assert played(game, "4") == (
        "Congratulations! You guessed the correct number 4 in 3 turns.",
        1.0,
        "success",
    )


@pytest.mark.parametrize(("last", "reward"), [("1", 1 - 3 / 9), ("2", 1 - 2 / 9), ("11", 0.0)])
def test_guess_the_number_pays_the_last_guess_by_its_distance(last: str, reward: float) -> None:
    """The guess 1 was made before; 11 is out of range."""
    game = begun("game:GuessTheNumber-v0-easy", number=4)
    text = "You have reached the maximum number of turns."
    assert played(game, "1", "3", "9", last) == (text, pytest.approx(reward), "turn_limit")


def test_guess_the_number_takes_zero_for_no_guess() -> None:
    assert played(begun("game:GuessTheNumber-v0-easy"), "0")[2] == "format_error"


@pytest.mark.parametrize(
    ("guess", "black", "white"),
    [("1 2 3 5", 3, 0), ("4 3 2 1", 0, 4), ("1 1 1 1", 1, 0), ("2 2 5 5", 1, 0), ("5 1 1 2", 0, 2)],
)
def test_mastermind_counts_each_digit_of_the_code_once(guess: str, black: int, white: int) -> None:
    game = begun("game:Mastermind-v0-hard", code=[1, 2, 3, 4])
    text, reward, _ = played(game, guess)
    assert f"receives {black} black peg(s) and {white} white peg(s)." in text
    assert reward == black / 4


def test_mastermind_pays_only_what_is_better_than_the_best_guess() -> None:
    game = begun("game:Mastermind-v0-hard", code=[1, 2, 3, 4])
    rewards = [played(game, guess)[1] for guess in ("1 2 5 6", "1 5 6 7", "1 2 3 8", "1 2 3 4")]
    assert rewards == [0.5, 0.0, 0.25, 0.25]


@pytest.mark.parametrize(
    ("guess", "told"),
    [
        ("1 2", "has 2 entries but the code has length 4"),
        ("1 2 3 9", "numbers outside the range 1 to 8"),
        ("5  6 7\n8", "already guessed before"),
    ],
)
def test_mastermind_refuses_an_impossible_guess(guess: str, told: str) -> None:
    game = begun("game:Mastermind-v0-hard", code=[1, 2, 3, 4])
    played(game, "5 6 7 8")
    text, reward, outcome = played(game, guess)
    assert told in text
    assert (reward, outcome) == (0.0, None)


def test_mastermind_alone_has_no_suffix_at_reset() -> None:
    assert [id for id in IDS if "suffix" not in make(id).reset(1)[1]] == [
        id for id in IDS if "Mastermind" in id
    ]


def minefield(version: int = 0) -> Any:
    """5 times 5 cells, the first column mined."""
    laid = [cell % 5 == 0 for cell in range(25)]
    around = neighbours_of(5)
    counts = [
        -1 if laid[cell] else sum(laid[other] for other in around[cell]) for cell in range(25)
    ]
    return begun(f"game:Minesweeper-v{version}-easy", counts=counts)


def test_the_first_reveal_of_minesweeper_opens_a_block_without_mines() -> None:
    for seed in range(30):
        game = begun("game:Minesweeper-v0-easy", seed)
        assert "successfully revealed" in played(game, "reveal 2 2")[0]
        assert all(
            game.shown[row * 5 + column] != UNKNOWN for row in (1, 2, 3) for column in (1, 2, 3)
        )
        assert game.counts.count(-1) == 5


def test_minesweeper_floods_from_a_cell_without_mines_around_it_but_not_over_flags() -> None:
    game = minefield()
    played(game, "flag 2 4")
    _, reward, outcome = played(game, "reveal 2 2")
    assert (game.shown.count(UNKNOWN), reward, outcome) == (5, 19 / 20, None)
    assert game._suffix().splitlines()[1:5] == [
        "    0  1  2  3  4",
        " 0  .  2  0  0  0 ",
        " 1  .  3  0  0  0 ",
        " 2  .  3  0  0  F ",
    ]


def test_a_mine_ends_minesweeper_even_under_a_flag() -> None:
    assert played(minefield(), "flag 0 0", "reveal 0 0") == (
        "Game over! You hit a mine at (0, 0)",
        0.0,
        "failure",
    )


def test_minesweeper_v0_is_won_only_with_all_mines_flagged_before_the_last_reveal() -> None:
    flags = [f"flag {row} 0" for row in range(5)]
    assert played(minefield(), *flags, "reveal 2 2")[2] == "success"
    assert played(minefield(), "reveal 2 2", *flags)[2] is None


def test_minesweeper_v1_is_won_when_all_safe_cells_are_open() -> None:
    assert played(minefield(version=1), "reveal 2 2")[2] == "success"
    assert played(minefield(version=1), "flag 2 4", "reveal 2 2", "flag 2 4")[2] is None


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ("reveal 5 0", "outside the bounds of the grid"),
        ("dig 0 0", "invalid action 'dig'"),
        ("REVEAL 2 2", "already been revealed"),
        ("flag 2 2", "chose to flag cell (2, 2), which has already been revealed"),
    ],
)
def test_minesweeper_refuses_an_impossible_move(action: str, told: str) -> None:
    text, reward, outcome = played(minefield(), "reveal 2 2", action)
    assert told in text
    assert (reward, outcome) == (0.0, None)


def test_fifteen_puzzle_slides_a_tile_into_the_gap() -> None:
    game = begun("game:FifteenPuzzle-v0-easy", tiles=[1, 2, 0, 3])
    text = "At turn 1, you chose a move right that is outside the bounds of the board."
    assert played(game, "right") == (text, 0.0, None)
    assert played(game, "down") == ("At turn 2, you made a valid move: down.\n", 0.0, None)
    assert game.tiles == [0, 2, 1, 3]
    assert played(game, "up", "left") == (
        "Congratulations! You have solved the puzzle!",
        1.0,
        "success",
    )


def test_fifteen_puzzle_pays_at_the_turn_limit_the_cells_that_are_right() -> None:
    game = begun("game:FifteenPuzzle-v0-easy", tiles=[1, 0, 3, 2])
    assert played(game, *["right", "left"] * 5)[1:] == (0.5, "turn_limit")


def small_boards(id: str, num_seeds: int, **options: Any) -> Counter[tuple[int, ...]]:
    game: Any = make(id, **options)
    boards: Counter[tuple[int, ...]] = Counter()
    for seed in range(num_seeds):
        game.reset(seed)
        boards[tuple(game.tiles)] += 1
    return boards


def test_fifteen_puzzle_easy_has_two_boards_in_v0_and_all_solvable_ones_in_v1() -> None:
    solvable = {
        (1, 2, 0, 3), (0, 2, 1, 3), (2, 0, 1, 3), (2, 3, 1, 0), (2, 3, 0, 1), (0, 3, 2, 1),
        (3, 0, 2, 1), (3, 1, 2, 0), (3, 1, 0, 2), (0, 1, 3, 2), (1, 0, 3, 2),
    }  # fmt: skip
    assert len(small_boards("game:FifteenPuzzle-v0-easy", 20)) == 2
    assert set(small_boards("game:FifteenPuzzle-v1-easy", 200)) == solvable
    assert set(small_boards("game:FifteenPuzzle-v0-easy", 200, init_algo="pure_random")) == {
        *solvable,
        (1, 2, 3, 0),
    }
    assert len(
        small_boards("game:FifteenPuzzle-v0-easy", 400, init_algo="gem-0.1.0")
    ) == math.factorial(4)


def test_sudoku_pays_each_digit_of_the_solution_an_equal_share() -> None:
    game = begun("game:Sudoku-v0-easy", 3)
    empty = [cell for cell, digit in enumerate(game.cells) if not digit]
    assert 8 <= len(empty) <= 10
    results = [
        played(game, f"{cell // 4 + 1} {cell % 4 + 1} {game.solution[cell]}") for cell in empty
    ]
    assert [reward for _, reward, _ in results] == [1 / len(empty)] * len(empty)
    assert [outcome for *_, outcome in results] == [None] * (len(empty) - 1) + ["success"]


def test_sudoku_refuses_what_is_not_the_solutions_digit() -> None:
    game = begun("game:Sudoku-v0-easy", 3)
    cell = game.cells.index(0)
    row, column, digit = cell // 4 + 1, cell % 4 + 1, game.solution[cell] % 4 + 1
    assert "which violates Sudoku rules." in played(game, f"{row} {column} {digit}")[0]
    assert "which is out of bounds." in played(game, f"{row} {column} 5")[0]
    filled = next(cell for cell, digit in enumerate(game.cells) if digit)
    assert "which is already filled." in played(game, f"{filled // 4 + 1} {filled % 4 + 1} 1")[0]


@pytest.mark.parametrize("id", ["game:Sudoku-v0-easy", "game:Sudoku-v0-hard"])
def test_a_sudoku_has_one_solution(id: str) -> None:
    """Counted by plain backtracking, in no hurry."""
    game = begun(id, 1)
    assert sum(1 for _ in solutions(list(game.cells), game.level.side)) == 1


def solutions(cells: list[int], side: int) -> Any:
    def possible(cell: int) -> set[int]:
        box, (row, column) = math.isqrt(side), divmod(cell, side)
        peers = [
            digit
            for other, digit in enumerate(cells)
            if other // side == row
            or other % side == column
            or (other // side // box, other % side // box) == (row // box, column // box)
        ]
        return set(range(1, side + 1)) - set(peers)

    empty = [cell for cell, digit in enumerate(cells) if not digit]
    if not empty:
        yield list(cells)
        return
    choices = {cell: possible(cell) for cell in empty}
    cell = min(empty, key=lambda cell: len(choices[cell]))
    for digit in choices[cell]:
        cells[cell] = digit
        yield from solutions(cells, side)
    cells[cell] = 0


def test_tower_of_hanoi_is_solved_in_seven_moves() -> None:
    game = begun("game:TowerofHanoi-v0-easy")
    assert played(game, "A C")[0] == "At turn 1, you moved disk 1 from tower A to tower C."
    text = "Congratulations! You solved the Tower of Hanoi Puzzle"
    assert played(game, "A,B", "c b", "AC", "B A", "B , C", "A C") == (text, 1.0, "success")


def test_tower_of_hanoi_refuses_a_larger_disk_on_a_smaller_and_an_empty_tower() -> None:
    game = begun("game:TowerofHanoi-v0-easy")
    assert "from tower B, which is empty" in played(game, "B C")[0]
    assert "is larger than the top disk on tower C" in played(game, "A C", "A C")[0]


def test_tower_of_hanoi_takes_a_move_onto_the_same_tower_and_pays_disks_on_c_at_the_turn_limit() -> (
    None
):
    game = begun("game:TowerofHanoi-v0-easy")
    assert (
        played(game, "A C", *["A A"] * 8)[0]
        == "At turn 9, you moved disk 2 from tower A to tower A."
    )
    assert played(game, "A A")[1:] == (pytest.approx(1 / 3), "turn_limit")


def test_2048_merges_each_tile_once() -> None:
    assert slid([[2, 2, 2, 2], [4, 2, 2, 0], [0, 2, 0, 2], [2, 0, 4, 2]], "left") == [
        [4, 4, 0, 0],
        [4, 4, 0, 0],
        [4, 0, 0, 0],
        [2, 4, 2, 0],
    ]
    assert slid([[2, 2, 2, 0]], "right") == [[0, 0, 2, 4]]
    column = [[2], [2], [2], [4]]
    assert (slid(column, "up"), slid(column, "down")) == (
        [[4], [2], [4], [0]],
        [[0], [2], [4], [4]],
    )


def board(*tiles: int) -> list[list[int]]:
    """These tiles, then nothing."""
    cells = [*tiles, *[0] * (16 - len(tiles))]
    return [cells[row : row + 4] for row in range(0, 16, 4)]


def test_2048_pays_doublings_of_the_largest_tile_up_to_the_target() -> None:
    game = begun("game:Game2048-v0-easy", rows=board(4, 4), largest=4, largest_at_start=2)
    text, reward, outcome = played(game, "left")
    assert (text, reward, outcome) == ("At turn 1, you moved left", pytest.approx(1 / 5), None)
    game.rows = board(32, 32)
    text, reward, outcome = played(game, "LEFT")
    assert (reward, outcome) == (pytest.approx(3 / 5), "success")


def test_2048_pays_a_new_four_with_the_next_move() -> None:
    """Set by hand: the largest tile that was paid is 2, a 4 has appeared."""
    game = begun("game:Game2048-v0-easy", rows=board(0, 4), largest=2, largest_at_start=2)
    assert played(game, "left")[1] == pytest.approx(1 / 5)


def test_a_move_of_2048_that_changes_nothing_adds_no_tile() -> None:
    game = begun("game:Game2048-v0-easy", rows=board(4))
    text, reward, outcome = played(game, "up")
    assert "doesn't change the board state" in text
    assert (reward, outcome, game.rows) == (0.0, None, board(4))


def test_2048_ends_where_no_move_is_left() -> None:
    stuck = board(*[8, 4, 8, 16, 4, 8, 16, 32, 2, 4, 8, 16, 0, 16, 32, 64])
    assert played(begun("game:Game2048-v0-hard", rows=stuck, largest=64), "left") == (
        "Game over! No more moves possible.",
        0.0,
        "failure",
    )
