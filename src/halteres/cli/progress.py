"""What a run has reached, read from its directory.

Owns: the few figures a person wants to see while a run goes on, and the answers to show when it has ended.
Never: prints, writes, waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halteres.observe.metrics import merge_by_step, read_rows, series
from halteres.runs.directory import RunDirectory

Series = tuple[tuple[int, float], ...]
"""(step, value), ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One look at a run."""

    status: str
    phase: str | None
    step: int
    total_steps: int
    reward: Series  # mean over the batch, reward units
    success: Series  # share of rollouts with a positive score
    evaluation: Series  # held-out share correct at temperature 1
    step_s: float | None  # median seconds of the last steps
    alerts: tuple[str, ...]
    error: str | None

    @property
    def remaining_s(self) -> float | None:
        """Seconds left by the last steps' pace, or None before the first."""
        return None if self.step_s is None else self.step_s * max(0, self.total_steps - self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One held-out task as answered before and after training."""

    question: str
    before: str
    after: str


def read_progress(run: RunDirectory) -> Progress:
    """Look at the run now."""
    state = run.state()
    rows = merge_by_step(run.metrics())
    times = [value for _, value in series(rows, "time/step")][-8:]
    alerts = [event for event in run.events() if event.get("type") == "alert"]
    return Progress(
        status=state.status,
        phase=state.phase,
        step=max((row["step"] for row in rows if "reward/mean" in row), default=0),
        total_steps=state.total_steps or 0,
        reward=tuple(series(rows, "reward/mean")),
        success=tuple(series(rows, "reward/success")),
        evaluation=tuple(series(rows, "eval/percent_correct")),
        step_s=sorted(times)[len(times) // 2] if times else None,
        alerts=tuple(f"{alert.get('rule')}: {alert.get('remedy', '')}" for alert in alerts),
        error=state.error,
    )


def before_and_after(run: RunDirectory, count: int = 2) -> tuple[Answer, ...]:
    """Held-out tasks that the last evaluated policy answers and the first did not, with both answers."""
    folders = sorted((run.path / "evals").glob("step_*"), key=lambda folder: int(folder.name.removeprefix("step_")))
    if len(folders) < 2:
        return ()
    first, last = (_by_question(read_rows(folders[position] / "samples.jsonl")) for position in (0, -1))
    learnt = [
        Answer(question=question, before=first[question]["completion"], after=sample["completion"])
        for question, sample in last.items()
        if question in first and sample["score"] > 0 >= first[question]["score"]
    ]
    return tuple(learnt[:count])


def _by_question(samples: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for sample in samples:
        found.setdefault(str(sample["prompt"]), sample)
    return found
