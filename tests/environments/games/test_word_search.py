"""Rules of WordSearch."""

from __future__ import annotations

import pytest

from halteres.environments.games import make
from halteres.environments.games.word_games import WordSearch


def playing(version: int = 0) -> WordSearch:
    """An episode with a small grid: CAT across in the first row, COW down in the first column."""
    game = make(f"game:WordSearch-v{version}-easy")
    assert isinstance(game, WordSearch)
    game.reset(1)
    game.grid = [list("CAT"), list("OXX"), list("WXX")]
    game.places = {"CAT": [0, 0, "across"], "COW": [0, 0, "down"]}
    return game


def test_every_word_lies_where_it_is_said_to() -> None:
    for seed in range(30):
        game = make("game:WordSearch-v0-random")
        assert isinstance(game, WordSearch)
        game.reset(seed)
        assert game.places
        for word, (row, column, direction) in game.places.items():
            cells = [
                (row, column + i) if direction == "across" else (row + i, column)
                for i in range(len(word))
            ]
            assert "".join(game.grid[row][column] for row, column in cells) == word


def test_a_word_pays_its_share_and_is_bracketed() -> None:
    game = playing()
    observation, reward, terminated, _, info = game.step("\\boxed{0 0 2 0}")
    assert (
        observation
        == "At turn 1, correct! You found the word 'COW' at coordinates (0, 0) to (2, 0)."
    )
    assert (reward, terminated) == (0.5, False)
    assert info["suffix"] == (
        "Current Board:\n   C00 C01 C02\nR00 [C]  A   T  \nR01 [O]  X   X  \nR02 [W]  X   X  \n"
        "Words Found: 1/2\nEnter your guess."
    )
    observation, reward, terminated, truncated, info = game.step("\\boxed{0 2 0 0}")
    assert observation == "Congratulations! You completed the Word Search puzzle!"
    assert (reward, terminated, truncated, info["outcome"]) == (0.5, True, False, "success")


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ("0 0 3 0", "your tried coordinates (0, 0) to (3, 0) are out of bounds."),
        ("0 0 1 1", "(0, 0) to (1, 1), which is not valid because words must be either across"),
        ("0 0 1 0", "incorrect attempt. No word found at coordinates (0, 0) to (1, 0)."),
    ],
)
def test_other_lines_pay_nothing_and_an_exact_repeat_is_told(action: str, told: str) -> None:
    game = playing()
    observation, reward, terminated, _, _ = game.step(f"\\boxed{{{action}}}")
    assert told in observation
    assert (reward, terminated) == (0.0, False)
    again = game.step(f"\\boxed{{{action}}}")[0]
    assert ("already tried" in again) == ("out of bounds" not in told)


def test_version_0_pays_a_word_twice_and_says_that_it_does() -> None:
    game = playing()
    assert [game.step(f"\\boxed{{{action}}}")[1] for action in ("0 0 2 0", "2 0 0 0")] == [0.5, 0.5]
    assert game.exploitable


def test_version_1_pays_a_word_once_and_lists_the_words() -> None:
    game = playing(1)
    results = [game.step(f"\\boxed{{{action}}}") for action in ("0 0 2 0", "2 0 0 0")]
    assert [result[1] for result in results] == [0.5, 0.0]
    assert results[1][0] == "At turn 2, you have already found the word 'COW'."
    assert not game.exploitable
    rules, _ = game.reset(5)
    assert rules.endswith(f"The hidden words are: {', '.join(sorted(game.places))}.")


def test_the_hard_level_draws_from_longer_words_too() -> None:
    def longest(level: str) -> int:
        game = make(f"game:WordSearch-v0-{level}")
        assert isinstance(game, WordSearch)
        found = 0
        for seed in range(20):
            game.reset(seed)
            found = max(found, *map(len, game.places))
        return found

    assert (longest("easy"), longest("hard")) == (7, 10)
