"""Held-out tasks as the first and the last evaluated policy answered them.

Owns: the noun `Compared`, which evaluations are compared, which tasks come first.
Never: scores an answer; shows one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halteres.observe.metrics import Row, read_rows
from halteres.runs.directory import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One held-out task, answered before and after."""

    prompt: Any  # text, or chat messages
    before: str
    before_score: float  # in the environment's own units
    after: str
    after_score: float
    success_threshold: float = 0.0  # a score above it is a success

    @property
    def learnt(self) -> bool:
        """Whether it was wrong before and right after."""
        return self.after_score > self.success_threshold >= self.before_score

    @property
    def facts(self) -> dict[str, Any]:
        """As results.json has it."""
        return {
            "prompt": self.prompt,
            "before": {"completion": self.before, "score": self.before_score},
            "after": {"completion": self.after, "score": self.after_score},
        }


def before_and_after(run: RunDirectory) -> list[Compared]:
    """Tasks that the first and the last evaluation with answers share, those first that gained most."""
    files = sorted((run.path / "evals").glob("step_*/samples.jsonl"), key=_step_of)
    if len(files) < 2:
        return []
    before, after, threshold = _by_prompt(files[0]), _by_prompt(files[-1]), run.success_threshold
    shared = [
        Compared(
            prompt=last.get("prompt"),
            before=str(before[prompt].get("completion", "")),
            before_score=_score(before[prompt]),
            after=str(last.get("completion", "")),
            after_score=_score(last),
            success_threshold=threshold,
        )
        for prompt, last in after.items()
        if prompt in before
    ]
    return sorted(shared, key=lambda task: task.before_score - task.after_score)


def _step_of(samples: Path) -> int:
    digits = samples.parent.name.removeprefix("step_")
    return int(digits) if digits.isdecimal() else -1


def _by_prompt(file: Path) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for row in read_rows(file):
        found.setdefault(json.dumps([row.get("prompt"), row.get("task")]), row)
    return found


def _score(sample: Row) -> float:
    score = sample.get("score")
    return float(score) if isinstance(score, (int, float)) else 0.0
