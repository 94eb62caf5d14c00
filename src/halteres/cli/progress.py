"""What a run has reached, read from its directory.

Owns: the few figures a person wants to see while a run goes on.
Never: prints, writes, waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from halteres.observe.metrics import Row, merge_by_step, series
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
    resumed_at: int  # the step that a resumed run began after; 0 for a fresh one
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


def read_progress(run: RunDirectory) -> Progress:
    """Look at the run now."""
    state = run.state()
    rows = merge_by_step(run.metrics())
    times = [value for _, value in series(rows, "time/step")][-8:]
    return Progress(
        status=state.status,
        phase=state.phase,
        step=max((row["step"] for row in rows if "reward/mean" in row), default=0),
        total_steps=state.total_steps or 0,
        resumed_at=int((state.resume_point or {}).get("step", 0)),
        reward=tuple(series(rows, "reward/mean")),
        success=tuple(series(rows, "reward/success")),
        evaluation=tuple(series(rows, "eval/percent_correct")),
        step_s=sorted(times)[len(times) // 2] if times else None,
        alerts=_alerts(run),
        error=state.error,
    )


def _alerts(run: RunDirectory) -> tuple[str, ...]:
    """One sentence for each rule that has spoken: its last evidence, its remedy, how often."""
    by_rule: dict[str, list[Row]] = {}
    for event in run.events():
        if event.get("type") == "alert":
            by_rule.setdefault(str(event.get("rule")), []).append(event)
    return tuple(_alert(rule, events) for rule, events in by_rule.items())


def _alert(rule: str, events: list[Row]) -> str:
    last, times = events[-1], f", {len(events)} times" if len(events) > 1 else ""
    said = " ".join(str(last[key]) for key in ("evidence", "remedy") if last.get(key))
    return f"{rule} (step {last.get('step', 0)}{times}): {said}"
