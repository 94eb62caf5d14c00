"""Evaluation on held-out tasks: greedy and at temperature 1, its metrics and its files.

The seeds of its samples are the same for every run. A failed task is repeated, then counted and
left out.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from halteres.environments.config import BaseEnvConfig
from halteres.environments.scoring import held_out_metrics
from halteres.errors import EnvironmentFailed
from halteres.rewards.components import DISAGREEMENT, QUANTILE
from halteres.rewards.functions import Sample
from halteres.rewards.panel import PANEL, PROXY
from halteres.rewards.reward_list import RewardList
from halteres.rollouts.groups import settle
from halteres.rollouts.rng import Draw, rolling_out
from halteres.tokenizer import text_of
from halteres.types import FailedRollout, Trajectory

log = logging.getLogger(__name__)

GREEDY, SAMPLED = 0.0, 1.0  # temperatures


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer to a held-out task: what the policy did, and the chat as the config's `rewards`
    and `panel` see it.
    """

    trajectory: Trajectory
    chat: Sample

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(len(turn.action) for turn in self.trajectory.turns)

    def row(self, temperature: float) -> dict[str, Any]:
        """The answer as a line of samples.jsonl; of a conversation, whose words they are, but for
        the first.
        """
        trajectory, prompt = self.trajectory, self.chat.prompt
        first, *others = self.chat.completion
        later = [f"[{one['role']}]\n{text_of(one.get('content'))}" for one in others]
        texts = [text_of(first.get("content")), *later]
        return {
            "prompt": text_of(prompt[-1].get("content")) if prompt else "",
            "completion": "\n\n".join(texts),
            "score": trajectory.score,
            "temperature": temperature,
            "tokens": self.num_tokens,
            "finish": trajectory.turns[-1].stop_reason,
            **({} if trajectory.outcome is None else {"outcome": trajectory.outcome}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """All answers to one held-out task."""

    item: Any
    greedy: Answer
    sampled: tuple[Answer, ...]
    # of each sampled answer: its own, and what rewards and panel gave it
    metrics: list[dict[str, float]]


AnswersOf = Callable[[Any, int, float], Awaitable[list[Answer]]]
"""(item, how many, temperature) -> answers."""


async def evaluate_items(
    items: Sequence[Any],
    answers_of: AnswersOf,
    config: BaseEnvConfig,
    *,
    rewards: RewardList | None = None,
    panel: RewardList | None = None,
    step: int = 0,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Answer every item, `max_eval_workers` at once; the metrics, and every answer (of each task
    the greedy one first).

    Args:
        rewards, panel: what the answers at temperature 1 are scored by beside the environment.
        step: batches delivered.

    Raises:
        EnvironmentFailed: every task failed; the text holds the last failure.
    """
    workers = asyncio.Semaphore(config.max_eval_workers)

    async def answer(item: Any) -> _Task:
        greedy = await answers_of(item, 1, GREEDY)
        sampled = await answers_of(item, config.num_eval_samples, SAMPLED)
        metrics = [dict(answer.trajectory.metrics) for answer in sampled]
        return _Task(item=item, greedy=greedy[0], sampled=tuple(sampled), metrics=metrics)

    async def one(number: int, item: Any) -> _Task | FailedRollout:
        outcome: _Task | FailedRollout = FailedRollout(code="cancelled", why="never tried")
        async with workers:
            for _ in range(config.rollout_retries + 1):
                with rolling_out(Draw(seed=0, step=0, ordinal=number, split="eval")):
                    outcome = await settle(answer(item))
                if isinstance(outcome, _Task):
                    chats = [answer.chat for answer in outcome.sampled]
                    rows = await held_out_metrics(rewards, panel, item, chats, step)
                    for metrics, row in zip(outcome.metrics, rows, strict=True):
                        metrics |= row
                    return outcome
        return outcome

    outcomes = await asyncio.gather(*(one(number, item) for number, item in enumerate(items)))
    tasks = [outcome for outcome in outcomes if isinstance(outcome, _Task)]
    failed = [outcome for outcome in outcomes if isinstance(outcome, FailedRollout)]
    for failure in failed:
        log.warning("A held-out task failed (%s): %s", failure.code, failure.why)
    if not tasks:
        raise EnvironmentFailed(
            f"All {len(failed)} held-out tasks failed.", f"Last failure: {failed[-1].why}"
        )
    samples: list[dict[str, Any]] = []
    items_of: defaultdict[str, list[str]] = defaultdict(list)  # by prompt
    for task in tasks:
        rows = [task.greedy.row(GREEDY), *(answer.row(SAMPLED) for answer in task.sampled)]
        alike, item = items_of[rows[0]["prompt"]], repr(task.item)
        if item not in alike:
            alike.append(item)
        # Different tasks in the same words, as games are, have a `task`: 1, 2, …
        samples += ({**row, "task": alike.index(item)} if alike[0] != item else row for row in rows)
    return _metrics(tasks, len(failed), config), samples


def _metrics(tasks: Sequence[_Task], num_failed: int, config: BaseEnvConfig) -> dict[str, float]:
    least, num = config.success_threshold, len(tasks)
    sampled = [answer for task in tasks for answer in task.sampled]
    versions = [max(turn.version_max for turn in answer.trajectory.turns) for answer in sampled]
    per_task = [
        fmean(float(answer.trajectory.score > least) for answer in task.sampled) for task in tasks
    ]
    mean = fmean(per_task)
    squares = math.fsum((share - mean) ** 2 for share in per_task)
    metrics: dict[str, float] = {
        "eval/percent_correct": mean,
        "eval/percent_correct_greedy": fmean(
            float(task.greedy.trajectory.score > least) for task in tasks
        ),
        "eval/percent_correct_stderr": math.sqrt(squares / max(1, num - 1) / num),
        "eval/mean_score": fmean(answer.trajectory.score for answer in sampled),
        "eval/completion_lengths": fmean(answer.num_tokens for answer in sampled),
        "eval/truncated": fmean(
            float(answer.trajectory.turns[-1].stop_reason == "length") for answer in sampled
        ),
        "eval/num_tasks": num,
        "eval/num_samples": config.num_eval_samples,
        "eval/num_failed": num_failed,
    }
    measured: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in (
        (name, value) for task in tasks for row in task.metrics for name, value in row.items()
    ):
        measured[name].append(value)
    for name, values in measured.items():
        metrics[f"eval/{name}"] = fmean(values)
        if name == PROXY or (name.startswith(PANEL) and "/" not in name.removeprefix(PANEL)):
            metrics[f"eval/{name}_std"] = pstdev(values)
        if name.endswith(f"/{DISAGREEMENT}"):
            metrics[f"eval/{name}{QUANTILE}"] = sorted(values)[math.ceil(0.95 * len(values)) - 1]
    if (count := config.eval_best_of) > 1:
        # The environment's own score of the answer that the rewards like best among so many, mean
        # over tasks.
        best: list[float] = []
        for task in tasks:
            totals = [row[PROXY] for row in task.metrics[:count] if PROXY in row]
            if len(totals) == len(task.metrics[:count]):
                best.append(task.sampled[totals.index(max(totals))].trajectory.score)
        if best:
            metrics[f"eval/best_of_{count}"] = fmean(best)
            metrics[f"eval/percent_correct_best_of_{count}"] = fmean(
                float(score > least) for score in best
            )
    if max(versions) >= 0:
        metrics["eval/policy_version"] = max(versions)
    return metrics
