"""Episodes as rollouts, played by an environment's own loop (`multi_turn`) or by a program of the
user's (`agent_program`).

Every episode that ends has one outcome: success or failure, as the environment says or its score
does, or another of `types.Outcome`. All of them are trained on but those of `mask_outcomes`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

from halteres.environments.base import Backlog, BaseEnv
from halteres.environments.config import BaseEnvConfig, setting
from halteres.environments.evaluating import Answer
from halteres.environments.scored import ScoredDataItem, items_of
from halteres.rewards.functions import Sample
from halteres.rollouts.rng import one_rollout
from halteres.tokenizer import Message
from halteres.types import Outcome, Trajectory, Turn

Messages = list[dict[str, Any]]


class EpisodeConfig(BaseEnvConfig):
    """Settings of environments of episodes."""

    mask_outcomes: tuple[Outcome, ...] = setting(
        (), "episodes that end so are not trained on; their groups keep them"
    )


@dataclass(slots=True, kw_only=True)
class Episode:
    """One episode: its messages, and its trajectory once it has ended."""

    opening: tuple[dict[str, Any], ...]  # what `reset` gave
    # after it; of a fresh chat what is new
    conversation: Messages = field(default_factory=list[Any])
    turns: list[Turn] = field(default_factory=list[Turn])
    chats: list[Messages] = field(default_factory=list[Any])  # of each turn, with its answer
    trajectory: Trajectory = field(init=False)

    def add(self, chat: Sequence[Message], turn: Turn, messages: Sequence[dict[str, Any]]) -> None:
        """The policy's answer to this chat, and what the environment said to it."""
        answer = {"role": "assistant", "content": turn.text}
        self.turns.append(turn)
        self.chats.append([*(dict(message) for message in chat), answer])
        self.conversation += [answer, *messages]


class EpisodeEnv(BaseEnv):
    """Write `play`; `score_episode` where a score is more than the sum of rewards, `measure` for
    further metrics.
    """

    env_config_cls: ClassVar[type[BaseEnvConfig]] = EpisodeConfig
    config: EpisodeConfig

    async def play(self, task: Any, temperature: float | None = None) -> Episode:
        """One episode; `temperature` None: that of training.

        Raises:
            EnvironmentFailed: it could not be played or scored.
            ContextOverflow: not even the first prompt leaves room for an answer.
            SamplerFailed: the policy could not be asked.
        """
        raise NotImplementedError(f"{type(self).__name__} needs play.")

    def score_episode(self, turns: Sequence[Turn]) -> float | Awaitable[float]:
        """The score of an ended episode: by default the sum of its rewards. Above
        `success_threshold` is success.
        """
        return math.fsum(turn.reward for turn in turns)

    def measure(
        self, turns: Sequence[Turn]
    ) -> Mapping[str, float] | Awaitable[Mapping[str, float]]:
        """Further metrics of an ended episode; their means appear as train/… and eval/…"""
        return {}

    async def collect_trajectory(
        self, item: Any
    ) -> tuple[Trajectory | ScoredDataItem | list[ScoredDataItem] | None, Backlog]:
        """One episode, as one sequence or several."""
        episode = await self.play(item)
        items = items_of(episode.trajectory, messages=episode.chats)
        if episode.trajectory.outcome in self.config.mask_outcomes:
            for one in items:
                one["overrides"] = {"set_advantage_to_zero": True}
        return items, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, float]:
        """Each held-out item once greedily and `eval_samples` times at temperature 1."""
        return await self.evaluate_held_out(self._answers)

    async def _ended(
        self, episode: Episode, outcome: Outcome | None, score: float | None = None
    ) -> Episode:
        """The episode with its score (None: `score_episode` gives it), its figures and its outcome
        (None: by its score).
        """
        turns = tuple(episode.turns)
        if score is None:
            score = await self.call_scorer("score_episode", turns)
        measured = await self.call_measure(turns)
        outcome = outcome or ("success" if score > self.config.success_threshold else "failure")
        metrics = {
            **measured,
            "mean_return": math.fsum(turn.reward for turn in turns),
            "turns": len(turns),
            **{f"outcome/{name}": float(name == outcome) for name in get_args(Outcome)},
        }
        episode.trajectory = Trajectory(turns=turns, score=score, metrics=metrics, outcome=outcome)
        return episode

    async def _answers(self, item: Any, count: int, temperature: float) -> list[Answer]:
        async def one(number: int) -> Answer:
            with one_rollout(number, 0):
                episode = await self.play(item, temperature)
            answers = [
                place
                for place, message in enumerate(episode.conversation)
                if message["role"] == "assistant"
            ]
            chat = Sample(
                prompt=episode.opening,
                completion=tuple(episode.conversation),
                answers=tuple(answers[: len(episode.turns)]),
                tokens=tuple(token for turn in episode.turns for token in turn.action),
                score=episode.trajectory.score,
            )
            return Answer(trajectory=episode.trajectory, chat=chat)

        # All of them are waited for, also where one fails: what is tried again leaves no episode
        # behind.
        tasks = [asyncio.ensure_future(one(number)) for number in range(count)]
        await asyncio.gather(*tasks, return_exceptions=True)
        return [task.result() for task in tasks]
