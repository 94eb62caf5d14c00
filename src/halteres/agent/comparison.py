"""The tool that puts runs side by side: rl_compare_runs.

It shows the settings in which they differ, and which run is the best by one metric, if that is more
than chance.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from halteres.agent.answer_text import nonempty
from halteres.agent.tool import READS, Caller, Facts, Result, ShortNames, chosen_run, tool
from halteres.config.settings import Settings
from halteres.errors import HalteresError
from halteres.next_step import NextStep
from halteres.observe.metrics import series
from halteres.runs.directory import RunDirectory, RunNotFound
from halteres.runs.reading.evaluations import (
    CONFIDENCE,
    CORRECT,
    Difference,
    Outcome,
    comparison_of,
    differences,
)
from halteres.runs.reading.report import RunReport, report_of
from halteres.runs.reading.result_metrics import Choice, choose, lower_is_better, tells_better
from halteres.runs.reading.status_figures import OF_ALL_ROLLOUTS, REWARD
from halteres.runs.state import RunState, RunUnreadable
from halteres.short_texts import rounded, size_of

_NO_SETTING = (
    *(
        "run.name",
        "run.tags",
        "run.sinks",
        "run.wandb_project",
        "run.wandb_entity",
        "env.use_wandb",
    ),
    *("inference.url", "inference.threads", "inference.cache_gb", "inference.samplers"),
    *("inference.trainer_ranks", "inference.shard"),
)
"""Fields that do not change what is learnt."""

# characters of JSON that an answer takes; of settings that do not fit there is the name alone
ROOM = 2350
MOST_NAMES, FOR_NAMES = 8, 280  # how many there are by name alone; characters kept free for them
LAST_STEPS = 10
"""A training metric counts by its mean over so many, or a fifth of the run: a single step is mostly
noise.
"""

MOST_METRICS = 4
UNDECIDED = "none of these metrics says which run is better: reward/* and eval/* do"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One of the runs that are compared."""

    report: RunReport
    settings: Settings | None  # None: they cannot be read

    @classmethod
    def of(cls, run: RunDirectory) -> ComparedRun:
        """Read it; one that is half a directory, or another version's, has figures all the same."""
        settings = None
        with contextlib.suppress(RunUnreadable):
            settings = run.settings()
        return cls(report=report_of(run), settings=settings)

    @property
    def state(self) -> RunState:
        """As the report has it."""
        return self.report.state

    @property
    def outcome(self) -> Outcome:
        """As the report has it."""
        return self.report.outcome

    def value(self, metric: str) -> float | None:
        """The last evaluation's figure; of a training metric the mean of the last steps."""
        points = series(self.outcome.rows, metric)
        if not points:
            return None
        last = 1
        if not metric.startswith("eval/"):
            last = max(1, min(LAST_STEPS, len(points) // 5))
        return fmean(value for _, value in points[-last:])

    def difference(self, other: ComparedRun, metric: str, confidence: float) -> Difference:
        """How much better this run is; by their last evaluations where the metric is of those."""
        before, after = other.outcome.evaluations, self.outcome.evaluations
        both = metric.startswith("eval/") and before and after
        found = None
        if both:
            found = differences(before[-1], after[-1], confidence).get(metric)
        return found or Difference(delta=(self.value(metric) or 0.0) - (other.value(metric) or 0.0))


class Best(Facts):
    """The best run, and what makes it so."""

    metric: str
    run_id: str
    why: str
    certain: bool


class Comparison(Result):
    """Runs side by side."""

    runs: list[dict[str, Any]]  # a run that was not found has `error`
    settings_that_differ: dict[str, dict[str, Any]]  # field -> run id -> value
    more_settings_that_differ: list[str] = []  # names, where the values have no room
    environment: str = ""  # of all runs; where they differ it stands with each run
    best: Best | None = None
    plot: str | None = None  # path of the PNG
    notes: list[str] = []


@tool(title="Compare runs", hints=READS)
def rl_compare_runs(
    caller: Caller,
    run_ids: Annotated[list[str], Field(min_length=1, max_length=8, description="ids or names")],
    metrics: Annotated[
        list[str] | None,
        ShortNames,
        Field(
            max_length=32,
            description=(
                "the first of reward/* and eval/* decides; default: held-out share correct, reward"
            ),
        ),
    ] = None,
    plot: Annotated[bool, Field(description="show the curves as a picture too")] = True,
) -> Comparison:
    """Compare runs: figures side by side, the settings that differ, which is best and whether that
    is certain.

    Evaluations are compared task by task (95 % interval); training metrics are means of the last
    steps, 10 at most.
    """
    found, missing = _found(run_ids)
    runs = [ComparedRun.of(run) for run in found]
    choice = Choice(names=(CORRECT, _reward_of(runs)))
    if metrics:
        choice = choose(
            metrics,
            {name for run in runs for row in run.outcome.rows for name in row},
            MOST_METRICS,
        )
    deciding = [name for name in choice.names if tells_better(name, chosen=metrics or ())]
    by_metric = filter(None, (_best(runs, name) for name in deciding))
    best, why = next(by_metric, (runs[0], None))
    environments = sorted({run.state.environment for run in runs})
    mixed = len(environments) > 1
    notes = list(choice.notes)
    if not deciding:
        notes.append(UNDECIDED)
    notes += _doubts(runs, environments)
    shown: dict[str, Any] = {}
    if not mixed:
        shown["environment"] = environments[0]
    picture = None
    if plot:
        picture = _picture(runs, choice.names, notes)
        shown["plot"] = picture and str(picture)
    following = NextStep.of("rl_get_results", best.state.run_id)
    going_on = [run.state.run_id for run in runs if not run.state.terminal]
    if going_on:
        following = NextStep.of("rl_check_status", going_on[0], wait_s=45, until="terminal")
    answer = Comparison(
        **shown,
        runs=[*(_row(run, choice.names, mixed) for run in runs), *missing],
        settings_that_differ={},
        best=why,
        **nonempty(notes=notes),
        next=following,
    )
    rest = answer.model_dump(mode="json", exclude_unset=True, exclude={"settings_that_differ"})
    answer.settings_that_differ, more = _settings_that_differ(runs, ROOM - size_of(rest))
    if more:
        answer.more_settings_that_differ = more
    if picture:
        return answer.showing(picture)
    return answer


def _reward_of(runs: Sequence[ComparedRun]) -> str:
    """The training metric that compares these runs: the mean score of all rollouts where every run
    has it and a batch's mean reward differs, which leaves out groups whose answers are all alike.
    """
    scores = [run.value(OF_ALL_ROLLOUTS) for run in runs]
    rewards = [run.value(REWARD) for run in runs]
    if None in scores or scores == rewards:
        return REWARD
    return OF_ALL_ROLLOUTS


def _found(run_ids: Sequence[str]) -> tuple[list[RunDirectory], list[dict[str, Any]]]:
    """The runs, each once; rows for those that are not there. Where none is there, that is the
    answer.
    """
    runs: dict[str, RunDirectory] = {}
    missing: list[dict[str, Any]] = []
    for run_id in run_ids:
        try:
            run = chosen_run(run_id)
            runs[run.run_id] = run
        except RunNotFound as error:
            if len(missing) + 1 == len(run_ids):
                raise
            guesses = {
                name: error.details[name]
                for name in ("did_you_mean", "allowed")
                if error.details.get(name)
            }
            missing.append({"run_id": run_id, "error": f"{error.what} {error.why}", **guesses})
    return [*runs.values()], missing


def _best(runs: Sequence[ComparedRun], metric: str) -> tuple[ComparedRun, Best] | None:
    """The best by this metric, with how it stands to the one that comes closest; None where fewer
    than two have it, or what they were trained for differs.

    `certain` wants an interval without zero to every other run: paired by held-out task where both
    were asked the same, else from the standard errors; and that all have ended. The best was chosen
    among several, so the chance of error is divided by the number of the others. Training metrics
    are never certain: every step has other tasks. Nor is it known what another seed of the same
    settings would have given.
    """
    known = [run for run in runs if run.value(metric) is not None]
    if len(known) < 2 or len({run.state.environment for run in known}) > 1:
        return None
    best, *others = sorted(
        known, key=lambda run: run.value(metric) or 0.0, reverse=not lower_is_better(metric)
    )
    confidence = 1 - (1 - CONFIDENCE) / len(others)
    closest, *further = [best.difference(other, metric, confidence) for other in others]
    why = "level with"
    if closest.delta:
        why = f"{closest.delta:+.4g} against"
    why += f" {others[0].state.run_id}"
    if closest.interval:
        low, high = closest.interval
        tasks = ", unpaired"
        if closest.method == "paired":
            tasks = f", paired over {closest.num_tasks} tasks"
        why += f", {100 * confidence:.3g} % interval {low:+.3f} to {high:+.3f}{tasks}"
    elif not metric.startswith("eval/"):
        why += ", means of the last steps: no test, every step has other tasks"
    if not closest.certain:
        why += "; more held-out tasks, or other seeds, would tell"
    certain = all(one.certain for one in (closest, *further)) and all(
        run.state.terminal for run in known
    )
    return best, Best(metric=metric, run_id=best.state.run_id, why=why, certain=certain)


def _row(run: ComparedRun, names: Sequence[str], mixed: bool) -> dict[str, Any]:
    state = run.state
    row: dict[str, Any] = {"run_id": state.run_id, **nonempty(name=state.own_name)}
    if mixed:
        row["environment"] = state.environment
    row |= {"status": state.status, "step": run.report.step}
    if state.status != "completed":
        row["total_steps"] = state.total_steps
    row["minutes"] = run.report.minutes
    return row | {name: _figure(run, name) for name in names}


def _figure(run: ComparedRun, name: str) -> Any:
    """A training metric is a number; an evaluation's is last, best where that was another step,
    gain, its interval.
    """
    value, gain = run.value(name), run.outcome.gains.get(name)
    if value is None or not name.startswith("eval/"):
        return rounded(value)
    choose_best = max
    if lower_is_better(name):
        choose_best = min
    step, best = choose_best(reversed(series(run.outcome.rows, name)), key=lambda point: point[1])
    figure: dict[str, Any] = {"last": rounded(value)}
    if best != value:
        figure |= {"best": rounded(best), "best_step": step}
    if gain:
        interval = None
        if gain.interval:
            interval = [round(bound, 3) + 0.0 for bound in gain.interval]
        figure |= {"gain": rounded(gain.delta), "ci95": interval}
    return figure


def _doubts(runs: Sequence[ComparedRun], environments: Sequence[str]) -> Iterator[str]:
    for run in runs:
        if not run.outcome.evaluations:
            yield f"{run.state.run_id} has no evaluation"
        if not run.settings:
            yield f"{run.state.run_id} has no readable settings"
    for run in runs:
        if run.report.is_unevaluated:
            last = run.outcome.evaluations[-1].step
            yield (
                f"the last evaluation of {run.state.run_id} is of step {last}; its weights are of "
                f"step {run.report.weights_step}"
            )
        if not run.state.terminal:
            found = run.outcome.evaluations
            newest = "it has not been evaluated"
            if found:
                newest = f"its last evaluation is of step {found[-1].step}"
            yield f"{run.state.run_id} goes on; {newest}"
    if len(environments) > 1:
        yield f"environments differ ({', '.join(environments)}): which run is best cannot be said"


def _picture(runs: Sequence[ComparedRun], names: Sequence[str], notes: list[str]) -> Path | None:
    curves = {
        f"{run.state.run_id} {run.state.own_name or ''}".strip(): run.outcome.rows
        for run in runs
        if run.outcome.rows
    }
    drawn = [name for name in names if any(series(rows, name) for rows in curves.values())]
    if not drawn:
        return None
    try:
        return comparison_of(curves, drawn)
    except HalteresError as error:  # the figures are not lost for want of a picture
        notes.append(error.sentence)
        return None


def _settings_that_differ(
    runs: Sequence[ComparedRun], room: int
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Field to run to value, as many as fit into so many characters of JSON; some others by name.

    Where one run has a field and another has not (they are of different environments), the missing
    value is null.
    """
    flat: dict[str, dict[str, Any]] = {}
    for run in runs:
        if run.settings:
            sections = run.settings.model_dump(mode="json")
            names = [
                (section, name)
                for section in ("trainer", "inference", "env", "run")
                for name in sections[section]
            ]
            flat[run.state.run_id] = {
                f"{section}.{name}": sections[section][name] for section, name in names
            }
    differing: dict[str, dict[str, Any]] = {}
    for field in dict.fromkeys(
        field for settings in flat.values() for field in settings if field not in _NO_SETTING
    ):
        values = {run_id: settings.get(field) for run_id, settings in flat.items()}
        if len({json.dumps(value, sort_keys=True) for value in values.values()}) > 1:
            differing[field] = values
    if size_of(differing) <= room:
        return differing, []
    shown: dict[str, dict[str, Any]] = {}
    for field, values in differing.items():
        if size_of({**shown, field: values}) <= room - FOR_NAMES:
            shown[field] = values
    more = [field for field in differing if field not in shown]
    beyond = []
    if len(more) > MOST_NAMES:
        beyond = [f"and {len(more) - MOST_NAMES} more"]
    return shown, more[:MOST_NAMES] + beyond
