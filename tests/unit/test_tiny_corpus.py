"""What the built-in model was shown: right demonstrations, no held-out problem. All of it is our
choice.
"""

import importlib.util
import random
import re
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest

from halteres.environments.problems import (
    draw_problem,
    extract_boxed,
    is_correct,
    is_worked,
    user_message,
)

CORPUS = Path(__file__).parents[2] / "recipes" / "tiny" / "corpus.py"


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_corpus", CORPUS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tiny_corpus", module)
    spec.loader.exec_module(module)
    return module


def test_no_held_out_question_is_demonstrated(corpus: ModuleType) -> None:
    rng = random.Random(0)
    held_out = {user_message(draw_problem(rng, "eval")) for _ in range(3000)}
    shown = {
        demonstration.message for demonstration in islice(corpus.maths(rng, corpus.CLEAN), 10_000)
    }
    assert not shown & held_out


def test_clean_arithmetic_is_worked_in_every_answer(corpus: ModuleType) -> None:
    answers = [d.answer for d in islice(corpus.maths(random.Random(0), corpus.CLEAN), 500)]
    assert all(is_worked(answer) for answer in answers)


def test_a_hasty_answer_shows_no_work_and_is_seldom_right(corpus: ModuleType) -> None:
    rng = random.Random(0)
    problems = [draw_problem(rng, "train") for _ in range(2000)]
    answers = [corpus.hasty_answer(rng, problem) for problem in problems]
    assert not any(is_worked(answer) for answer in answers)
    right = sum(
        is_correct(answer, problem) for answer, problem in zip(answers, problems, strict=True)
    )
    assert 0 < right / len(problems) < 0.2


def test_an_interval_is_what_the_hints_leave(corpus: ModuleType) -> None:
    game = corpus.Game(number=6, example=1)
    intervals = []
    for guess in (3, 9, 3, 11, 5):
        assert not game.guess(guess)
        intervals.append(game.interval())
    assert intervals == [(4, 10), (4, 8), (4, 8), (4, 8), (6, 8)]
    assert game.guess(6)


def test_the_game_speaks_gems_words(corpus: ModuleType) -> None:
    """Compared once with gem-llm 0.1.0 over ten thousand prompts; recorded here."""
    game = corpus.Game(number=6, example=7)
    for guess in (3, 3, 12):
        game.guess(guess)
    assert game.message() == (
        "You are playing language games. Make valid actions to win.\n"
        "Observation: You are playing Guess The Number.\n"
        "You have to guess the number between 1 and 10 (inclusive) within 4 turns.\n"
        "As you enter your guess, the game will provide you with hints such as the target number "
        "is 'higher' or "
        "'lower'.\n"
        "You may provide your response in any manner. Only the number that is wrapped inside "
        "\\boxed{} will be "
        "considered as your guess, for example, \\boxed{7}.\n"
        "As you play, the history of your guesses will be appended below. Use the information to "
        "complete the game "
        "before you run out of guesses.\n"
        "Enter your first guess to start the game.\n"
        "At turn 1, you guessed 3, and the target number is higher than 3.\n"
        "At turn 2, you guessed 3, which has been already guessed before.\n"
        "At turn 3, you guessed 12, which is outside the range specified.\n"
        "Enter your next guess."
        "\nPlease reason step by step, and put your final answer within \\boxed{}."
    )


def test_every_clean_game_answer_states_the_interval_and_guesses_inside(corpus: ModuleType) -> None:
    rng = random.Random(0)
    for _ in range(300):
        game = corpus.new_game(rng)
        for _ in range(rng.randrange(4)):
            game.guess(rng.randint(1, 10))
        low, high = game.interval()
        answer = corpus.game_answer(rng, game, corpus.CLEAN)
        stated = re.match(r"The number is between (\d+) and (\d+)\. I guess", answer)
        assert stated is not None and (int(stated[1]), int(stated[2])) == (low, high)
        assert low <= int(extract_boxed(answer) or 0) <= high


def test_a_blind_guess_states_nothing(corpus: ModuleType) -> None:
    blind = corpus.Blend(careful=0.0, hasty=1.0, bisect=0.0, inside=0.0, blind=1.0)
    demonstration = next(corpus.games(random.Random(0), blind))
    assert re.fullmatch(r"I will guess \\boxed\{([1-9]|10)\}\.", demonstration.answer)


def test_the_same_seed_draws_the_same_demonstrations(corpus: ModuleType) -> None:
    first, second = (
        list(islice(corpus.games(random.Random(3), corpus.CLEAN), 50)) for _ in range(2)
    )
    assert first == second
