"""What earlier runs on this machine took: the best ground for an estimate.

Owns: which runs count (same model, environment, engine), their seconds in a step and around all
steps.
Never: reckons with a run of another machine's home.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from halteres.agent.starting.estimate_range import Span, quantiles
from halteres.errors import NotFound
from halteres.observe.metrics import Row
from halteres.runs.directory import RunDirectory, list_runs
from halteres.runs.starting.preflight import Ground, Plan
from halteres.runs.starting.workload import Workload, workload_of
from halteres.runs.state import RunState

MOST_RUNS, LOOKED_AT = 5, 50
FEWEST_STEPS = 2
"""Beside the first, which waits for processes to start and shares the engine with the first evaluation."""

OUTSIDE = (0.8, 1.35)
"""How far outside of what was measured the next run may lie: other load, other lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precedents:
    """Earlier runs, scaled to the one that is planned."""

    run_ids: tuple[str, ...]
    step_s: Span  # of one step
    pace_s: Span  # of one step in the mean over many
    around_s: Span  # from the start to the end, without the steps

    @property
    def source(self) -> str:
        """In words."""
        count = len(self.run_ids)
        return f"{count} earlier run{'s' if count > 1 else ''} here ({', '.join(self.run_ids[:3])})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Past:
    """One earlier run."""

    run_id: str
    step_s: list[float]  # as they would be in the planned run
    around_s: float | None  # None: it has not ended by itself


def precedents(plan: Plan, ground: Ground) -> Precedents | None:
    """Runs that tell how long this one will take; None where there are none."""
    found = list(islice(_fitting(plan, ground), MOST_RUNS))
    if not found:
        return None
    steps = [seconds for past in found for seconds in past.step_s]
    means, middle = [sum(past.step_s) / len(past.step_s) for past in found], quantiles(steps, 0.25, 0.75)
    around = [past.around_s for past in found if past.around_s is not None]
    return Precedents(
        run_ids=tuple(past.run_id for past in found),
        step_s=quantiles(steps, 0.05, 0.95).wider(*OUTSIDE),
        pace_s=Span(min(middle.low, *means), max(middle.high, *means)).wider(*OUTSIDE),
        around_s=quantiles(around, 0.0, 1.0).wider(*OUTSIDE) if around else Span(5, 60),
    )


def _fitting(plan: Plan, ground: Ground) -> Iterator[_Past]:
    for run in islice(list_runs(), LOOKED_AT):
        try:
            state = run.state()
            if _is_like(run, state, plan, ground) and (past := _past(run, state, plan.demands)) is not None:
                yield past
        except (NotFound, OSError, ValueError):
            continue  # removed while we looked, or not to be read any more


def _is_like(run: RunDirectory, state: RunState, plan: Plan, ground: Ground) -> bool:
    if (state.base_model, state.environment_file) != (ground.model.name, str(ground.environment.path)):
        return False
    if state.program.variant_setting != ground.environment.variant_setting:
        return False
    before, now = run.settings().inference, plan.settings.inference
    same_engine = (before.engine, before.threads) == (now.engine, now.threads)
    return same_engine and state.service_given == (plan.service_url is not None)


def _past(run: RunDirectory, state: RunState, work: Workload) -> _Past | None:
    began = int((state.resume_point or {}).get("step", 0))
    rows = [row for row in run.metrics() if _is_step(row) and row["step"] > began]
    if len(rows) < 1 + FEWEST_STEPS:
        return None
    before = workload_of(run.settings())
    longer = work.answer_tokens / before.answer_tokens  # a higher limit need not mean longer answers, a lower one may
    scaled = [row["time/step"] * work.batch_size / before.batch_size * min(1.0, longer) for row in rows[1:]]
    if longer > 1:
        scaled += [seconds * longer for seconds in scaled]
    around = None
    if state.status == "completed" and state.ended_at is not None:
        around = max(0.0, state.ended_at - state.created_at - sum(row["time/step"] for row in rows[1:]))
    return _Past(run_id=run.run_id, step_s=scaled, around_s=around)


def _is_step(row: Row) -> bool:
    return row.get("src") == "trainer" and isinstance(row.get("time/step"), (int, float))
