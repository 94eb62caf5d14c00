"""What was measured on this machine, the ground of an estimate: earlier runs, and the engine's speed with a model.

A run counts where model, environment and engine are the same; an engine is measured once by `probe`, in a process of
its own, and the figure is remembered.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from halteres.agent.starting.probe import Shape, Speed
from halteres.config import environ
from halteres.errors import NotFound
from halteres.files import replace_file
from halteres.observe.metrics import Row
from halteres.process import usable_cores
from halteres.runs.directory import RunDirectory, list_runs
from halteres.runs.starting import machine
from halteres.runs.starting.base_model import RunModel
from halteres.runs.starting.machine import DECODE_ROWS, PASS_TOKENS, Workload, workload_of
from halteres.runs.starting.preflight import Ground, Plan
from halteres.runs.state import RunState


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

    def __mul__(self, factor: float) -> Span:
        return Span(self.low * factor, self.high * factor)

    def wider(self, low: float, high: float) -> Span:
        """Each bound times its factor."""
        return Span(self.low * low, self.high * high)

    def within(self, least: float, most: float) -> Span:
        """Both bounds brought between these."""
        return Span(min(max(self.low, least), most), min(max(self.high, least), most))

    @property
    def rounded(self) -> list[float]:
        """Three significant digits."""
        return [float(f"{self.low:.3g}"), float(f"{self.high:.3g}")]


def quantiles(values: list[float], low: float, high: float) -> Span:
    """The bounds between which that part of the values lies. There must be some.

    >>> quantiles([3.0, 1.0, 2.0], 0.0, 0.5)
    Span(low=1.0, high=2.0)
    """
    ordered = sorted(values)
    last = len(ordered) - 1
    return Span(ordered[round(low * last)], ordered[round(high * last)])


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


DEADLINE_S = 20.0
UNDISTURBED = 0.8
"""With less of the processor than this a figure holds for a busy machine, and is not remembered for later."""

PROMPT_TOKENS, ANSWER_TOKENS, SEQUENCE_TOKENS = 64, 64, 256
"""Of what is measured, where a run allows more."""


class _Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the cache."""

    speed: Speed
    at: float  # unix seconds


_Cache = dict[str, _Measured]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The engine that a run would start."""

    backend: str
    model: RunModel
    threads: int

    @classmethod
    def of(cls, plan: Plan, model: RunModel) -> Engine:
        """The plan's own; it has none where somebody else's service is used."""
        asked = plan.settings.inference
        return cls(backend=asked.engine, model=model, threads=asked.threads or max(1, usable_cores() - 1))

    @property
    def key(self) -> str:
        """Under which its speed is remembered: model, engine, threads, machine."""
        folder = Path(self.model.tokenizer)
        written = (folder / "config.json").stat().st_mtime_ns
        return f"{folder}@{written}/{self.backend}/{self.threads} threads/{machine.look().mark}"


def remembered(engine: Engine) -> Speed | None:
    """What was measured on this machine, or None."""
    found = _read().get(engine.key)
    return found.speed if found else None


def measured(engine: Engine, work: Workload, deadline_s: float = DEADLINE_S) -> Speed | None:
    """Measure now; None where no figure was worth anything within the deadline."""
    shape = Shape(
        backend=engine.backend,
        folder=engine.model.tokenizer,
        name=engine.model.name,
        threads=engine.threads,
        rank=work.rank,
        rows=min(work.rows, work.batch_size, DECODE_ROWS),
        prompt_tokens=min(PROMPT_TOKENS, max(1, work.positions // 2)),
        answer_tokens=min(ANSWER_TOKENS, work.answer_tokens),
        pass_tokens=PASS_TOKENS,
        sequence_tokens=min(SEQUENCE_TOKENS, work.positions),
    )
    speed = _probe(shape, deadline_s)
    if speed is None or not speed.complete:
        return None
    if speed.share >= UNDISTURBED:
        _keep(engine.key, _Measured(speed=speed, at=time.time()))
    return speed


def _probe(shape: Shape, deadline_s: float) -> Speed | None:
    """The last figures that the probe printed in time. It ends with its lifeline, and its engine with it."""
    lifeline, ours = os.pipe()
    with tempfile.TemporaryDirectory(prefix="halteres-", ignore_cleanup_errors=True) as folder:
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "halteres.agent.starting.probe", msgspec.json.encode(shape).decode()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(lifeline,),
                env=environ.for_sandboxed(HALTERES_LIFELINE_FD=str(lifeline), TMPDIR=folder),
                start_new_session=True,
            )
            return _last(_printed(child, deadline_s))
        except OSError:  # no process can be started now
            return None
        finally:
            os.close(ours)
            os.close(lifeline)


def _printed(child: subprocess.Popen[bytes], deadline_s: float) -> bytes:
    try:
        return child.communicate(timeout=deadline_s)[0]
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # its engine, in a group of its own, ends with its lifeline
        return child.communicate()[0]


def _last(printed: bytes) -> Speed | None:
    for line in reversed(printed.splitlines()):
        try:
            return msgspec.json.decode(line, type=Speed)
        except msgspec.DecodeError:
            continue  # cut off
    return None


def _file() -> Path:
    return environ.home() / "cache" / "estimates.json"


def _read() -> _Cache:
    try:
        return msgspec.json.decode(_file().read_bytes(), type=_Cache)
    except (OSError, msgspec.DecodeError):
        return {}


def _keep(key: str, measured: _Measured) -> None:
    """Remember it; a disk that will not have it costs the next one who asks some seconds."""
    with contextlib.suppress(OSError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        cache = msgspec.to_builtins({**_read(), key: measured})
        replace_file(_file(), json.dumps(cache, indent=1).encode() + b"\n")
