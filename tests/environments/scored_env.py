"""Environments whose scorers tell where they run and what they see there; imports little, since
every worker imports it, too.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from halteres.environments.base import BaseEnv
from halteres.environments.multi_turn import MultiTurnEnv, Reply, Step
from halteres.environments.single_turn import SingleTurnEnv
from halteres.types import Turn


@dataclass(frozen=True)
class Task:
    """Of a class of this file."""

    number: int


class Words(SingleTurnEnv):
    """The answer says what is looked at."""

    unsafe_scorer = True
    named: ClassVar[tuple[str, ...]] = ()  # attributes of the scorer's state
    cases: tuple[int, ...] = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.words = ["made"]

    def load_dataset(self) -> None:
        """One attribute is new, one grows."""
        self.level = 1.5
        self.cases = (1, 2, 3)
        self.words.append("loaded")

    async def get_next_item(self) -> Task:
        return Task(self.rng.randint(1, 100))

    def prompt(self, item: Any) -> str:
        return f"Question: {item.number}?"

    def scorer_state(self) -> Mapping[str, Any]:
        return {name: getattr(self, name) for name in self.named}

    async def score(self, item: Any, text: str) -> Any:
        """A number, or whatever the text asks for."""
        asked: dict[str, Any] = {
            "number": lambda: item.number / 7,
            "level": lambda: self.level,
            "words": lambda: len(self.words),
            "cases": lambda: len(self.cases),
            "default": lambda: len(getattr(self, "cases", ())),
            "caught": self.caught,
            "process": os.getpid,
            "arguments": lambda: len(Path("/proc/self/cmdline").read_bytes()),
            "prompt": lambda: len(self.config.system_prompt or ""),
            "leave": lambda: sys.exit(3),
            "give up": self.give_up,
            "server": lambda: self.server,
            "nan": lambda: float("nan"),
            "text": lambda: "much",
            "object": object,
            "raise": lambda: 1 / 0,
            "exit": lambda: os._exit(3),
        }
        return asked.get(text, lambda: len(text) / 3)()

    def caught(self) -> float:
        """Goes on without what it does not have."""
        try:
            return len(self.cases)
        except Exception:  # noqa: BLE001
            return 0.0

    def give_up(self) -> float:
        """As what awaits a task does that something else has cancelled."""
        raise asyncio.CancelledError("no time")

    def measure(self, item: Any, text: str) -> Mapping[str, float]:
        return {"own_process": float(os.getpid())}


class Slow(Words):
    """Its further figures are awaited."""

    async def measure(self, item: Any, text: str) -> Mapping[str, float]:  # type: ignore[override]
        await asyncio.sleep(0)
        return {"length": float(len(text))}


class Evaluating(Words):
    """Scores where it evaluates."""

    async def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, float]:
        return {"eval/score": await self.score(Task(1), "number")}


class Alone(Words):
    """Scores where it samples."""

    async def collect_trajectories(self, item: Any) -> Any:
        return None, []


class Plain(SingleTurnEnv):
    """Nothing in it is unsafe."""

    def score(self, item: Any, text: str) -> float:
        return float(os.getpid())


class Count(MultiTurnEnv):
    """Each episode has a number of its own."""

    unsafe_scorer = True

    async def get_next_item(self) -> int:
        return self.rng.randint(1, 100)

    def scorer_state(self) -> Mapping[str, Any]:
        return {"number": self.number, "stepped_in": self.stepped_in}

    def reset(self, task: Any) -> str:
        self.number = task
        return f"Say {task}."

    def step(self, reply: Reply) -> Step:
        self.stepped_in = os.getpid()
        return Step("Again.", reward=0.25, done=reply.turn == 1)

    def score_episode(self, turns: Sequence[Turn]) -> float:
        return self.number + sum(turn.reward for turn in turns)

    def measure(self, turns: Sequence[Turn]) -> Mapping[str, float]:
        return {"elsewhere": float(os.getpid() != self.stepped_in), "number": self.number}


class Summed(MultiTurnEnv):
    """Its score is the sum of its rewards."""

    unsafe_scorer = True


class Bare(BaseEnv):
    """Scores in `collect_trajectory`."""

    async def collect_trajectory(self, item: Any) -> Any:
        return None, []
