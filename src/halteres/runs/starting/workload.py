"""How much a run asks of its engine, read off its settings.

Owns: the nouns by which memory and time are reckoned, and what stands for a setting that an environment does not have.
Never: reckons either (`footprint`, `agent.starting.estimates`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halteres.config.settings import Settings

WORKERS_PER_NODE = 8
"""Groups under way at once where neither field says: atroposlib's default, and ours."""

ANSWER_TOKENS = 512
"""Tokens of an answer where the environment sets no limit of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One run's demands."""

    rank: int
    group_size: int
    batch_size: int  # sequences of one optimiser step
    rows: int  # sequences that may be decoded at once
    positions: int  # tokens of the longest sequence, prompt and answer
    answer_tokens: int  # the most that one answer may have
    steps: int
    eval_every: int = 0  # 0: only first and last
    eval_sequences: int = 0  # answers of one evaluation
    cache_gb: float | None = None  # for keys and values; None: by what is free
    weight_bytes: int = 4  # of one number of the base model
    samplers: int = 0  # engines beside the one that trains

    def evaluations(self, done: int = 0) -> int:
        """Evaluations between the first and the last one, after step `done`."""
        every = self.eval_every
        return max(0, (self.steps - 1) // every - done // every) if every else 0


def workload_of(settings: Settings) -> Workload:
    """The demands of a run with these settings."""
    env = settings.env
    longest = _number(env, "max_token_length", settings.trainer.max_token_trainer_length)
    group = _number(env, "group_size", 1)
    return Workload(
        rank=settings.trainer.lora_rank,
        group_size=group,
        batch_size=_number(env, "batch_size", group),
        rows=group * _number(env, "max_num_workers", _number(env, "max_num_workers_per_node", WORKERS_PER_NODE)),
        positions=longest,
        answer_tokens=min(_number(env, "max_new_tokens", ANSWER_TOKENS), longest),
        steps=settings.trainer.total_steps,
        eval_every=settings.trainer.eval_every,
        eval_sequences=_number(env, "eval_tasks", 0) * (_number(env, "eval_samples", 0) + 1),  # and one greedy
        cache_gb=settings.inference.cache_gb,
        weight_bytes=2 if settings.inference.dtype == "bfloat16" else 4,
        samplers=settings.inference.samplers,
    )


def _number(env: Mapping[str, Any], name: str, default: int) -> int:
    """A positive number of the environment's; what says "no limit" (0, -1, null) or is no number is the default."""
    value = env.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default
