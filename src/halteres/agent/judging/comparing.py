"""The tool that puts runs side by side: rl_compare_runs.

It tells the settings in which they differ, and which run is the best by one metric, if that is more than chance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from halteres.agent.fitting import size_of
from halteres.agent.tool import READS, Caller, Result, ShortNames, chosen_run, tool
from halteres.agent.watching.headline import CORRECT, REWARD, Choice, choose, lower_is_better, rounded, tells_better
from halteres.config.settings import Settings
from halteres.errors import HalteresError
from halteres.next_step import worded
from halteres.observe.metrics import series
from halteres.runs.directory import RunDirectory, RunNotFound
from halteres.runs.reading.evaluations import CONFIDENCE, Difference, differences
from halteres.runs.reading.outcome import Outcome, comparison_of, outcome_of
from halteres.runs.state import RunState, RunUnreadable

_NO_SETTING = (
    *("run.name", "run.tags", "run.sinks", "run.wandb_project", "run.wandb_entity", "env.use_wandb"),
    *("inference.url", "inference.threads", "inference.cache_gb", "inference.samplers"),
)
"""Fields that do not change what is learnt."""

MOST_NAMES, FOR_NAMES = 8, 280
"""How many fields are told by name alone where there is no room for their values; characters kept free for them."""


def settings_that_differ(by_run: Mapping[str, Settings], room: int) -> dict[str, Any]:
    """Field to run to value, as many as fit into so many characters of JSON; some others by name.

    Where one run has a field and another has not (they are of different environments), the missing value is null.
    """
    flat = {run_id: _flat(settings) for run_id, settings in by_run.items()}
    fields = dict.fromkeys(field for settings in flat.values() for field in settings)
    differing = {field: {run_id: settings.get(field) for run_id, settings in flat.items()} for field in fields}
    differing = {field: values for field, values in differing.items() if _num_values(values) > 1}
    if size_of(differing) <= room:
        return {"settings_that_differ": differing}
    told: dict[str, dict[str, Any]] = {}
    for field, values in differing.items():
        if size_of({**told, field: values}) <= room - FOR_NAMES:
            told[field] = values
    more = [field for field in differing if field not in told]
    beyond = [f"and {len(more) - MOST_NAMES} more"] if len(more) > MOST_NAMES else []
    return {"settings_that_differ": told, "more_settings_that_differ": more[:MOST_NAMES] + beyond}


def _num_values(values: Mapping[str, Any]) -> int:
    return len({json.dumps(value, sort_keys=True) for value in values.values()})


def _flat(settings: Settings) -> dict[str, Any]:
    """`section.field` to value: the trainer's first, they matter most."""
    sections = settings.model_dump(mode="json")
    return {
        f"{section}.{name}": value
        for section in ("trainer", "inference", "env", "run")
        for name, value in sections[section].items()
        if f"{section}.{name}" not in _NO_SETTING
    }


LAST_STEPS = 10
"""A training metric counts by its mean over so many, or a fifth of the run: a single step is mostly noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """One of the runs that are compared."""

    state: RunState
    outcome: Outcome
    settings: Settings | None  # None: they cannot be read

    def value(self, metric: str) -> float | None:
        """The last evaluation's figure; of a training metric the mean of the last steps."""
        points = series(self.outcome.rows, metric)
        if not points:
            return None
        last = 1 if metric.startswith("eval/") else max(1, min(LAST_STEPS, len(points) // 5))
        return fmean(value for _, value in points[-last:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The best run, and how it stands to the one that comes closest."""

    metric: str
    best: Entrant
    closest: Entrant
    difference: Difference  # of the best to the closest, upwards
    confidence: float  # of the interval
    certain: bool  # it differs from every other, and all have ended


def verdict(entrants: Sequence[Entrant], metric: str) -> Verdict | None:
    """The best by this metric; None where fewer than two have it, or what they were trained for differs.

    `certain` wants an interval without zero to every other run: paired by held-out task where both were asked the
    same, else from the standard errors. The best was chosen among several, so the chance of error is divided by the
    number of the others. Training metrics are never certain: every step has other tasks. Nor is it known what another
    seed of the same settings would have given.
    """
    known = [entrant for entrant in entrants if entrant.value(metric) is not None]
    if len(known) < 2 or len({entrant.state.environment for entrant in known}) > 1:
        return None
    ordered = sorted(known, key=lambda entrant: entrant.value(metric) or 0.0, reverse=not lower_is_better(metric))
    best, *others = ordered
    confidence = 1 - (1 - CONFIDENCE) / len(others)
    found = [_difference(best, other, metric, confidence) for other in others]
    return Verdict(
        metric=metric,
        best=best,
        closest=others[0],
        difference=found[0],
        confidence=confidence,
        certain=all(difference.certain for difference in found) and all(entrant.state.terminal for entrant in known),
    )


def _difference(best: Entrant, other: Entrant, metric: str, confidence: float) -> Difference:
    ends = (other.outcome.evaluations, best.outcome.evaluations)
    if metric.startswith("eval/") and all(ends):
        found = differences(ends[0][-1], ends[1][-1], confidence).get(metric)
        if found is not None:
            return found
    return Difference(delta=(best.value(metric) or 0.0) - (other.value(metric) or 0.0))


ROOM = 2350
"""Characters of JSON that an answer takes; settings that do not fit are told by name alone."""

MOST_METRICS = 4

UNDECIDED = "none of these metrics says which run is better: reward/* and eval/* do"


class Comparison(Result):
    """Runs side by side."""

    runs: list[dict[str, Any]]  # a run that was not found has `error`
    settings_that_differ: dict[str, dict[str, Any]]  # field -> run id -> value
    environment: str = ""  # of all runs; where they differ it stands with each run
    best: dict[str, Any] | None = None  # metric, run_id, why, certain
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
            description="the first of reward/* and eval/* decides; default: held-out share correct, reward",
        ),
    ] = None,
    plot: Annotated[bool, Field(description="show the curves as a picture too")] = True,
) -> Comparison:
    """Compare runs: figures side by side, the settings that differ, which is best and whether that is certain.

    Evaluations are compared task by task (95 % interval); training metrics are means of the last steps, 10 at most.
    """
    entrants, missing = _found(run_ids)
    choice = _choice(entrants, metrics)
    deciding = [name for name in choice.names if tells_better(name, asked=metrics or ())]
    decided = next((found for name in deciding if (found := verdict(entrants, name))), None)
    environments = sorted({entrant.state.environment for entrant in entrants})
    notes = [*choice.notes, *([] if deciding else [UNDECIDED]), *_doubts(entrants, environments)]
    picture = _picture(entrants, choice.names, notes) if plot else None
    facts: dict[str, Any] = {
        **({"environment": environments[0]} if len(environments) == 1 else {}),
        "runs": [*(_row(entrant, choice.names, len(environments) > 1) for entrant in entrants), *missing],
        "best": _best(decided) if decided else None,
        **({"plot": str(picture) if picture else None} if plot else {}),
        **({"notes": notes} if notes else {}),
        "next": _next(entrants, decided),
    }
    settings = {entrant.state.run_id: entrant.settings for entrant in entrants if entrant.settings}
    answer = Comparison(**facts, **settings_that_differ(settings, ROOM - size_of(facts)))
    return answer.showing(picture) if picture else answer


def _found(run_ids: Sequence[str]) -> tuple[list[Entrant], list[dict[str, Any]]]:
    """The runs, each once; those that are not there, told. Where none is there, that is the answer."""
    runs: dict[str, RunDirectory] = {}
    missing: list[tuple[str, RunNotFound]] = []
    for asked in run_ids:
        try:
            run = chosen_run(asked)
            runs[run.run_id] = run
        except RunNotFound as error:
            missing.append((asked, error))
    if not runs:
        raise missing[0][1]
    guesses = ("did_you_mean", "allowed")
    return [_entrant(run) for run in runs.values()], [
        {
            "run_id": asked,
            "error": f"{error.what} {error.why}",
            **{name: error.details[name] for name in guesses if error.details.get(name)},
        }
        for asked, error in missing
    ]


def _entrant(run: RunDirectory) -> Entrant:
    state = run.state()
    try:
        settings = run.settings()
    except RunUnreadable:  # half a directory, or another version's: its figures can still be told
        settings = None
    return Entrant(state=state, outcome=outcome_of(run, state), settings=settings)


def _choice(entrants: Sequence[Entrant], asked: Sequence[str] | None) -> Choice:
    if not asked:
        return Choice(names=(CORRECT, REWARD))
    choice = choose(asked, {name for entrant in entrants for row in entrant.outcome.rows for name in row})
    beyond = choice.names[MOST_METRICS:]
    notes = [f"{MOST_METRICS} metrics are compared; left out: {', '.join(beyond)}"] if beyond else []
    return Choice(names=choice.names[:MOST_METRICS], notes=(*choice.notes, *notes))


def _row(entrant: Entrant, names: Sequence[str], mixed: bool) -> dict[str, Any]:
    state = entrant.state
    named = {"name": state.own_name} if state.own_name else {}
    short = {} if state.status == "completed" else {"total_steps": state.total_steps}
    gains = entrant.outcome.gains
    return {
        "run_id": state.run_id,
        **named,
        **({"environment": state.environment} if mixed else {}),
        "status": state.status,
        "step": state.step,
        **short,
        "minutes": round(entrant.outcome.cost.minutes, 2),
        **{name: _figure(entrant, name, gains.get(name)) for name in names},
    }


def _figure(entrant: Entrant, name: str, gain: Difference | None) -> Any:
    """A training metric is a number; an evaluation's is last, best where that was another step, gain, its interval."""
    value = entrant.value(name)
    if value is None or not name.startswith("eval/"):
        return rounded(value)
    points = series(entrant.outcome.rows, name)
    choose_best = min if lower_is_better(name) else max
    step, best = choose_best(reversed(points), key=lambda point: point[1])
    told: dict[str, Any] = {"last": rounded(value)}
    if best != value:
        told |= {"best": rounded(best), "best_step": step}
    if gain:
        interval = [round(bound, 3) + 0.0 for bound in gain.interval] if gain.interval else None
        told |= {"gain": rounded(gain.delta), "ci95": interval}
    return told


def _best(found: Verdict) -> dict[str, Any]:
    closest, difference = found.closest, found.difference
    by = f"{difference.delta:+.4g} against" if difference.delta else "level with"
    ahead = f"{by} {closest.state.run_id}"
    if found.difference.interval:
        low, high = difference.interval or (0.0, 0.0)
        tasks = f", paired over {difference.num_tasks} tasks" if difference.method == "paired" else ", unpaired"
        ahead += f", {100 * found.confidence:.3g} % interval {low:+.3f} to {high:+.3f}{tasks}"
    elif not found.metric.startswith("eval/"):
        ahead += ", means of the last steps: no test, every step has other tasks"
    doubt = "" if difference.certain else "; more held-out tasks, or other seeds, would tell"
    return {
        "metric": found.metric,
        "run_id": found.best.state.run_id,
        "why": ahead + doubt,
        "certain": found.certain,
    }


def _doubts(entrants: Sequence[Entrant], environments: Sequence[str]) -> list[str]:
    notes = [
        f"{it.state.run_id} has no {what}"
        for it in entrants
        for what, there in (("evaluation", it.outcome.evaluations), ("readable settings", it.settings))
        if not there
    ]
    notes += [f"{it.state.run_id} goes on; {_newest(it)}" for it in entrants if not it.state.terminal]
    if len(environments) > 1:
        notes.append(f"environments differ ({', '.join(environments)}): which run is best cannot be said")
    return notes


def _newest(entrant: Entrant) -> str:
    found = entrant.outcome.evaluations
    return f"its last evaluation is of step {found[-1].step}" if found else "it has not been evaluated"


def _picture(entrants: Sequence[Entrant], names: Sequence[str], notes: list[str]) -> Path | None:
    curves = {_label(entrant): entrant.outcome.rows for entrant in entrants if entrant.outcome.rows}
    drawn = [name for name in names if any(series(rows, name) for rows in curves.values())]
    if not drawn:
        return None
    try:
        return comparison_of(curves, drawn)
    except HalteresError as error:  # the figures are not lost for want of a picture
        notes.append(error.sentence)
        return None


def _label(entrant: Entrant) -> str:
    state = entrant.state
    return f"{state.run_id} {state.own_name}" if state.own_name else state.run_id


def _next(entrants: Sequence[Entrant], decided: Verdict | None) -> str:
    going_on = next((entrant.state.run_id for entrant in entrants if not entrant.state.terminal), None)
    if going_on:
        return worded("rl_check_status", going_on, wait_s=45, until="terminal")
    return worded("rl_get_results", (decided.best if decided else entrants[0]).state.run_id)
