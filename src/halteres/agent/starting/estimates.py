"""How long a run will take, and how much memory: told as a range (`Span`).

An estimate stands on, in this order: earlier runs with the same model and environment; the engine's speed with the
lengths of prompts and answers that a test has seen; the same with lengths that are assumed; where the engine was not
measured yet, the speed of a test's answers. Where no speed was measured there is no estimate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from halteres.agent.starting import measurements
from halteres.agent.starting.measurements import Span, precedents
from halteres.agent.starting.probe import Speed
from halteres.agent.trial.folder import TestOutcome, latest_test
from halteres.runs.directory import active_runs
from halteres.runs.starting.machine import OTHERS_BYTES, PASS_TOKENS, Workload, cache_bytes, need
from halteres.runs.starting.preflight import Ground, Plan, examine_reward_models
from halteres.runs.starting.reward_models import server_bytes

CONTEXT = -100
"""A group's mask on tokens that the policy did not write (atroposlib's)."""

PROMPT_TOKENS = Span(32, 256)
"""Assumed of prompts that nobody has seen yet."""

SHORTEST_ANSWER = 0.25
"""Of the limit: assumed of answers, likewise."""

TRAINED_ANSWERS = (0.6, 1.3)
"""By what factor answers may become shorter or longer in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Mean tokens of one rollout."""

    prompt: Span
    answer: Span
    longest: int  # tokens that both together may have
    source: str  # in words

    @property
    def sequence(self) -> Span:
        """Prompt and answer."""
        return (self.prompt + self.answer).within(1, self.longest)


class _Group(msgspec.Struct):
    """One line of a test's groups."""

    masks: list[list[int]]


def assumed(work: Workload) -> Lengths:
    """Where nothing is known but the limits."""
    answer = Span(SHORTEST_ANSWER * work.answer_tokens, work.answer_tokens)
    prompt = PROMPT_TOKENS.within(1, max(1, work.positions - answer.low))
    source = (
        f"prompts of {prompt.low:g} to {prompt.high:g} and answers of {answer.low:g} to {answer.high:g} tokens assumed"
    )
    return Lengths(prompt=prompt, answer=answer, longest=work.positions, source=source)


def tested(outcome: TestOutcome, work: Workload) -> Lengths | None:
    """As a test's groups had them; None where its files are gone."""
    pairs = list(_read(outcome.output_file))
    if not pairs:
        return None
    prompt, answer = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return Lengths(
        prompt=Span(prompt, prompt).wider(0.9, 1.1),
        answer=Span(answer, answer).wider(*TRAINED_ANSWERS).within(1, work.answer_tokens),
        longest=work.positions,
        source=f"{len(pairs)} rollouts of test {outcome.test_id}",
    )


def _read(file: Path) -> Iterator[tuple[int, int]]:
    """Prompt and answer tokens of every rollout in a file of groups."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            group = msgspec.json.decode(line, type=_Group)
        except msgspec.DecodeError:
            continue
        for mask in group.masks:
            context = sum(token == CONTEXT for token in mask)
            yield context, len(mask) - context


AROUND_ENGINE_S = Span(4, 12)
"""A run's processes beside the engine begin, and all of them end."""

PER_STEP_S = Span(0.05, 0.4)
"""Scoring, delivery, publication: what is no sampling and no training."""

OUTSIDE = (0.75, 1.4)
"""How far the engine in a run may be from its probe."""

SAMPLING, TRAINING = (0.17, 1.4), (0.05, 1.0)
"""A token in a run, in seconds of one in a test, which decodes few at once; 0.19 and 0.27 recorded on two cores."""

UNSEEN_LOAD_S = Span(1, 20)
"""A model is loaded whose engine was not measured."""

NEARLY_WHOLE = 0.9
"""Of a micro-batch: sequences seldom fill it to the last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Of one run."""

    step_s: Span
    total_s: Span  # from the call to the end
    basis: str
    peak_gb: float | None  # of a service of its own

    @property
    def facts(self) -> dict[str, Any]:
        """As an answer tells it."""
        told: dict[str, Any] = {"step_s": self.step_s.rounded, "total_min": (self.total_s * (1 / 60)).rounded}
        told["basis"] = self.basis
        return {**told, "peak_gb": self.peak_gb} if self.peak_gb is not None else told


def estimate(plan: Plan, ground: Ground, *, may_measure: bool) -> Estimate | None:
    """What the run will take; None where nothing was measured (yet). With `may_measure` it may take DEADLINE_S."""
    found = _by_precedents(plan, ground) or _by_speed(plan, ground, may_measure=may_measure)
    return _beside_others(found) if found else None


def _by_precedents(plan: Plan, ground: Ground) -> Estimate | None:
    past = precedents(plan, ground)
    if past is None:
        return None
    speed = measurements.remembered(measurements.Engine.of(plan, ground.model)) if plan.service_url is None else None
    return Estimate(
        step_s=past.step_s,
        total_s=past.around_s + past.pace_s * _steps(plan, ground),
        basis=past.source,
        peak_gb=_peak_gb(plan, ground, speed),
    )


def _by_speed(plan: Plan, ground: Ground, *, may_measure: bool) -> Estimate | None:
    if plan.service_url is not None:  # its engine is not ours to load with a probe
        return None
    engine, work = measurements.Engine.of(plan, ground.model), plan.demands
    speed = measurements.remembered(engine)
    if speed is None and may_measure:
        speed = measurements.measured(engine, work)
    if speed is None:
        return _by_test(plan, ground)
    seen, (low, high) = _lengths(plan), OUTSIDE
    outside = (low * speed.share, high)  # what was measured beside others may go faster without them
    answers, trained = work.batch_size / speed.decode_tokens_per_s, work.batch_size / speed.train_tokens_per_s
    step = (seen.answer * answers + seen.sequence * trained + Span(speed.update_s, speed.update_s)).wider(*outside)
    evaluation = (seen.answer * (work.eval_sequences / speed.decode_tokens_per_s)).wider(*outside) + Span(1, 3)
    evaluations = Span(1, 2 + work.evaluations(_done(ground)))  # the first goes on beside the first steps
    around = Span(speed.load_s, 1.5 * speed.load_s) + AROUND_ENGINE_S
    around += Span(evaluation.low * evaluations.low, evaluation.high * evaluations.high)
    return Estimate(
        step_s=step + PER_STEP_S,
        total_s=around + (step + PER_STEP_S) * _steps(plan, ground),
        basis=f"the engine measured here; {seen.source}",
        peak_gb=_peak_gb(plan, ground, speed),
    )


def _by_test(plan: Plan, ground: Ground) -> Estimate | None:
    """From how fast a test's answers came: the range is wide, for nobody has seen this machine train."""
    outcome, work = _tested(plan), plan.demands
    if outcome is None or not outcome.tokens_per_s or (seen := tested(outcome, work)) is None:
        return None
    token_s = 1 / outcome.tokens_per_s
    sampling = (seen.answer * (work.batch_size * token_s)).wider(*SAMPLING)
    training = (seen.sequence * (work.batch_size * token_s)).wider(*TRAINING)
    evaluation = (seen.answer * (work.eval_sequences * token_s)).wider(*SAMPLING) + Span(1, 3)
    evaluations = Span(1, 2 + work.evaluations(_done(ground)))
    around = UNSEEN_LOAD_S + AROUND_ENGINE_S
    around += Span(evaluation.low * evaluations.low, evaluation.high * evaluations.high)
    step = sampling + training + PER_STEP_S
    return Estimate(
        step_s=step,
        total_s=around + step * _steps(plan, ground),
        basis=f"sampling as in {seen.source}; training not measured yet",
        peak_gb=_peak_gb(plan, ground, None),
    )


def _tested(plan: Plan) -> TestOutcome | None:
    return latest_test(plan.settings.run.environment, plan.settings.inference.model)


def _lengths(plan: Plan) -> Lengths:
    outcome = _tested(plan)
    return (tested(outcome, plan.demands) if outcome else None) or assumed(plan.demands)


def _steps(plan: Plan, ground: Ground) -> int:
    return max(0, plan.demands.steps - _done(ground))


def _done(ground: Ground) -> int:
    return ground.resume.step if ground.resume else 0


def _peak_gb(plan: Plan, ground: Ground, speed: Speed | None) -> float | None:
    """Of all processes: as measured with a whole micro-batch, and what caches may grow to; else by the formula."""
    shape = ground.model.shape
    if shape is None or plan.service_url is not None:
        return None
    beside = server_bytes(examine_reward_models(plan.settings.env)[1])
    if speed is None or speed.pass_tokens < NEARLY_WHOLE * PASS_TOKENS:
        return round((need(shape, plan.demands).total + beside) / 1e9, 2)
    return round(speed.peak_gb + (cache_bytes(shape, plan.demands) + OTHERS_BYTES + beside) / 1e9, 2)


def _beside_others(found: Estimate) -> Estimate:
    """Runs that go on now may take their share of the machine, all the time or a little while."""
    others = len(active_runs())
    if not others:
        return found
    return Estimate(
        step_s=found.step_s.wider(1, 1 + others),
        total_s=found.total_s.wider(1, 1 + others),
        basis=f"{found.basis}; {others} other run{'s' if others > 1 else ''} may slow it",
        peak_gb=found.peak_gb,
    )
