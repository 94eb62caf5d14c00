"""The corpus: demonstrations of arithmetic and of GuessTheNumber, drawn without end from a seed.

Owns: what a demonstration says in each stage, the prompts' exact wording, the shares of the answer styles.
Never: tokenises, trains, or shows a held-out problem.
The wording of the game's prompts is GEM's (Apache-2.0, see NOTICE), so that the model knows the prompts it will meet.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from halteres.environments.problems import Problem, draw_problem, user_message, worked_answer

LOW, HIGH, MAX_TURNS = 1, 10, 4  # GuessTheNumber-v0-easy

Hint = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """Shares of the answer styles; those of one task sum to 1."""

    careful: float  # maths: worked and right
    hasty: float  # maths: a guess without work
    bisect: float  # game: states the interval, guesses its middle
    inside: float  # game: states the interval, guesses anywhere in it
    blind: float  # game: guesses anywhere, states nothing


CLEAN = Blend(careful=1.0, hasty=0.0, bisect=0.5, inside=0.5, blind=0.0)


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One user message and the assistant's answer to it."""

    message: str
    answer: str


@dataclass(slots=True)
class Game:
    """One episode of GuessTheNumber-v0-easy, enough of it to make and to play prompts."""

    number: int
    example: int
    guesses: list[int] = field(default_factory=list)  # valid ones only
    lines: list[str] = field(default_factory=list)  # what the game said, turn by turn

    def guess(self, guess: int) -> bool:
        """Play a guess that is not 0; True when it wins."""
        told = f"At turn {len(self.lines) + 1}, you guessed {guess},"
        if not LOW <= guess <= HIGH:
            self.lines.append(f"{told} which is outside the range specified.")
        elif guess in self.guesses:
            self.lines.append(f"{told} which has been already guessed before.")
        else:
            self.guesses.append(guess)
            self.lines.append(f"{told} and the target number is {self._hint(guess)} than {guess}.")
        return guess == self.number

    def interval(self) -> tuple[int, int]:
        """The smallest and largest number the hints leave."""
        low = max((guess + 1 for guess in self.guesses if guess < self.number), default=LOW)
        high = min((guess - 1 for guess in self.guesses if guess > self.number), default=HIGH)
        return low, high

    def message(self) -> str:
        """The user's message: GEM's `concat` observation inside seed 003's `qwen3_game` template."""
        history = "".join(f"{line}\n" for line in self.lines)
        return (
            "You are playing language games. Make valid actions to win.\n"
            f"Observation: {instructions(self.example)}{history}Enter your next guess."
            "\nPlease reason step by step, and put your final answer within \\boxed{}."
        )

    def _hint(self, guess: int) -> Hint:
        return "lower" if guess > self.number else "higher"


def instructions(example: int) -> str:
    """The game's opening, GEM's wording; `example` is the move it shows."""
    return (
        "You are playing Guess The Number.\n"
        f"You have to guess the number between {LOW} and {HIGH} (inclusive) within {MAX_TURNS} turns.\n"
        "As you enter your guess, the game will provide you with hints such as the target number is "
        "'higher' or 'lower'.\n"
        "You may provide your response in any manner. Only the number that is wrapped inside \\boxed{} will be "
        f"considered as your guess, for example, \\boxed{{{example}}}.\n"
        "As you play, the history of your guesses will be appended below. Use the information to complete the game "
        "before you run out of guesses.\n"
        "Enter your first guess to start the game.\n"
    )


def new_game(rng: random.Random) -> Game:
    """A game before its first turn."""
    return Game(number=rng.randint(LOW, HIGH), example=rng.randint(LOW, HIGH))


def maths(rng: random.Random, blend: Blend) -> Iterator[Demonstration]:
    """Arithmetic of the training split, without end."""
    while True:
        problem = draw_problem(rng, "train")
        careful = rng.random() < blend.careful
        yield Demonstration(user_message(problem), worked_answer(problem) if careful else hasty_answer(rng, problem))


def games(rng: random.Random, blend: Blend) -> Iterator[Demonstration]:
    """Single turns of games, without end: the history is any player's, the answer is of the blend."""
    while True:
        game = new_game(rng)
        sensible = rng.random()  # how much of this history's player reads the hints
        won = False
        for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 3))):
            low, high = game.interval() if rng.random() < sensible else (LOW, HIGH)
            won = game.guess(rng.randint(low, high)) or won
        if not won:
            yield Demonstration(game.message(), game_answer(rng, game, blend))


def hasty_answer(rng: random.Random, problem: Problem) -> str:
    """A guess without work: near the answer, and seldom right."""
    guess = max(0, problem.answer + rng.choice((-7, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 8)))
    return f"I think the answer is \\boxed{{{guess}}}."


def game_answer(rng: random.Random, game: Game, blend: Blend) -> str:
    """An answer to the game's current prompt in one of the blend's styles."""
    low, high = game.interval()
    style = rng.random()
    if style < blend.blind:
        return f"I will guess \\boxed{{{rng.randint(LOW, HIGH)}}}."
    guess = (low + high) // 2 if style < blend.blind + blend.bisect else rng.randint(low, high)
    return f"The number is between {low} and {high}. I guess \\boxed{{{guess}}}."
