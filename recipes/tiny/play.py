"""Sampling the model on fresh tasks, and the figures of what it did.

Owns: batched sampling with `transformers`, the statistics of maths answers and of games.
Never: judges; the limits are in `accept`.
"""

import random
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import HIGH, LOW, MAX_TURNS, Game, new_game
from tokenizer import EOS, render_prompt
from transformers import AutoModelForCausalLM, AutoTokenizer

from halteres.environments.problems import (
    draw_problem,
    extract_boxed,
    is_correct,
    is_worked,
    user_message,
)

MAX_NEW_TOKENS = 64
CHUNK = 512  # sequences sampled together
_STATED = re.compile(r"between (\d+) and (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MathsFigures:
    """Shares of all answers, unless said otherwise."""

    well_formed: float
    success: float
    samples: int  # answers per task
    solved: float  # share of tasks with a right answer among the samples: pass@samples
    worked: float
    worked_right: float | None  # share of worked answers; None where there is none
    hasty_right: float | None  # share of the others
    mean_tokens: float  # of an answer, eos included


@dataclass(frozen=True, slots=True, kw_only=True)
class GameFigures:
    """Shares of all turns, unless said otherwise."""

    well_formed: float
    win_rate: float  # share of games
    mean_return: float  # undiscounted, as GEM pays
    stated: float  # share of turns after 1-3 hints that state an interval
    stated_right: float | None  # share of those statements; None where there is none
    interval_right: float  # share of turns after 1-3 hints that state the right interval
    mean_turns: float


class Player:
    """A model that answers many messages at once at temperature 1, float32."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")

    def answer(self, messages: list[str], seed: int) -> list[str]:
        """One answer per message, special tokens kept."""
        torch.manual_seed(seed)
        answers: list[str] = []
        for start in range(0, len(messages), CHUNK):
            prompts = [render_prompt(message) for message in messages[start : start + CHUNK]]
            inputs = self.tokenizer(
                prompts, return_tensors="pt", padding=True, add_special_tokens=False
            )
            with torch.inference_mode():
                sampled = self.model.generate(
                    **inputs, do_sample=True, top_k=0, max_new_tokens=MAX_NEW_TOKENS
                )
            answers += self.tokenizer.batch_decode(sampled[:, inputs["input_ids"].shape[1] :])
        return [answer.split("<|endoftext|>")[0] for answer in answers]


def measure_maths(player: Player, num_tasks: int, seed: int, samples: int) -> MathsFigures:
    """Held-out problems, `samples` answers each."""
    rng = random.Random(f"maths acceptance/{seed}")
    problems = [draw_problem(rng, "eval") for _ in range(num_tasks)]
    asked = [problem for problem in problems for _ in range(samples)]
    answers = player.answer([user_message(problem) for problem in asked], seed)
    right = [is_correct(answer, problem) for answer, problem in zip(answers, asked, strict=True)]
    worked = [is_worked(answer) for answer in answers]
    solved = [any(right[i : i + samples]) for i in range(0, len(right), samples)]
    return MathsFigures(
        well_formed=_mean([is_well_formed(answer) for answer in answers]),
        success=_mean(right),
        samples=samples,
        solved=_mean(solved),
        worked=_mean(worked),
        worked_right=_mean_or_none([r for r, w in zip(right, worked, strict=True) if w]),
        hasty_right=_mean_or_none([r for r, w in zip(right, worked, strict=True) if not w]),
        mean_tokens=_mean([len(player.tokenizer.encode(answer)) for answer in answers]),
    )


def measure_games(player: Player, num_games: int, seed: int) -> GameFigures:
    """GuessTheNumber-v0-easy, played to the end."""
    rng = random.Random(f"game acceptance/{seed}")
    games = [new_game(rng) for _ in range(num_games)]
    active, rewards, turns, formed, statements = games, [], 0, [], []
    for turn in range(1, MAX_TURNS + 1):
        answers = player.answer([game.message() for game in active], seed + turn)
        turns += len(answers)
        formed += [is_well_formed(answer) for answer in answers]
        if turn > 1:
            statements += [
                _statement(answer, game) for answer, game in zip(answers, active, strict=True)
            ]
        outcomes = [_play(game, answer) for game, answer in zip(active, answers, strict=True)]
        rewards += [reward for reward in outcomes if reward is not None]
        active = [game for game, reward in zip(active, outcomes, strict=True) if reward is None]
    return GameFigures(
        well_formed=_mean(formed),
        win_rate=_mean([reward == 1.0 for reward in rewards]),
        mean_return=_mean(rewards),
        stated=_mean([right is not None for right in statements]),
        stated_right=_mean_or_none([right for right in statements if right is not None]),
        interval_right=_mean([right is True for right in statements]),
        mean_turns=turns / num_games,
    )


def is_well_formed(answer: str) -> bool:
    """Whether the answer ends with eos and holds one box with an integer."""
    boxed = extract_boxed(answer)
    return (
        answer.endswith(EOS)
        and answer.count(r"\boxed") == 1
        and boxed is not None
        and boxed.isdecimal()
    )


def _statement(answer: str, game: Game) -> bool | None:
    """Whether the stated interval is the hints'; None where none is stated."""
    stated = _STATED.search(answer)
    return (int(stated[1]), int(stated[2])) == game.interval() if stated else None


def _play(game: Game, answer: str) -> float | None:
    """Make the move; the reward if it ends the game (GEM's rules)."""
    boxed = re.findall(r"\\boxed{(\d+)}", answer)
    guess = int(boxed[-1]) if boxed else 0
    if guess == 0:
        return -0.1
    if game.guess(guess):
        return 1.0
    if len(game.lines) < MAX_TURNS:
        return None
    return 1 - abs(guess - game.number) / (HIGH - LOW) if LOW <= guess <= HIGH else 0.0


def _mean(values: list[bool] | list[float]) -> float:
    return sum(values) / len(values)


def _mean_or_none(values: list[bool]) -> float | None:
    return _mean(values) if values else None
