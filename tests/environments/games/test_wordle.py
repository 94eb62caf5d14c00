"""Rules of Wordle."""

from __future__ import annotations

import pytest

from halteres.environments.games import make
from halteres.environments.games.word_games import Wordle


def playing(secret: str, id: str = "game:Wordle-v0-hard") -> Wordle:
    """An episode with a word of one's own, of as many letters as the level's."""
    game = make(id)
    assert isinstance(game, Wordle)
    game.reset(1)
    assert len(secret) == game.level.word_length
    game.secret = secret
    return game


@pytest.mark.parametrize(
    ("secret", "guess", "marks"),
    [
        ("APPLE", "APPLY", "GGGGX"),
        ("APPLE", "PAPER", "YYGYX"),
        ("APPLE", "PUPPY", "YXGXX"),  # two P in the word, three in the guess
        ("EERIE", "GEESE", "XGYXG"),
        ("ABBEY", "KEBAB", "XYGYY"),
    ],
)
def test_each_letter_of_the_word_is_marked_once_greens_first(
    secret: str, guess: str, marks: str
) -> None:
    for version, shown in ((0, str(list(marks))), (1, marks)):
        observation = playing(secret, f"game:Wordle-v{version}-hard").step(f"\\boxed{{{guess}}}")[0]
        assert observation == f"At turn 1, you guessed {guess}\nFeedback:\n{guess}\n{shown}"


def test_a_letter_in_its_place_is_paid_once_and_the_word_half() -> None:
    game = playing("APPLE")
    assert game.step("\\boxed{amber}")[1] == pytest.approx(0.1)
    assert game.step("\\boxed{abide}")[1] == pytest.approx(0.1)
    observation, reward, terminated, truncated, info = game.step("\\boxed{apple}")
    assert observation == "Congratulations! You guessed the secret word APPLE in 3 turns."
    assert reward == pytest.approx(0.8)
    assert (terminated, truncated, info["outcome"]) == (True, False, "success")


def test_a_guess_of_another_length_or_repeated_pays_nothing() -> None:
    game = playing("APPLE")
    told = "At turn 1, you guessed APP which has 3 letters but the secret word has 5 letters."
    assert game.step("\\boxed{app}")[:2] == (told, 0.0)
    game.step("\\boxed{amber}")
    told = "At turn 3, you guessed AMBER, which has been already guessed before."
    assert game.step("\\boxed{a m b e r}")[:2] == (told, 0.0)


def test_words_that_no_list_has_are_guesses() -> None:
    assert playing("APPLE").step("\\boxed{axxxx}")[1] == pytest.approx(0.1)


def test_version_0_leaves_tabs_and_version_1_takes_them_out() -> None:
    assert "which has 6 letters" in playing("APPLE").step("\\boxed{ab\tbey}")[0]
    assert "Feedback:\nABBEY" in playing("APPLE", "game:Wordle-v1-hard").step("\\boxed{ab\tbey}")[0]
