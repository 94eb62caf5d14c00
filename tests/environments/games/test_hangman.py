"""Rules of Hangman."""

from __future__ import annotations

import pytest

from halteres.environments.games import make
from halteres.environments.games.word_games import Hangman


def playing(secret: str, id: str = "game:Hangman-v0-easy") -> Hangman:
    """An episode with a word of one's own."""
    game = make(id)
    assert isinstance(game, Hangman)
    game.reset(1)
    game.secret, game.board = secret, ["_"] * len(secret)
    return game


def test_a_letter_pays_half_of_its_share_and_is_shown_everywhere() -> None:
    game = playing("EGG")
    observation, reward, terminated, _, info = game.step("\\boxed{g}")
    assert (
        observation
        == "At turn 1, you successfully guessed a letter 'G' that is in the secret word."
    )
    assert reward == pytest.approx(1 / 3) and not terminated
    assert info["suffix"] == (
        "Here is the current state of the Hangman grid:\nC00 C01 C02\n  _   G   G \n\nEnter your "
        "guess."
    )


def test_a_miss_and_a_repeated_letter_pay_nothing() -> None:
    game = playing("EGG")
    assert game.step("\\boxed{X}")[:2] == (
        "At turn 1, you guessed a letter 'X' that is not in the secret word.",
        0.0,
    )
    told = "At turn 2, you guessed 'X', which has been already guessed before."
    assert game.step("\\boxed{x}")[:2] == (told, 0.0)


def test_the_word_pays_half_and_half_of_what_was_hidden() -> None:
    game = playing("EGG")
    game.step("\\boxed{g}")
    observation, reward, terminated, truncated, info = game.step("\\boxed{egg}")
    assert observation == "Congratulations! You guessed the word 'EGG' correctly!"
    assert reward == pytest.approx(0.5 + 0.5 / 3)
    assert (terminated, truncated, info["outcome"]) == (True, False, "success")


def test_other_words_are_told_by_their_length_or_as_wrong() -> None:
    game = playing("EGG")
    told = "At turn 1, You guessed 'EGGS' which is of length 4, but the secret word is of length 3."
    assert game.step("\\boxed{eggs}")[:2] == (told, 0.0)
    assert game.step("\\boxed{elk}")[:2] == (
        "At turn 2, You guessed 'ELK' which is incorrect.",
        0.0,
    )


def test_version_0_goes_on_when_all_letters_are_found_and_version_1_ends() -> None:
    game = playing("EGG")
    game.step("\\boxed{g}")
    assert game.step("\\boxed{e}")[2] is False
    assert game.step("\\boxed{egg}")[1:3] == (0.5, True)
    game = playing("EGG", "game:Hangman-v1-easy")
    first = game.step("\\boxed{g}")[1]
    observation, reward, terminated, _, info = game.step("\\boxed{e}")
    assert observation == "Congratulations! You guessed the word 'EGG' correctly!"
    assert terminated and info["success"]
    assert first + reward == pytest.approx(1.0)


def test_the_examples_are_exchanged_in_version_0_alone() -> None:
    rules = [make(f"game:Hangman-v{version}-easy").reset(3)[0] for version in (0, 1)]
    letter, word = (text.split("}")[0] for text in rules[1].split("\\boxed{")[1:])
    assert (len(letter), len(word)) == (1, 3)
    assert f"one letter guesses in the format of \\boxed{{{word}}}" in rules[0]
    assert f"one letter guesses in the format of \\boxed{{{letter}}}" in rules[1]


def test_the_last_turn_pays_its_letter() -> None:
    game = playing("EGG")
    game.turn = 9
    assert game.step("\\boxed{e}")[:4] == (
        "You have reached the maximum number of turns.",
        pytest.approx(0.5 / 3),
        True,
        True,
    )


def test_a_long_s_is_an_s_as_in_gem() -> None:
    """The pattern ignores case, and so takes it for one."""
    assert playing("SEE").step("\\boxed{ſ}")[1] == pytest.approx(0.5 / 3)
