"""How long a run will take, and how much memory: a range (`Span`).

An estimate stands on, in this order: earlier runs with the same model and environment; the engine's speed with the
lengths of prompts and answers that a test has seen; the same with lengths that are assumed; where the engine was not
measured yet, the speed of a test's answers. Where no speed was measured there is no estimate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from halteres.agent import engine_speed
from halteres.agent.trial.folder import TestOutcome, latest_test
from halteres.errors import NotFound
from halteres.runs.directory import RunDirectory, active_runs, list_runs
from halteres.runs.starting.preflight import Ground, Plan, examine_reward_models
from halteres.runs.starting.resources import OTHERS_BYTES, PASS_TOKENS, Workload, cache_bytes, need, workload_of
from halteres.runs.starting.run_models import server_bytes


@dataclass(frozen=True, slots=True)
class Span:
    """Low and high, both included.

    >>> (Span(1, 2) + Span(10, 20)) * 3
    Span(low=33, high=66)
    """

    low: float
    high: float

    def __add__(self, other: Span) -> Span:
        return Span(self.low + other.low, self.high + other.high)

    def __mul__(self, factor: float | Span) -> Span:
        factor = factor if isinstance(factor, Span) else Span(factor, factor)
        return Span(self.low * factor.low, self.high * factor.high)

    def within(self, least: float, most: float) -> Span:
        """Both bounds brought between these."""
        return Span(min(max(self.low, least), most), min(max(self.high, least), most))

    @property
    def rounded(self) -> list[float]:
        """Three significant digits."""
        return [float(f"{self.low:.3g}"), float(f"{self.high:.3g}")]


CONTEXT = -100  # a group's mask on tokens that the policy did not write (atroposlib's)
PROMPT_TOKENS = Span(32, 256)  # assumed of prompts that nobody has seen yet
SHORTEST_ANSWER = 0.25  # of the limit: assumed of answers, likewise
TRAINED_ANSWERS = Span(0.6, 1.3)  # by what factor answers may become shorter or longer in training
AROUND_ENGINE_S = Span(4, 12)  # a run's processes beside the engine begin, and all of them end
PER_STEP_S = Span(0.05, 0.4)  # scoring, delivery, publication: what is no sampling and no training
BESIDE_PROBE = Span(0.75, 1.4)  # how far the engine in a run may be from its measured speed
SAMPLING, TRAINING = Span(0.17, 1.4), Span(0.05, 1.0)
"""A token in a run, in seconds of one in a test, which decodes few at once; 0.19 and 0.27 recorded on two cores."""

UNSEEN_LOAD_S = Span(1, 20)  # a model is loaded whose engine was not measured
NEARLY_WHOLE = 0.9  # of a micro-batch: sequences seldom fill it to the last token
MOST_RUNS, LOOKED_AT = 5, 50
FEWEST_STEPS = 2  # beside the first, which waits for processes to start and shares the engine with the first evaluation
BESIDE_PAST = Span(0.8, 1.35)  # how far outside of what was measured the next run may lie: other load, other lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Of one run."""

    step_s: Span
    total_s: Span  # from the call to the end
    basis: str
    peak_gb: float | None = None  # of a service of its own

    @property
    def facts(self) -> dict[str, Any]:
        """As an answer has it."""
        facts = {"step_s": self.step_s.rounded, "total_min": (self.total_s * (1 / 60)).rounded, "basis": self.basis}
        return {**facts, "peak_gb": self.peak_gb} if self.peak_gb is not None else facts


def estimate(plan: Plan, ground: Ground, *, may_measure: bool) -> Estimate | None:
    """What the run will take; None where nothing was measured (yet). With `may_measure` it may take
    `engine_speed.DEADLINE_S`."""
    engine = engine_speed.Engine.of(plan, ground.model) if plan.service_url is None else None
    speed = engine_speed.remembered(engine) if engine else None
    found = _by_earlier_runs(plan, ground)
    if found is None and engine:  # that of somebody else's service is not ours to load with a probe
        if speed is None and may_measure:
            speed = engine_speed.measured(engine, plan.demands)
        found = _by_speed(plan, ground, speed)
    if found is None:
        return None
    found = replace(found, peak_gb=_peak_gb(plan, ground, speed))
    if not (others := len(active_runs())):
        return found
    slower = Span(1, 1 + others)  # they may take their share of the machine, all the time or a little while
    basis = f"{found.basis}; {others} other run{'s' if others > 1 else ''} may slow it"
    return replace(found, step_s=found.step_s * slower, total_s=found.total_s * slower, basis=basis)


def _done(ground: Ground) -> int:
    return ground.resume.step if ground.resume else 0


def _steps(plan: Plan, ground: Ground) -> int:
    return max(0, plan.demands.steps - _done(ground))


def _peak_gb(plan: Plan, ground: Ground, speed: engine_speed.Speed | None) -> float | None:
    """Of all processes: as measured with a whole micro-batch, and what caches may grow to; else by the formula."""
    shape = ground.model.shape
    if shape is None or plan.service_url is not None:
        return None
    beside = server_bytes(examine_reward_models(plan.settings.env)[1])
    if speed is None or not speed.peak_gb or speed.pass_tokens < NEARLY_WHOLE * PASS_TOKENS:
        return round((need(shape, plan.demands).total + beside) / 1e9, 2)
    return round(speed.peak_gb + (cache_bytes(shape, plan.demands) + OTHERS_BYTES + beside) / 1e9, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Past:
    """One earlier run."""

    run_id: str
    step_s: list[float]  # as they would be in the planned run
    around_s: float | None  # from the start to the end, without the steps; None: it has not ended by itself


def _by_earlier_runs(plan: Plan, ground: Ground) -> Estimate | None:
    found = list(islice(_earlier_runs(plan, ground), MOST_RUNS))
    if not found:
        return None
    steps = [seconds for past in found for seconds in past.step_s]
    means, middle = [sum(past.step_s) / len(past.step_s) for past in found], _quantiles(steps, 0.25, 0.75)
    pace_s = Span(min(middle.low, *means), max(middle.high, *means)) * BESIDE_PAST  # of a step, in the mean over many
    around = [past.around_s for past in found if past.around_s is not None]
    around_s = _quantiles(around, 0.0, 1.0) * BESIDE_PAST if around else Span(5, 60)
    names = ", ".join(past.run_id for past in found[:3])
    return Estimate(
        step_s=_quantiles(steps, 0.05, 0.95) * BESIDE_PAST,
        total_s=around_s + pace_s * _steps(plan, ground),
        basis=f"{len(found)} earlier run{'s' if len(found) > 1 else ''} here ({names})",
    )


def _quantiles(values: list[float], low: float, high: float) -> Span:
    """The bounds between which that part of the values lies. There must be some."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return Span(ordered[round(low * last)], ordered[round(high * last)])


def _earlier_runs(plan: Plan, ground: Ground) -> Iterator[_Past]:
    for run in islice(list_runs(), LOOKED_AT):
        try:
            if (past := _past(run, plan, ground)) is not None:
                yield past
        except (NotFound, OSError, ValueError):
            continue  # removed while we looked, or not to be read any more


def _past(run: RunDirectory, plan: Plan, ground: Ground) -> _Past | None:
    """The run as it would have been with this plan; None where its model, environment or engine is another."""
    state, environment = run.state(), ground.environment
    if (state.base_model, state.environment_file) != (ground.model.name, str(environment.path)):
        return None
    before, now = run.settings().inference, plan.settings.inference
    names = ("engine", "threads", "dtype", "device")
    if any(getattr(before, name) != getattr(now, name) for name in names):
        return None
    service, variant = plan.service_url is not None, environment.variant_setting
    if (state.service_given, state.program.variant_setting) != (service, variant):
        return None
    began = int((state.resume_point or {}).get("step", 0))
    rows = [row for row in run.metrics() if row.get("src") == "trainer" and row["step"] > began]
    times: list[float] = [row["time/step"] for row in rows if isinstance(row.get("time/step"), (int, float))][1:]
    if len(times) < FEWEST_STEPS:
        return None
    work, was = plan.demands, workload_of(run.settings())
    longer = work.answer_tokens / was.answer_tokens  # a higher limit need not mean longer answers, a lower one may
    scaled = [seconds * work.batch_size / was.batch_size * min(1.0, longer) for seconds in times]
    if longer > 1:
        scaled += [seconds * longer for seconds in scaled]
    around = None
    if state.status == "completed" and state.ended_at is not None:
        around = max(0.0, state.ended_at - state.created_at - sum(times))
    return _Past(run_id=run.run_id, step_s=scaled, around_s=around)


def _by_speed(plan: Plan, ground: Ground, speed: engine_speed.Speed | None) -> Estimate | None:
    """From the engine's speed; where it was not measured, from how fast a test's answers came: then the range is wide,
    for nobody has seen this machine train."""
    work, outcome = plan.demands, latest_test(plan.settings.run.environment, plan.settings.inference.model)
    seen = _tested_lengths(outcome, work) if outcome else None
    if speed is not None:
        seen = seen or _assumed_lengths(work)
        sampling = BESIDE_PROBE * (1 / speed.decode_tokens_per_s)  # s per token
        training = BESIDE_PROBE * (1 / speed.train_tokens_per_s)
        update, load = BESIDE_PROBE * speed.update_s, Span(speed.load_s, 1.5 * speed.load_s)
        basis = f"the engine measured here; {seen.source}"
    elif outcome is not None and outcome.tokens_per_s and seen is not None:
        sampling, training = SAMPLING * (1 / outcome.tokens_per_s), TRAINING * (1 / outcome.tokens_per_s)
        update, load = Span(0, 0), UNSEEN_LOAD_S
        basis = f"sampling as in {seen.source}; training not measured yet"
    else:
        return None
    sequence = (seen.prompt + seen.answer).within(1, work.positions)
    step = (seen.answer * sampling + sequence * training) * work.batch_size + update + PER_STEP_S
    evaluation = seen.answer * sampling * work.eval_sequences + Span(1, 3)
    evaluations = Span(1, 2 + work.evaluations(_done(ground)))  # the first goes on beside the first steps
    total = load + AROUND_ENGINE_S + evaluation * evaluations + step * _steps(plan, ground)
    return Estimate(step_s=step, total_s=total, basis=basis)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lengths:
    """Mean tokens of one rollout."""

    prompt: Span
    answer: Span
    source: str  # in words


def _assumed_lengths(work: Workload) -> _Lengths:
    """Where nothing is known but the limits."""
    answer = Span(SHORTEST_ANSWER * work.answer_tokens, work.answer_tokens)
    prompt = PROMPT_TOKENS.within(1, max(1, work.positions - answer.low))
    prompts, answers = (f"{span.low:g} to {span.high:g}" for span in (prompt, answer))
    return _Lengths(
        prompt=prompt, answer=answer, source=f"prompts of {prompts} and answers of {answers} tokens assumed"
    )


class _Group(msgspec.Struct):
    """One line of a test's groups."""

    masks: list[list[int]]


def _tested_lengths(outcome: TestOutcome, work: Workload) -> _Lengths | None:
    """As a test's groups had them; None where its files are gone."""
    masks = list(_masks(outcome.output_file))
    if not masks:
        return None
    prompt = sum(mask.count(CONTEXT) for mask in masks) / len(masks)
    answer = sum(map(len, masks)) / len(masks) - prompt
    return _Lengths(
        prompt=Span(0.9 * prompt, 1.1 * prompt),
        answer=(TRAINED_ANSWERS * answer).within(1, work.answer_tokens),
        source=f"{len(masks)} rollouts of test {outcome.test_id}",
    )


def _masks(file: Path) -> Iterator[list[int]]:
    """Of every rollout in a file of groups."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield from msgspec.json.decode(line, type=_Group).masks
        except msgspec.DecodeError:
            continue
