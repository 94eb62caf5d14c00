"""How long a run will take, and how much memory: each a range (`Span`).

An estimate stands on earlier runs here with the same model and environment; where there are none,
on the engine's measured speed and the limits of prompts and answers. Where no speed was measured
there is no estimate.

A speed is measured once, on the engine itself, and remembered: sampling, one training pass and one
optimiser step, the coarsest figures first, each again with more work until it is worth something.
What was measured in time counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from halteres.config import environ
from halteres.config.program import EnvironmentProgram
from halteres.config.settings import Settings, TrainerSettings
from halteres.engine.process import EngineCommand, EngineProcess
from halteres.engine.protocol import (
    Adam,
    Array,
    AskedType,
    Datum,
    LoraConfig,
    LossSpec,
    SamplingParams,
)
from halteres.errors import HalteresError, NotFound
from halteres.files import replace_file
from halteres.process import usable_cores
from halteres.runs.directory import RunDirectory, active_runs, list_runs
from halteres.runs.planning.models import RunModel
from halteres.runs.planning.resources import (
    DECODE_ROWS,
    OTHERS_BYTES,
    PASS_TOKENS,
    Machine,
    Workload,
    cache_bytes,
    need,
    workload_of,
)

T = TypeVar("T")


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
        if not isinstance(factor, Span):
            factor = Span(factor, factor)
        return Span(self.low * factor.low, self.high * factor.high)

    def within(self, least: float, most: float) -> Span:
        """Both bounds brought between these."""
        return Span(min(max(self.low, least), most), min(max(self.high, least), most))

    @property
    def rounded(self) -> list[float]:
        """Three rounded digits."""
        return [float(f"{self.low:.3g}"), float(f"{self.high:.3g}")]


UNSEEN_PROMPT = Span(32, 256)  # tokens assumed of prompts
SHORTEST_ANSWER = 0.25  # of the limit: assumed of answers, likewise
AROUND_ENGINE_S = Span(4, 12)  # a run's other processes begin, and all of them end
PER_STEP_S = Span(0.05, 0.4)  # scoring, delivery, publication: what is no sampling and no training
BESIDE_PROBE = Span(0.75, 1.4)  # how far the engine in a run may be from its measured speed
FORWARD_SHARE = 1 / 3  # of a training pass: what a pass without a gradient takes
FORWARD = Span(FORWARD_SHARE, FORWARD_SHARE)
NEARLY_WHOLE = 0.9  # of a micro-batch: sequences seldom fill it to the last token
MOST_RUNS, LOOKED_AT = 5, 50
# steps after the first, which waits for processes to start and shares the engine with the first
# evaluation
FEWEST_STEPS = 2
# how far outside of what was measured the next run may lie: other load, other lengths
BESIDE_PAST = Span(0.8, 1.35)


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
        facts: dict[str, Any] = {
            "step_s": self.step_s.rounded,
            "total_min": (self.total_s * (1 / 60)).rounded,
            "basis": self.basis,
        }
        if self.peak_gb is not None:
            facts["peak_gb"] = self.peak_gb
        return facts


def estimate(
    settings: Settings,
    environment: EnvironmentProgram,
    model: RunModel,
    here: Machine,
    *,
    first_step: int = 0,
    rewards_bytes: int = 0,
    service_url: str | None = None,
    may_measure: bool,
) -> Estimate | None:
    """How long a run will take, and how much memory; None where no speed was measured yet.

    Args:
        here: this machine.
        rewards_bytes: what the run's own reward server and critic need.
        first_step: optimiser steps that are done when it begins.
        service_url: of a service elsewhere; None: the run starts its own.
        may_measure: start an engine and measure it, for up to `DEADLINE_S`, where its
            speed is not known.
    """
    run = _Planned(settings, environment, model, first_step, service_url)
    # that of a service elsewhere is not ours to load with a measurement
    engine = None
    if service_url is None:
        engine = Engine.of(settings, model, here)
    speed = None
    if engine:
        speed = remembered(engine)
    found = _by_earlier_runs(run, on_gpu=here.gpu is not None)
    if found is None and engine is not None:
        if speed is None and may_measure:
            speed = measured(engine, run.workload)
        if speed is not None:
            found = _by_speed(run, speed, on_gpu=here.gpu is not None)
    if found is None:
        return None
    found = replace(found, peak_gb=_peak_gb(run, here, speed, rewards_bytes))
    return _beside_others(found)


def estimate_on_file(
    settings: Settings,
    model: RunModel,
    here: Machine,
    *,
    tokens_per_step: float,
    held_out_tokens: int,
    forwards: int,
    first_step: int = 0,
    service_url: str | None = None,
    may_measure: bool,
) -> Estimate | None:
    """How long a training on a file will take, and how much memory; None where no speed was
    measured yet, or where a service elsewhere computes.

    Args:
        here: this machine.
        tokens_per_step: of a batch, in the mean.
        held_out_tokens: of one evaluation.
        forwards: passes without a gradient, of each batch; an evaluation has one at least.
        first_step: optimiser steps that are done when it begins.
        service_url: of a service elsewhere; None: the run starts its own.
        may_measure: as `estimate`.
    """
    if service_url is not None:
        return None
    engine, work = Engine.of(settings, model, here), workload_of(settings)
    speed = remembered(engine)
    if speed is None and may_measure:
        speed = measured(engine, work)
    if speed is None:
        return None
    token_s = BESIDE_PROBE * (1 / speed.train_tokens_per_s)
    step = token_s * (tokens_per_step * (1 + FORWARD_SHARE * forwards)) + BESIDE_PROBE * (
        speed.update_s
    )
    step += Span(0.01, 0.1)
    evaluation = token_s * (held_out_tokens * FORWARD_SHARE * max(1, forwards))
    steps, every = settings.trainer.total_steps, settings.trainer.eval_every
    # the last; a run that goes on has the first already
    num_evaluations = 1 if first_step else 2
    if every:
        num_evaluations += max(0, (steps - 1) // every - first_step // every)
    load = Span(speed.load_s, 1.5 * speed.load_s)
    left = max(0, steps - first_step)
    found = Estimate(
        step_s=step,
        total_s=load + AROUND_ENGINE_S + evaluation * num_evaluations + step * left,
        basis=f"the engine measured here; {tokens_per_step:.0f} tokens of a batch, by the data",
    )
    shape = model.shape
    if shape is not None:
        needed = need(shape, work, on_gpu=here.gpu is not None).total
        found = replace(found, peak_gb=round(needed / 1e9, 2))
    return _beside_others(found)


def _beside_others(found: Estimate) -> Estimate:
    """The estimate, where other runs use the machine."""
    others = len(active_runs())
    if others == 0:
        return found
    # they may take their share of the machine, all the time or a little while
    slower = Span(1, 1 + others)
    basis = f"{found.basis}; {others} other run{'s' if others > 1 else ''} may slow it"
    return replace(found, step_s=found.step_s * slower, total_s=found.total_s * slower, basis=basis)


def _peak_gb(run: _Planned, here: Machine, speed: Speed | None, rewards_bytes: int) -> float | None:
    """Of all processes: as measured with a whole micro-batch, and what caches may grow to; else by
    the formula.
    """
    shape, on_gpu = run.model.shape, here.gpu is not None
    if shape is None or run.service_url is not None:
        return None
    if on_gpu:
        # they compute on the CPU
        rewards_bytes = 0
    if speed is None or not speed.peak_gb or speed.pass_tokens < NEARLY_WHOLE * PASS_TOKENS:
        needed = need(shape, run.workload, on_gpu=on_gpu).total
        return round((needed + rewards_bytes) / 1e9, 2)
    cached = cache_bytes(shape, run.workload, on_gpu=on_gpu)
    others = cached + OTHERS_BYTES + rewards_bytes
    return round(speed.peak_gb + others / 1e9, 2)


@dataclass(frozen=True, slots=True)
class _Planned:
    """The run that is estimated."""

    settings: Settings
    environment: EnvironmentProgram
    model: RunModel
    first_step: int
    service_url: str | None

    @property
    def workload(self) -> Workload:
        return workload_of(self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Past:
    """One earlier run, as it would have been with the plan."""

    run_id: str
    step_s: list[float]
    # from the start to the end, without the steps; None: it has not ended by itself
    around_s: float | None


def _by_earlier_runs(run: _Planned, *, on_gpu: bool) -> Estimate | None:
    found: list[_Past] = []
    for earlier in islice(list_runs(), LOOKED_AT):
        if len(found) == MOST_RUNS:
            break
        # removed meanwhile, or not to be read any more
        with contextlib.suppress(NotFound, OSError, ValueError):
            past = _past(earlier, run, on_gpu=on_gpu)
            if past is not None:
                found.append(past)
    if not found:
        return None
    steps = [seconds for past in found for seconds in past.step_s]
    means = [sum(past.step_s) / len(past.step_s) for past in found]
    middle = _quantiles(steps, 0.25, 0.75)
    # of a step, in the mean over many
    pace_s = Span(min(middle.low, *means), max(middle.high, *means)) * BESIDE_PAST
    around = [past.around_s for past in found if past.around_s is not None]
    if around:
        around_s = _quantiles(around, 0.0, 1.0) * BESIDE_PAST
    else:
        around_s = Span(5, 60)
    names = ", ".join(past.run_id for past in found[:3])
    return Estimate(
        step_s=_quantiles(steps, 0.05, 0.95) * BESIDE_PAST,
        total_s=around_s + pace_s * max(0, run.workload.steps - run.first_step),
        basis=f"{len(found)} earlier run{'s' if len(found) > 1 else ''} here ({names})",
    )


def _quantiles(values: list[float], low: float, high: float) -> Span:
    """The bounds between which that part of the values lies. There must be some."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return Span(ordered[round(low * last)], ordered[round(high * last)])


def _past(earlier: RunDirectory, run: _Planned, *, on_gpu: bool) -> _Past | None:
    """What an earlier run says of the planned one; None where its model, environment or engine is
    another, or where it has too few steps. `on_gpu`: where the engine computes.
    """
    state, settings, environment = earlier.state(), earlier.settings(), run.environment
    if (state.base_model, state.environment_file) != (run.model.name, str(environment.path)):
        return None
    if state.service_given != (run.service_url is not None):
        return None
    if state.program.variant_setting != environment.variant_setting:
        return None
    for name in ("engine", "threads", "device"):
        if getattr(settings.inference, name) != getattr(run.settings.inference, name):
            return None
    before, now = settings.trainer, run.settings.trainer
    if before.updates_per_batch != now.updates_per_batch:
        return None
    if training_passes(before) != training_passes(now):
        return None
    # `auto` is one of the two types: runs with either name of it count
    types = [workload_of(one).type_bytes(on_gpu=on_gpu) for one in (settings, run.settings)]
    if types[0] != types[1]:
        return None
    began = int((state.resume_point or {}).get("step", 0))
    rows = [row for row in earlier.metrics() if row.get("src") == "trainer" and row["step"] > began]
    times: list[float] = [
        row["time/step"] for row in rows if isinstance(row.get("time/step"), (int, float))
    ][1:]
    if len(times) < FEWEST_STEPS:
        return None
    work, was = run.workload, workload_of(settings)
    # a higher limit need not mean longer answers, a lower one may
    longer = work.answer_tokens / was.answer_tokens
    scaled = [seconds * work.batch_size / was.batch_size * min(1.0, longer) for seconds in times]
    if longer > 1:
        scaled += [seconds * longer for seconds in scaled]
    around = None
    if state.status == "completed" and state.ended_at is not None:
        around = max(0.0, state.ended_at - state.created_at - sum(times))
    return _Past(run_id=earlier.run_id, step_s=scaled, around_s=around)


def _by_speed(run: _Planned, speed: Speed, *, on_gpu: bool) -> Estimate:
    """From the engine's speed and the limits of lengths."""
    work = run.workload
    answer = Span(SHORTEST_ANSWER * work.answer_tokens, work.answer_tokens)
    prompt = UNSEEN_PROMPT.within(1, max(1, work.positions - answer.low))
    sampling = _unmeasured(speed.rows, min(work.rows, work.batch_size, DECODE_ROWS)) * (
        1 / speed.decode_tokens_per_s
    )
    training = BESIDE_PROBE * (1 / speed.train_tokens_per_s)
    update = BESIDE_PROBE * speed.update_s
    load = Span(speed.load_s, 1.5 * speed.load_s)
    sequence = (prompt + answer).within(1, work.positions)
    trainer = run.settings.trainer
    training = training * training_passes(trainer, is_critic_here=not on_gpu)
    update = update * Span(1, trainer.updates_per_batch)
    step = (answer * sampling + sequence * training) * work.batch_size + update + PER_STEP_S
    evaluation = answer * sampling * work.eval_sequences + Span(1, 3)
    # the first goes on while the first steps are made
    evaluations = Span(1, 2 + work.evaluations(run.first_step))
    steps = step * max(0, work.steps - run.first_step)
    prompts, answers = (f"{span.low:g} to {span.high:g}" for span in (prompt, answer))
    basis = f"prompts of {prompts} and answers of {answers} tokens assumed"
    if on_gpu and run.settings.trainer.uses_critic:
        basis += "; the critic's time on the CPU, which may be longer, is not in it"
    return Estimate(
        step_s=step,
        total_s=load + AROUND_ENGINE_S + evaluation * evaluations + steps,
        basis=f"the engine measured here; {basis}",
    )


def training_passes(trainer: TrainerSettings, *, is_critic_here: bool = True) -> Span:
    """How often a step computes its batch, in passes with a gradient.

    Args:
        trainer: its settings.
        is_critic_here: a critic computes where the engine does; it counts as large as the policy.
    """
    passes = Span(trainer.epochs, trainer.epochs)
    if trainer.kl_coef and trainer.reference == "base":
        passes += FORWARD
    if trainer.uses_critic and is_critic_here:
        epochs = trainer.critic_epochs or trainer.epochs
        # it learns while the policy does, at best on cores that the engine leaves idle
        alone = max(0, epochs - trainer.epochs)
        passes += FORWARD + Span(alone, epochs)
    return passes


def _unmeasured(rows: int, wanted: int) -> Span:
    """Seconds of a sampled token, in those of a measured one: a decode step of more rows than were
    measured may take no longer than one of so many.
    """
    return Span(BESIDE_PROBE.low * min(1.0, rows / wanted), BESIDE_PROBE.high)


DEADLINE_S = 20.0
# of what is measured, where a run allows more
PROMPT_TOKENS, ANSWER_TOKENS, SEQUENCE_TOKENS = 64, 64, 256
# a figure measured over less time is measured again with so many times the work
LONG_ENOUGH_S, GROWTH = 1.0, 4
FIRST_TOKENS = 64  # of the first training pass
FIRST_ROWS, FIRST_ANSWER = 8, 4  # of the first sampling
ADAPTER = SNAPSHOT = "probe"
LOSS = LossSpec(name="importance_sampling")


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured; 0: not yet."""

    load_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    train_tokens_per_s: float = 0.0
    update_s: float = 0.0  # optimiser step and publication
    peak_gb: float = 0.0  # of the engine's process; 0 where the system does not say
    rows: int = 0  # decoded together when that figure was taken
    pass_tokens: int = 0  # of the largest training pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The engine that a run would start."""

    backend: str
    model: RunModel
    threads: int
    machine: str  # the mark of the machine that it runs on
    dtype: AskedType = "auto"
    device: str | None = None  # None: by HALTERES_DEVICE

    @classmethod
    def of(cls, settings: Settings, model: RunModel, here: Machine) -> Engine:
        """The engine of a run with these settings, on this machine."""
        given = settings.inference
        threads = given.threads or max(1, usable_cores() - 1)
        return cls(
            backend=given.engine,
            model=model,
            threads=threads,
            machine=here.mark,
            dtype=given.dtype,
            device=given.device,
        )

    @property
    def key(self) -> str:
        """The key under which its speed is remembered: model, engine, threads, machine."""
        folder = Path(self.model.tokenizer)
        written = (folder / "config.json").stat().st_mtime_ns
        computed = f"{self.backend}/{self.dtype}/{self.device}/{self.threads} threads"
        return f"{folder}@{written}/{computed}/{self.machine}"


def _speeds() -> tuple[Path, dict[str, Speed]]:
    """The file of all speeds that were measured here, and what it holds."""
    file = environ.home() / "cache" / "engine_speeds.json"
    try:
        return file, msgspec.json.decode(file.read_bytes(), type=dict[str, Speed])
    except (OSError, msgspec.DecodeError):
        return file, {}


def remembered(engine: Engine) -> Speed | None:
    """What was measured on this machine, or None."""
    return _speeds()[1].get(engine.key)


def measured(engine: Engine, work: Workload, deadline_s: float = DEADLINE_S) -> Speed | None:
    """Measure now, and remember it; None where no figure was worth anything within the deadline."""
    probe = _Probe(engine, work)
    # no engine can be started, or not in time
    with contextlib.suppress(HalteresError, OSError, TimeoutError):
        asyncio.run(asyncio.wait_for(probe.run(), deadline_s))
    if not (probe.speed.decode_tokens_per_s and probe.speed.train_tokens_per_s):
        return None
    # a disk that will not have it costs the next one who asks some seconds
    with contextlib.suppress(OSError):
        file, speeds = _speeds()
        file.parent.mkdir(parents=True, exist_ok=True)
        encoded = msgspec.json.encode({**speeds, engine.key: probe.speed})
        replace_file(file, msgspec.json.format(encoded, indent=1) + b"\n")
    return probe.speed


class _Probe:
    """One engine, and its figures as they come."""

    def __init__(self, engine: Engine, work: Workload) -> None:
        self._engine, self._work, self.speed = engine, work, Speed()

    async def run(self) -> None:
        """Start the engine, measure, and end it."""
        engine = self._engine
        command = EngineCommand(
            backend="scripted" if engine.backend == "scripted" else "torch",
            folder=Path(engine.model.tokenizer),
            name=engine.model.name,
            threads=engine.threads,
            dtype=engine.dtype,
            device=engine.device,
        )
        with tempfile.TemporaryDirectory(prefix="halteres-probe-") as folder:
            began = time.perf_counter()
            self._host = EngineProcess(command, Path(folder) / "engine.log")
            await self._host.start()
            try:
                self._note(load_s=time.perf_counter() - began)
                self._vocabulary = range((await self._host.engine.info()).vocab_size)
                await self._measure()
            finally:
                await self._host.stop()

    async def _measure(self) -> None:
        """In the order in which a figure is missed most, coarsely first."""
        work = self._work
        await self._host.engine.create_adapter(ADAPTER, LoraConfig(rank=work.rank, seed=0))
        await self._train(FIRST_TOKENS)
        await self._update()
        # all of it once: the first use of a kernel is slow
        await self._sample(FIRST_ROWS, FIRST_ANSWER)
        tokens, took = FIRST_TOKENS, 0.0
        while took < LONG_ENOUGH_S and tokens < PASS_TOKENS:
            tokens = min(tokens * GROWTH, PASS_TOKENS)
            took = await self._train(tokens)
        most_rows, longest = (
            min(work.rows, work.batch_size, DECODE_ROWS),
            min(ANSWER_TOKENS, work.answer_tokens),
        )
        rows, answer, took = FIRST_ROWS, FIRST_ANSWER, 0.0
        while took < LONG_ENOUGH_S and (rows, answer) != (most_rows, longest):
            rows, answer = min(rows * GROWTH, most_rows), min(answer * GROWTH, longest)
            took = await self._sample(rows, answer)
        # no gradient is left over
        await self._host.engine.forward_backward(ADAPTER, (self._datum(8),), LOSS)
        await self._update()

    async def _train(self, tokens: int) -> float:
        length = min(SEQUENCE_TOKENS, self._work.positions, tokens)
        data = tuple(self._datum(length) for _ in range(max(1, tokens // length)))
        took, _ = await _timed(self._host.engine.forward_backward(ADAPTER, data, LOSS))
        self._note(train_tokens_per_s=len(data) * length / took, pass_tokens=len(data) * length)
        return took

    async def _update(self) -> None:
        stepped, _ = await _timed(self._host.engine.optim_step(ADAPTER, Adam(learning_rate=1e-6)))
        published, _ = await _timed(self._host.engine.snapshot(ADAPTER, SNAPSHOT))
        self._note(update_s=stepped + published)

    async def _sample(self, rows: int, answer: int) -> float:
        prompt = self._tokens(min(PROMPT_TOKENS, max(1, self._work.positions // 2))).tobytes()
        params = SamplingParams(max_tokens=answer, stop_tokens=())
        took, result = await _timed(self._host.engine.sample(SNAPSHOT, prompt, rows, params))
        count = sum(len(sequence.tokens) // 4 for sequence in result.sequences)
        self._note(decode_tokens_per_s=count / took, rows=rows)
        return took

    def _datum(self, length: int) -> Datum:
        tokens, ones = self._tokens(length), np.ones(length, np.float32)
        inputs = {
            "target_tokens": Array(
                dtype="int64", shape=(length,), data=tokens.astype(np.int64).tobytes()
            ),
            "logprobs": Array(dtype="float32", shape=(length,), data=(-ones).tobytes()),
            "advantages": Array(dtype="float32", shape=(length,), data=ones.tobytes()),
        }
        return Datum(tokens=tokens.tobytes(), inputs=inputs)

    def _tokens(self, length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        chosen = random.Random(length).choices(self._vocabulary, k=length)  # noqa: S311 - no secret
        return np.asarray(chosen, np.int32)

    def _note(self, **figures: float) -> None:
        """With the most memory that the engine ever had resident; 0 where the system does not
        say.
        """
        peak_gb = 0.0
        with contextlib.suppress(OSError, IndexError, ValueError):
            status = Path(f"/proc/{self._host.pid}/status").read_text(encoding="utf-8")
            peak_gb = int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e9
        self.speed = msgspec.structs.replace(self.speed, **figures, peak_gb=peak_gb)


async def _timed(work: Awaitable[T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = await work
    return time.perf_counter() - began, result
