"""GEM's environments beside the games that are played here: what to use in the place of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from halteres.errors import HalteresError, InvalidConfig, NotFound, unknown


@dataclass(frozen=True, slots=True)
class Family:
    """Ids that begin alike."""

    prefix: str
    kind: Literal["native", "adapter", "refused"]  # played here; an environment of ours stands in; there is none
    why: str = ""  # the prefix is not native
    instead: str = ""
    environment: str | None = None  # the one of ours that stands in


_NO_SANDBOX = "Its scorer runs what the model wrote, and there is no sandbox for that yet."

OTHER_FAMILIES = (
    Family(
        "game:Crosswords",
        "refused",
        "Its words and clues come from GEM's own data.",
        "game:WordSearch-v1-easy is the nearest game.",
    ),
    Family(
        "game:WikiGame",
        "refused",
        "It walks through Wikipedia, which a server has to serve.",
        "Take a game that needs none, e.g. game:WordSearch-v1-easy.",
    ),
    Family("game:", "native"),
    Family(
        "rg:",
        "adapter",
        "Its tasks are made and scored by the package reasoning-gym, in a process of its own.",
        "Use the environment reasoning_gym with env.task={name!r}.",
        "reasoning_gym",
    ),
    Family(
        "math:GSM8K", "adapter", "Its questions are a data set.", "Use the environment gsm8k_tinker.", "gsm8k_tinker"
    ),
    Family(
        "math:ASDiv2K",
        "adapter",
        "Its questions are a data set, whose answers are numbers.",
        "Use the environment gsm8k_tinker, with env.dataset=<a .jsonl file of its questions and answers>.",
        "gsm8k_tinker",
    ),
    Family(
        "math:",
        "refused",
        "Its answers are formulas, or its questions pictures, which no scorer here compares.",
        "Where answers are numbers, use gsm8k_tinker with env.dataset; else write an environment of your own.",
    ),
    Family("code:", "refused", _NO_SANDBOX, "Take a task that is scored without running code, e.g. of reasoning_gym."),
    Family(
        "qa:",
        "refused",
        "Its questions are a data set, whose answers are words.",
        "Write an environment of your own that reads it and compares the answers.",
    ),
    Family(
        "logic:",
        "refused",
        "Its questions are a data set.",
        "Use the environment reasoning_gym, e.g. with env.task='knights_knaves'.",
    ),
    Family("eval:CodeContest", "refused", _NO_SANDBOX, "Evaluate on a task that is scored without running code."),
    Family(
        "eval:",
        "refused",
        "Its questions are a data set to evaluate on.",
        "Write an environment of your own with these questions held out, and evaluate it with rl_evaluate.",
    ),
)
"""The first prefix that fits an id holds."""


def family_of(id: str) -> Family | None:
    """The family of an id of GEM's, or None where it has no such prefix."""
    return next((family for family in OTHER_FAMILIES if id.startswith(family.prefix)), None)


def stands_for(id: str) -> InvalidConfig | None:
    """The error that says what takes the place of an id of GEM's; None where it may be a game that is played here."""
    family = family_of(id)
    if family is None or family.kind == "native":
        return None
    instead = family.instead.format(name=id.removeprefix(family.prefix))
    return InvalidConfig(f"{id} is no game that is played here.", family.why, instead)


def not_a_game(id: str, games: Iterable[str]) -> HalteresError:
    """The error for an id that is none of `games`: it says what takes its place, or names the nearest game."""
    return stands_for(id) or unknown(NotFound, "game", id, games)
