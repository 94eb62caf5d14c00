"""One prompt, one answer, one score: the short way to an environment.

Owns: a group sampled in one request, its scoring, evaluation on held-out items.
Never: more than one turn (`BaseEnv.collect_trajectory` is for that).
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from halteres.environments.base import Backlog, BaseEnv, NoEvaluation
from halteres.environments.evaluating import Answer, Evaluation, evaluate_items
from halteres.environments.scored import ScoredDataGroup, finite, group_of, item_of
from halteres.errors import EnvironmentFailed, InvalidConfig, boundary
from halteres.rollouts.draws import one_rollout
from halteres.rollouts.groups import complete, settle
from halteres.text import Message
from halteres.types import FailedRollout, Trajectory, Turn


class SingleTurnEnv(BaseEnv):
    """Write `get_next_item`, `prompt` and `score`; `eval_items` for evaluation, `measure` for further metrics."""

    def prompt(self, item: Any) -> str | Sequence[Message]:
        """The user's message, or whole messages (then without the config's system prompt)."""
        raise NotImplementedError(f"{type(self).__name__} needs prompt.")

    def score(self, item: Any, text: str) -> float | Awaitable[float]:
        """The reward of an answer; above 0 counts as success."""
        raise NotImplementedError(f"{type(self).__name__} needs score.")

    def measure(self, item: Any, text: str) -> Mapping[str, float]:
        """Further metrics of an answer; their means appear as train/… and eval/…"""
        return {}

    def eval_items(self) -> Sequence[Any]:
        """The held-out items of an evaluation, `eval_tasks` of them, the same every time."""
        raise NoEvaluation(
            f"{self.title} cannot be evaluated.",
            "Its class has no eval_items.",
            "Write it, and held-out figures are told.",
        )

    async def collect_trajectories(self, item: Any) -> tuple[ScoredDataGroup | list[ScoredDataGroup] | None, Backlog]:
        """The whole group in one request; answers whose scoring failed are sampled anew, `rollout_retries` times."""
        messages = self.messages(item)

        async def attempt(wanted: int, number: int) -> list[Trajectory | FailedRollout]:
            with one_rollout(0, number):
                turns = await self.server.chat(messages, wanted)
            return [await settle(self._scored(item, turn)) for turn in turns]

        members = await complete(self.config.group_size, attempt, self.config.rollout_retries)
        items = [item_of(rollout, messages=_with_answer(messages, rollout)) for rollout in members.rollouts]
        return group_of(items, members.failures), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, float]:
        """Each held-out item once greedily and `eval_samples` times at temperature 1."""
        with boundary(EnvironmentFailed, f"{self.title}.eval_items"):
            items = self.eval_items()
        if not items:
            raise InvalidConfig(f"{self.title} has no held-out tasks.", "eval_items gave none.")
        started = time.time()
        evaluation = await evaluate_items(items, self._answers, self.config)
        await self._log(evaluation, started)
        return evaluation.metrics

    def messages(self, item: Any) -> list[dict[str, Any]]:
        """The chat that is sent for an item."""
        with boundary(EnvironmentFailed, f"{self.title}.prompt"):
            prompt = self.prompt(item)
        if not isinstance(prompt, str):
            return [dict(message) for message in prompt]
        system = self.config.system_prompt
        first = [] if system is None else [{"role": "system", "content": system}]
        return [*first, {"role": "user", "content": prompt}]

    async def _log(self, evaluation: Evaluation, started: float) -> None:
        await self.evaluate_log(
            evaluation.metrics,
            start_time=started,
            end_time=time.time(),
            generation_parameters={"temperature": [0.0, 1.0], "max_new_tokens": self.config.max_new_tokens},
            samples=evaluation.samples,
        )

    async def _answers(self, item: Any, count: int, temperature: float) -> list[Answer]:
        messages = self.messages(item)
        turns = await self.server.chat(messages, count, temperature=temperature)
        return [await self._answer(item, messages, turn) for turn in turns]

    async def _answer(self, item: Any, messages: list[dict[str, Any]], turn: Turn) -> Answer:
        return Answer(
            prompt=str(messages[-1]["content"]),
            completion=turn.text,
            score=await self._score(item, turn.text),
            num_tokens=len(turn.action),
            stop_reason=turn.stop_reason,
            version=turn.version_max,
            metrics=self._measure(item, turn.text),
        )

    async def _scored(self, item: Any, turn: Turn) -> Trajectory:
        score = await self._score(item, turn.text)
        return Trajectory(turns=(turn,), score=score, metrics=self._measure(item, turn.text))

    async def _score(self, item: Any, text: str) -> float:
        where = f"{self.title}.score"
        with boundary(EnvironmentFailed, where):
            score = self.score(item, text)
            value = await score if inspect.isawaitable(score) else score
        return finite(value, where)

    def _measure(self, item: Any, text: str) -> Mapping[str, float]:
        with boundary(EnvironmentFailed, f"{self.title}.measure"):
            return self.measure(item, text)


def _with_answer(messages: list[dict[str, Any]], rollout: Trajectory) -> list[dict[str, Any]]:
    return [*messages, {"role": "assistant", "content": rollout.turns[-1].text}]
