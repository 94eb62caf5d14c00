"""What one model's test has come to, in figures.

Owns: the nouns `Group` and `Outcome`; the figures of the seeds, and ours.
Never: reads a file (`reading` does), says whether one can train on it (`verdict` does).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from halteres.agent.trial.ending import Ended
from halteres.agent.trial.request import Candidate, Request
from halteres.observe.metrics import Row

DROPPED = frozenset(("too_long", "wrong_size", "same_scores", "nothing_collected"))
"""What `process` records of a group that did not fail and was not kept all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The scored answers to one task."""

    scores: tuple[float, ...]
    prompt: str = ""  # the last message before the answer, where there are messages
    answers: tuple[str, ...] = ()  # one for each score, or none where they are not told
    reference: str = ""  # the right answer, where the item has a field for it

    @property
    def varies(self) -> bool:
        """Whether some answer is better than another: what a group teaches by."""
        return len(set(self.scores)) > 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One model's groups, or its answers to free prompts, and how it ended."""

    candidate: Candidate
    request: Request
    output_file: Path
    log_file: Path
    groups: tuple[Group, ...]
    responses: tuple[Row, ...]  # to free prompts: prompt, completion, score, note
    failures: tuple[Row, ...]  # code, why: attempts that were replaced, groups that were given up
    ended: Ended | None  # None: it goes on

    @cached_property
    def scores(self) -> tuple[float, ...]:
        """All that were given."""
        if self.request.prompts:
            return tuple(row["score"] for row in self.responses if isinstance(row.get("score"), int | float))
        return tuple(score for group in self.groups for score in group.scores)

    @property
    def completions(self) -> int:
        """Answers of groups that were kept, or to free prompts."""
        return len(self.responses) if self.request.prompts else len(self.scores)

    def correct(self, scores: Sequence[float]) -> int:
        """How many of these count as success."""
        return sum(score > self.request.success_above for score in scores)

    @property
    def varied(self) -> float | None:
        """The share of groups that teach something."""
        return sum(group.varies for group in self.groups) / len(self.groups) if self.groups else None

    @property
    def truncated(self) -> float | None:
        """The share of answers that were cut off."""
        traffic = self.ended.traffic if self.ended else None
        return traffic.truncated / traffic.completions if traffic and traffic.completions else None

    @property
    def scorer_failures(self) -> tuple[Row, ...]:
        """Attempts that the environment's own code failed at."""
        return tuple(row for row in self.failures if row["code"] not in DROPPED | {"sampler_error", "group_failed"})

    def facts(self) -> dict[str, Any]:
        """The seeds' figures of one model, then ours. Ratios to three decimals."""
        one = self.candidate
        steps = [self._step(number, group) for number, group in enumerate(self.groups, 1)]
        with_correct = sum(step["correct"] > 0 for step in steps)
        correct = self.correct(self.scores)
        return {
            "model": one.model,
            "name": one.name,
            "scale": one.scale,
            "wandb_run": one.wandb_run,
            "output_file": str(self.output_file),
            "steps": steps,
            "steps_tested": len(steps),
            "total_completions": self.completions,
            "correct_completions": correct,
            "accuracy": round(correct / len(self.scores), 3) if self.scores else 0,
            "steps_with_correct": with_correct,
            "step_success_rate": round(with_correct / len(steps), 3) if steps else 0,
            **self._further(),
            **self._told(),
        }

    def _further(self) -> dict[str, Any]:
        """What the seeds do not have; what went wrong only where something did."""
        scores, failed = self.scores, len(self.scorer_failures)
        codes = Counter(row["code"] for row in self.failures)
        dropped = sum(codes[name] for name in DROPPED)
        told: dict[str, Any] = {"failures": dict(codes)} if codes else {}
        told |= {"groups_dropped": dropped} if dropped else {}
        if not self.completions:
            return told
        return {
            "mean_score": round(sum(scores) / len(scores), 3) if scores else None,
            "score_range": plain([min(scores), max(scores)]) if scores else None,
            "groups_with_variance": _rounded(self.varied),
            "truncated": _rounded(self.truncated),
            "parse_failures": round(failed / (self.completions + failed), 3),
            **told,
        }

    def _told(self) -> dict[str, Any]:
        """How it ended."""
        if self.ended is None:
            return {}
        speed = self.ended.traffic.tokens_per_s
        told: dict[str, Any] = {"seconds": round(self.ended.seconds, 1)}
        told["tokens_per_s"] = None if speed is None else float(f"{speed:.3g}")
        if self.ended.error:
            told |= {"error": self.ended.error, "why": self.ended.why, "log_file": str(self.log_file)}
            told |= {"stderr": self.ended.stderr, "stdout": self.ended.stdout}
        return told

    def _step(self, number: int, group: Group) -> dict[str, Any]:
        scores = group.scores
        return {"step": number, "completions": len(scores), "correct": self.correct(scores), "scores": plain(scores)}


def plain(scores: Sequence[float]) -> list[float]:
    """As an answer tells them: whole numbers without a point, others with four significant digits."""
    return [int(score) if score == int(score) else float(f"{score:.4g}") for score in scores]


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 3)
