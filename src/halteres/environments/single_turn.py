"""One prompt, one answer, one score: the short way to an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from halteres.environments.base import Backlog, BaseEnv
from halteres.environments.evaluating import Answer
from halteres.environments.scored import ScoredDataGroup, ScoredDataItem, items_of
from halteres.environments.scoring import sample_of
from halteres.errors import EnvironmentFailed, boundary
from halteres.rollouts.groups import settle
from halteres.rollouts.rng import one_rollout
from halteres.tokenizer import Message
from halteres.types import FailedRollout, Trajectory, Turn


class SingleTurnEnv(BaseEnv):
    """Write `get_next_item`, `prompt` and `score_answer`; `load_dataset` for data, `eval_items` for
    evaluation, `measure` for further metrics.
    """

    def prompt(self, item: Any) -> str | Sequence[Message]:
        """The user's message, or whole messages (then without the config's system prompt)."""
        raise NotImplementedError(f"{type(self).__name__} needs prompt.")

    def score_answer(self, item: Any, answer: str) -> float | Awaitable[float]:
        """The reward of an answer, the model's whole text; above 0 counts as success. `async def`
        or not.
        """
        raise NotImplementedError(f"{type(self).__name__} needs score_answer.")

    def score(self, item: Any, text: str) -> float | Awaitable[float]:
        """Another name of `score_answer`; write either."""
        return self.score_answer(item, text)

    def measure(self, item: Any, text: str) -> Mapping[str, float] | Awaitable[Mapping[str, float]]:
        """Further metrics of an answer; their means appear as train/… and eval/…"""
        return {}

    async def collect_trajectories(
        self, item: Any
    ) -> tuple[ScoredDataGroup | list[ScoredDataGroup] | None, Backlog]:
        """The whole group in one request; answers whose scoring failed are sampled anew,
        `rollout_retries` times.
        """
        messages = self.messages(item)

        async def scored(turn: Turn) -> list[ScoredDataItem]:
            return _items(await self._trajectory(item, turn), messages)

        async def attempt(
            num_missing: int, number: int
        ) -> list[list[ScoredDataItem] | FailedRollout]:
            with one_rollout(0, number):
                turns = await self.server.chat(messages, num_missing)
            if self.scorer_workers.of_environment is None:
                return [await settle(scored(turn)) for turn in turns]
            return await asyncio.gather(*(settle(scored(turn)) for turn in turns))

        return await self.complete_group(item, attempt), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, float]:
        """Each held-out item once greedily and `eval_samples` times at temperature 1."""
        return await self.evaluate_held_out(self._answers)

    def messages(self, item: Any) -> list[dict[str, Any]]:
        """The chat that is sent for an item."""
        with boundary(EnvironmentFailed, f"{self.title}.prompt"):
            return self.chat_of(self.prompt(item))

    async def _answers(self, item: Any, count: int, temperature: float) -> list[Answer]:
        messages, answers = self.messages(item), list[Answer]()
        for turn in await self.server.chat(messages, count, temperature=temperature):
            trajectory = await self._trajectory(item, turn)
            answers.append(
                Answer(trajectory=trajectory, chat=sample_of(_items(trajectory, messages)))
            )
        return answers

    async def _trajectory(self, item: Any, turn: Turn) -> Trajectory:
        score = await self.call_scorer("score", item, turn.text)
        metrics = await self.call_measure(item, turn.text)
        return Trajectory(turns=(turn,), score=score, metrics=metrics)


def _items(trajectory: Trajectory, messages: list[dict[str, Any]]) -> list[ScoredDataItem]:
    answer = {"role": "assistant", "content": trajectory.turns[-1].text}
    return items_of(trajectory, messages=[[*messages, answer]])
