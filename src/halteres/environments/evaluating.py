"""Evaluation on held-out tasks: greedy and at temperature 1, and the files that tell of it.

Owns: what is counted, the metric names, the evaluation's files, the seeds of its samples (the same for every run).
Never: changes the policy, draws tasks, drops a failed task without saying so.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import pstdev
from typing import Any

import yaml

from halteres.environments.config import BaseEnvConfig
from halteres.environments.scoring import HeldOutScoring
from halteres.errors import EnvironmentFailed
from halteres.rewards.components import DISAGREEMENT, QUANTILE
from halteres.rewards.functions import Sample
from halteres.rewards.panel import PANEL, PROXY
from halteres.rollouts.groups import settle
from halteres.rollouts.rng import Draw, rolling_out
from halteres.types import FailedRollout, Outcome

log = logging.getLogger(__name__)

GREEDY, SAMPLED = 0.0, 1.0  # temperatures


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer to a held-out task."""

    prompt: str  # the last message before the policy's first
    completion: str  # ... and all that follows it
    score: float  # reward units
    num_tokens: int
    stop_reason: str
    version: int  # of the policy; below 0 if unknown
    outcome: Outcome | None = None  # of an episode
    metrics: Mapping[str, float] = field(default_factory=dict)
    sample: Sample | None = None  # what the config's `rewards` and `panel` look at


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """All answers to one held-out task."""

    item: Any
    greedy: Answer
    sampled: tuple[Answer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an evaluation found: metrics, and every answer (of each task the greedy one first)."""

    metrics: Mapping[str, float]
    samples: tuple[Mapping[str, Any], ...]


AnswersOf = Callable[[Any, int, float], Awaitable[list[Answer]]]
"""(item, how many, temperature) -> answers."""


async def evaluate_items(
    items: Sequence[Any], answers_of: AnswersOf, config: BaseEnvConfig, scoring: HeldOutScoring | None = None
) -> Evaluation:
    """Answer every item, `max_eval_workers` at once; failed tasks are repeated, then counted and left out.

    Args:
        scoring: what the answers at temperature 1 are scored by beside the environment.

    Raises:
        EnvironmentFailed: every task failed; the text holds the last failure.
    """
    workers = asyncio.Semaphore(config.max_eval_workers)

    async def one(number: int, item: Any) -> _Task | FailedRollout:
        outcome: _Task | FailedRollout = FailedRollout(code="cancelled", why="never tried")
        async with workers:
            for _ in range(config.rollout_retries + 1):
                with rolling_out(Draw(seed=0, step=0, ordinal=number, split="eval")):
                    outcome = await settle(_answer_task(item, answers_of, config.num_eval_samples))
                if isinstance(outcome, _Task):
                    break
            if scoring is not None and isinstance(outcome, _Task):
                outcome = replace(outcome, sampled=await _also_scored(outcome, scoring))
        return outcome

    outcomes = await asyncio.gather(*(one(number, item) for number, item in enumerate(items)))
    tasks = [outcome for outcome in outcomes if isinstance(outcome, _Task)]
    failed = [outcome for outcome in outcomes if isinstance(outcome, FailedRollout)]
    for failure in failed:
        log.warning("A held-out task failed (%s): %s", failure.code, failure.why)
    if not tasks:
        raise EnvironmentFailed(f"All {len(failed)} held-out tasks failed.", f"Last failure: {failed[-1].why}")
    return Evaluation(metrics=_metrics(tasks, len(failed), config), samples=tuple(_samples(tasks)))


async def _answer_task(item: Any, answers_of: AnswersOf, num_samples: int) -> _Task:
    greedy = await answers_of(item, 1, GREEDY)
    return _Task(item=item, greedy=greedy[0], sampled=tuple(await answers_of(item, num_samples, SAMPLED)))


async def _also_scored(task: _Task, scoring: HeldOutScoring) -> tuple[Answer, ...]:
    samples = [answer.sample for answer in task.sampled if answer.sample is not None]
    if len(samples) < len(task.sampled):
        return task.sampled
    more = await scoring.score(task.item, samples)
    return tuple(
        replace(answer, metrics={**answer.metrics, **metrics})
        for answer, metrics in zip(task.sampled, more, strict=True)
    )


def _metrics(tasks: Sequence[_Task], num_failed: int, config: BaseEnvConfig) -> dict[str, float]:
    least = config.success_threshold
    sampled = [answer for task in tasks for answer in task.sampled]
    versions = [answer.version for answer in sampled if answer.version >= 0]
    per_task = [_mean([float(answer.score > least) for answer in task.sampled]) for task in tasks]
    metrics: dict[str, float] = {
        "eval/percent_correct": _mean(per_task),
        "eval/percent_correct_greedy": _mean([float(task.greedy.score > least) for task in tasks]),
        "eval/percent_correct_stderr": _standard_error(per_task),
        "eval/mean_score": _mean([answer.score for answer in sampled]),
        "eval/completion_lengths": _mean([float(answer.num_tokens) for answer in sampled]),
        "eval/truncated": _mean([float(answer.stop_reason == "length") for answer in sampled]),
        "eval/num_tasks": len(tasks),
        "eval/num_samples": config.num_eval_samples,
        "eval/num_failed": num_failed,
    }
    for name in dict.fromkeys(name for answer in sampled for name in answer.metrics):
        values = [answer.metrics[name] for answer in sampled if name in answer.metrics]
        metrics[f"eval/{name}"] = _mean(values)
        if name == PROXY or (name.startswith(PANEL) and "/" not in name.removeprefix(PANEL)):
            metrics[f"eval/{name}_std"] = pstdev(values)
        if name.endswith(f"/{DISAGREEMENT}"):
            metrics[f"eval/{name}{QUANTILE}"] = sorted(values)[math.ceil(0.95 * len(values)) - 1]
    if config.eval_best_of > 1:
        metrics |= _best_of(tasks, config.eval_best_of, least)
    if versions:
        metrics["eval/policy_version"] = max(versions)
    return metrics


def _best_of(tasks: Sequence[_Task], count: int, least: float) -> dict[str, float]:
    """The environment's own score of the answer that the rewards like best among so many, mean over tasks."""
    best = [
        max(task.sampled[:count], key=lambda answer: answer.metrics[PROXY]).score
        for task in tasks
        if all(PROXY in answer.metrics for answer in task.sampled[:count])
    ]
    if not best:
        return {}
    return {
        f"eval/best_of_{count}": _mean(best),
        f"eval/percent_correct_best_of_{count}": _mean([float(score > least) for score in best]),
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _standard_error(values: Sequence[float]) -> float:
    """Of the mean over tasks; 0 for a single one."""
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def _samples(tasks: Sequence[_Task]) -> Iterator[dict[str, Any]]:
    """Every answer. Different tasks that are asked in the same words, as games are, have a `task`: 1, 2, …"""
    asked: defaultdict[str, list[str]] = defaultdict(list)
    for task in tasks:
        alike, item = asked[task.greedy.prompt], repr(task.item)
        if item not in alike:
            alike.append(item)
        number = {"task": alike.index(item)} if alike[0] != item else {}
        yield {**_sample(task.greedy, GREEDY), **number}
        yield from ({**_sample(answer, SAMPLED), **number} for answer in task.sampled)


def _sample(answer: Answer, temperature: float) -> dict[str, Any]:
    return {
        "prompt": answer.prompt,
        "completion": answer.completion,
        "score": answer.score,
        "temperature": temperature,
        "tokens": answer.num_tokens,
        "finish": answer.stop_reason,
        **({} if answer.outcome is None else {"outcome": answer.outcome}),
    }


def write_evaluation(
    folder: Path,
    *,
    task: str,
    model: str,
    seconds: float | None,
    generation_parameters: Mapping[str, Any],
    config: Mapping[str, Any],
    metrics: Mapping[str, float],
    samples: Sequence[Mapping[str, Any]],
) -> None:
    """Write evaluate_config.yaml, samples.jsonl and, last, metrics.json, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    report = {
        "config_general": {
            "model_name": model,
            "total_evaluation_time_seconds": seconds,
            "generation_parameters": dict(generation_parameters),
        },
        "results": {f"atropos|{task}|0": dict(metrics), "all": dict(metrics)},
    }
    _write(folder / "evaluate_config.yaml", yaml.safe_dump(dict(config), sort_keys=False))
    _write(folder / "samples.jsonl", "".join(json.dumps(dict(sample)) + "\n" for sample in samples))
    _write(folder / "metrics.json", json.dumps(report, indent=2) + "\n")


def _write(file: Path, text: str) -> None:
    unfinished = file.with_name(file.name + ".tmp")
    unfinished.write_text(text)
    unfinished.replace(file)
