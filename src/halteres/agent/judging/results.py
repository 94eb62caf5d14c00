"""The tool that says what a run has come to: rl_get_results; its history in a few rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from halteres.agent.tool import READS, Caller, Result, RunId, ShortNames, chosen_run, tool
from halteres.agent.truncation import clipped, nonempty, shortened
from halteres.agent.watching.headline import (
    CORRECT,
    GREEDY,
    LOSS,
    REWARD,
    SCORE,
    SUCCESS,
    Choice,
    choose,
    headline,
    rounded,
)
from halteres.agent.watching.look import Look, error_of, look_at, sink_facts, wandb_names
from halteres.agent.watching.next_steps import further, next_after
from halteres.agent.watching.status import WHY_LENGTH
from halteres.errors import HalteresError
from halteres.next_step import worded
from halteres.observe.metrics import Row
from halteres.runs.directory import RunDirectory, roster, runs_home
from halteres.runs.reading.adapter import vllm_command
from halteres.runs.reading.evaluations import Outcome, Weights, outcome_of, picture_of
from halteres.runs.state import RunState

MOST_FIGURES = 180  # of a history: more would crowd out everything else that the reader keeps in mind
REMEDIES, MOST_FAILED, LAST_CHECKPOINTS = 2, 2, 4
"""Alerts whose next call is in the answer too; evaluations without figures; checkpoints, which are counted beyond."""

_GAINS = (CORRECT, GREEDY, SCORE)

LOSS_MEANS = (
    f"{LOSS}: minus the mean advantage of a trained token, no error that should fall; reward, eval/* tell progress"
)


class Results(Result):
    """What a run has come to, so far or in the end."""

    run_id: str
    status: str
    environment: str
    wandb_project: str
    wandb_run_name: str
    wandb_url: str | None = None
    wandb: str = ""  # where it is a sink: starting, online, offline, off, failed (then also wandb_error)
    sinks: dict[str, str] = {}  # of each sink, where it is or what is wrong with it
    final_metrics: dict[str, Any] = {}
    baseline: dict[str, Any] = {}  # the first evaluation; of the untrained model where `step` is 0
    improvement: dict[str, Any] = {}  # metric -> {delta, ci95: [low, high], num_tasks, certain, method}
    eval_failed: list[dict[str, Any]] = []  # step, why: evaluations that gave no figure, the newest first
    history: list[dict[str, Any]] = []
    weights: dict[str, Any] = {}  # step, sampler, state, peft_dir, use
    checkpoints: list[dict[str, Any]] = []
    plot: str | None = None  # path of the PNG
    cost: dict[str, Any] = {}  # minutes, engine_hours (gpu_hours, cpu_hours where the device is known), tokens
    alerts: list[dict[str, Any]] = []  # rule, step, times; of the newest the remedy's next call
    notes: list[str] = []


@tool(title="Get a run's results", hints=READS)
def rl_get_results(
    caller: Caller,
    run_id: RunId = None,
    metrics: Annotated[
        list[str] | None,
        ShortNames,
        Field(max_length=32, description='names or patterns such as "eval/*"; default: the headline ones'),
    ] = None,
    points: Annotated[int, Field(ge=2, le=50, description="rows of the history")] = 10,
    plot: Annotated[bool, Field(description="show the curves as a picture too")] = False,
) -> Results:
    """Get what a run has come to, also while it goes on: final metrics, the gain over the untrained model on held-out
    tasks with its 95 % interval (paired by task; `certain`: it leaves out zero), history, weights and how to use them.
    """
    run = chosen_run(run_id)
    look = look_at(run)
    state = look.state
    outcome = outcome_of(run, state)
    choice = choose(metrics, {name for row in outcome.rows for name in row}) if metrics else None
    notes = _notes(look, outcome, choice)
    picture, shown = None, dict[str, Any]()
    if plot:
        try:
            picture = picture_of(run, state, outcome.rows)
        except HalteresError as error:  # the figures are not lost for want of a picture
            notes.append(error.sentence)
        shown["plot"] = str(picture) if picture else None
    failed = [*reversed(look.progress.eval_failed)][:MOST_FAILED]
    checkpoints = run.checkpoints()
    answer = Results(
        run_id=run.run_id,
        status=state.status,
        environment=state.environment,
        **wandb_names(state, look.given),
        **sink_facts(run),
        **_figures(outcome, choice),
        history=_history(outcome.rows, choice.names if choice else _curves(outcome.rows), points),
        weights=_weights(run, state, outcome.weights),
        checkpoints=[{"name": row.get("name"), "step": row.get("step")} for row in checkpoints[-LAST_CHECKPOINTS:]],
        **nonempty(
            num_checkpoints=len(checkpoints) if len(checkpoints) > LAST_CHECKPOINTS else None,
            eval_failed=[{"step": one.step, "why": clipped(one.why, WHY_LENGTH)} for one in failed],
            notes=notes,
        ),
        **shown,
        cost=_cost(state, outcome),
        alerts=_alerts(look),
        next=_next(look, outcome),
    )
    return answer.showing(picture) if picture else answer


def _notes(look: Look, outcome: Outcome, choice: Choice | None) -> list[str]:
    state, skipped = look.state, look.skipped
    notes = [f"{state.code or state.status}: {shortened(error_of(look), 300)}"] if state.error else []
    notes += choice.notes if choice else ()
    notes += [look.hardly_moved] if look.hardly_moved else []
    if skipped:
        notes.append(
            f"{skipped['skipped_steps']} of {look.step} steps moved no weight (all scores of each group equal): the "
            f"policy version is {skipped['policy_version']}"
        )
    if LOSS in (choice.names if choice else outcome.final):
        notes.append(LOSS_MEANS)
    if outcome.baseline and outcome.baseline.step > 0:
        notes.append(f"the first evaluation is of step {outcome.baseline.step}, not of the untrained model")
    if len(outcome.evaluations) == 1:
        notes.append("one evaluation so far: nothing to compare it with")
    if any(gain.method == "unpaired" for gain in outcome.gains.values()):
        notes.append("unpaired: no samples of the same tasks in both evaluations; the interval is wider than need be")
    return [*notes, look.progress.no_evaluation] if look.progress.no_evaluation else notes


def _figures(outcome: Outcome, choice: Choice | None) -> dict[str, Any]:
    """Final metrics, baseline and improvement; of the chosen metrics, or of the headline."""
    final, first = outcome.final, outcome.baseline
    names = choice.names if choice else headline(final)
    baseline = [name for name in names if first and name in first.figures and not name.endswith("_stderr")]
    gains = {name: gain for name, gain in outcome.gains.items() if name in names and (choice or name in _GAINS)}
    return {
        "final_metrics": {name: rounded(final.get(name)) for name in names},
        "baseline": {"step": first.step, **{name: rounded(first.figures[name]) for name in baseline}} if first else {},
        "improvement": {name: gain.facts for name, gain in gains.items()},
    }


def _curves(rows: Sequence[Row]) -> list[str]:
    """What a history has where nothing was asked for."""
    if rows and not any(REWARD in row for row in rows):  # a reward model is trained
        return ["accuracy", "eval_accuracy"]
    apart = any(row.get(SUCCESS) != row.get(REWARD) for row in rows)
    return [REWARD, *([SUCCESS] if apart else []), CORRECT]


def _history(rows: Sequence[Row], names: Sequence[str], points: int) -> list[dict[str, Any]]:
    """At most `points` rows spread evenly over the run, the first and the last among them; of each stretch between the
    one that has most of these metrics: evaluations are few, and would else be missed."""

    def num_metrics(row: Row) -> int:
        return sum(row.get(name) is not None for name in names)

    def spread(rows: Sequence[Row], points: int) -> Iterator[Row]:
        inner, stretches = rows[1:-1], points - 2
        yield rows[0]
        for index in range(stretches):
            low, high = (round(edge * len(inner) / stretches) for edge in (index, index + 1))
            centre = (low + high - 1) / 2
            yield inner[min(range(low, high), key=lambda at: (-num_metrics(inner[at]), abs(at - centre)))]
        yield rows[-1]

    rows = [row for row in rows if num_metrics(row)]
    points = max(2, min(points, MOST_FIGURES // max(1, len(names))))
    chosen = rows if len(rows) <= points else spread(rows, points)
    return [
        {"step": row["step"], **{name: rounded(row[name]) for name in names if row.get(name) is not None}}
        for row in chosen
    ]


def _weights(run: RunDirectory, state: RunState, weights: Weights) -> dict[str, Any]:
    if weights.reward_model:
        use = [worded("rl_edit_config", "reward_model_path", str(weights.reward_model))]
        return {"step": weights.step, "reward_model": str(weights.reward_model), "use": use}
    if not weights.sampler:
        return {}
    use = [f"halteres chat {run.run_id}"]
    facts = {"step": weights.step, "sampler": weights.sampler, "state": weights.state, "peft_dir": None, "use": use}
    if weights.peft_dir:
        facts |= {"peft_dir": str(weights.peft_dir), "base": state.tokenizer}
        use.append(vllm_command(state.tokenizer, weights.peft_dir, run.run_id))
    return facts


def _cost(state: RunState, outcome: Outcome) -> dict[str, Any]:
    """Hours are of the engine's device, where it is known which that is; a service of somebody else's is not ours."""
    minutes = outcome.cost.minutes
    device = str(state.processes.get("engine", {}).get("device") or "engine")
    unit = "gpu" if device.startswith("cuda") else device
    hours = {} if state.service_given else {f"{unit}_hours": rounded(minutes / 60)}
    return {"minutes": round(minutes, 2), **hours, "tokens": outcome.cost.tokens}


def _alerts(look: Look) -> list[dict[str, Any]]:
    """Newest first; of two the call that their remedy begins with, or goes on with once the run has ended."""
    made = ("rl_stop_training", "rl_get_results") if look.state.terminal else ()
    rows: list[dict[str, Any]] = []
    for alert in look.alerts:
        left = alert.remedy.after(*made)
        remedy = {"remedy": left.first.call if left.first else str(left)} if len(rows) < REMEDIES else {}
        rows.append({"rule": alert.rule, "step": alert.step, "times": alert.times, **remedy})
    return rows


def _next(look: Look, outcome: Outcome) -> str:
    run, state = look.run, look.state
    if not state.terminal:
        return next_after(look)
    if call := further(look):
        return call
    if state.status != "completed":
        return worded("rl_get_logs", run.run_id)
    if outcome.weights.reward_model:
        return worded("rl_evaluate_reward_model", model=run.run_id, data="HELD_OUT")
    # The newest other run of this environment that has trained and ended.
    others = (entry for entry in roster(runs_home()) if entry.run_id != run.run_id and entry.ended)
    alike = (it.run_id for it in others if it.facts.environment == state.environment and it.facts.step)
    if rival := next(alike, None):
        return worded("rl_compare_runs", [run.run_id, rival])
    gain = outcome.gains.get(CORRECT)
    return worded("rl_get_rollouts", run.run_id, which="best" if gain and gain.certain and gain.delta > 0 else "worst")
