"""How fast an engine computes with a model on this machine: measured once, on the engine itself, and remembered.

Sampling, one training pass and one optimiser step are timed, the coarsest figures first; each is measured again with
more work until it is worth something. What was measured in time counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from halteres.config import environ
from halteres.engine.process import EngineCommand, EngineProcess
from halteres.engine.protocol import Adam, Array, BaseType, Datum, LoraConfig, LossSpec, SamplingParams
from halteres.errors import HalteresError
from halteres.files import replace_file
from halteres.process import usable_cores
from halteres.runs.starting import resources
from halteres.runs.starting.preflight import Plan
from halteres.runs.starting.resources import DECODE_ROWS, PASS_TOKENS, Workload
from halteres.runs.starting.run_models import RunModel

T = TypeVar("T")

DEADLINE_S = 20.0

PROMPT_TOKENS, ANSWER_TOKENS, SEQUENCE_TOKENS = 64, 64, 256  # of what is measured, where a run allows more
LONG_ENOUGH_S, GROWTH = 1.0, 4  # a figure measured over less time is measured again with so many times the work
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

    @property
    def complete(self) -> bool:
        """Whether a step's time can be foretold from it."""
        return self.decode_tokens_per_s > 0 and self.train_tokens_per_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The engine that a run would start."""

    backend: str
    model: RunModel
    threads: int
    dtype: BaseType = "float32"
    device: str | None = None  # None: by HALTERES_DEVICE

    @classmethod
    def of(cls, plan: Plan, model: RunModel) -> Engine:
        """The plan's own; it has none where somebody else's service is used."""
        asked = plan.settings.inference
        threads = asked.threads or max(1, usable_cores() - 1)
        return cls(backend=asked.engine, model=model, threads=threads, dtype=asked.dtype, device=asked.device)

    @property
    def key(self) -> str:
        """Under which its speed is remembered: model, engine, threads, machine."""
        folder = Path(self.model.tokenizer)
        written = (folder / "config.json").stat().st_mtime_ns
        computed = f"{self.backend}/{self.dtype}/{self.device}/{self.threads} threads"
        return f"{folder}@{written}/{computed}/{resources.look(self.device).mark}"


def remembered(engine: Engine) -> Speed | None:
    """What was measured on this machine, or None."""
    return _cached().get(engine.key)


def _cache_file() -> Path:
    return environ.home() / "cache" / "engine_speeds.json"


def _cached() -> dict[str, Speed]:
    try:
        return msgspec.json.decode(_cache_file().read_bytes(), type=dict[str, Speed])
    except (OSError, msgspec.DecodeError):
        return {}


def measured(engine: Engine, work: Workload, deadline_s: float = DEADLINE_S) -> Speed | None:
    """Measure now, and remember it; None where no figure was worth anything within the deadline."""
    probe = _Probe(engine, work)
    with contextlib.suppress(HalteresError, OSError, TimeoutError):  # no engine can be started, or not in time
        asyncio.run(asyncio.wait_for(probe.run(), deadline_s))
    if not probe.speed.complete:
        return None
    with contextlib.suppress(OSError):  # a disk that will not have it costs the next one who asks some seconds
        _cache_file().parent.mkdir(parents=True, exist_ok=True)
        cache = {**_cached(), engine.key: probe.speed}
        replace_file(_cache_file(), msgspec.json.format(msgspec.json.encode(cache), indent=1) + b"\n")
    return probe.speed


class _Probe:
    """One engine, and its figures as they come."""

    def __init__(self, engine: Engine, work: Workload) -> None:
        self._engine, self._work, self.speed = engine, work, Speed()

    async def run(self) -> None:
        """Start the engine, measure, and end it."""
        command = EngineCommand(
            backend="scripted" if self._engine.backend == "scripted" else "torch",
            folder=Path(self._engine.model.tokenizer),
            name=self._engine.model.name,
            threads=self._engine.threads,
            dtype=self._engine.dtype,
            device=self._engine.device,
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
        await self._sample(FIRST_ROWS, FIRST_ANSWER)  # all of it once: the first use of a kernel is slow
        tokens, took = FIRST_TOKENS, 0.0
        while took < LONG_ENOUGH_S and tokens < PASS_TOKENS:
            tokens = min(tokens * GROWTH, PASS_TOKENS)
            took = await self._train(tokens)
        most_rows, longest = min(work.rows, work.batch_size, DECODE_ROWS), min(ANSWER_TOKENS, work.answer_tokens)
        rows, answer, took = FIRST_ROWS, FIRST_ANSWER, 0.0
        while took < LONG_ENOUGH_S and (rows, answer) != (most_rows, longest):
            rows, answer = min(rows * GROWTH, most_rows), min(answer * GROWTH, longest)
            took = await self._sample(rows, answer)
        await self._host.engine.forward_backward(ADAPTER, (self._datum(8),), LOSS)  # no gradient is left over
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
        length = min(PROMPT_TOKENS, max(1, self._work.positions // 2))
        prompt = np.asarray(self._tokens(length), np.int32).tobytes()
        params = SamplingParams(max_tokens=answer, stop_tokens=())
        took, result = await _timed(self._host.engine.sample(SNAPSHOT, prompt, rows, params))
        count = sum(len(sequence.tokens) // 4 for sequence in result.sequences)
        self._note(decode_tokens_per_s=count / took, rows=rows)
        return took

    def _datum(self, length: int) -> Datum:
        targets, ones = np.asarray(self._tokens(length), np.int64), np.ones(length, np.float32)
        inputs = {
            "target_tokens": Array(dtype="int64", shape=(length,), data=targets.tobytes()),
            "logprobs": Array(dtype="float32", shape=(length,), data=(-ones).tobytes()),
            "advantages": Array(dtype="float32", shape=(length,), data=ones.tobytes()),
        }
        return Datum(tokens=np.asarray(self._tokens(length), np.int32).tobytes(), inputs=inputs)

    def _tokens(self, length: int) -> list[int]:
        return random.Random(length).choices(self._vocabulary, k=length)  # noqa: S311 - no secret

    def _note(self, **figures: float) -> None:
        self.speed = msgspec.structs.replace(self.speed, **figures, peak_gb=_peak_gb(self._host.pid))


async def _timed(work: Awaitable[T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = await work
    return time.perf_counter() - began, result


def _peak_gb(pid: int | None) -> float:
    """The most memory that a process ever had resident, in GB; 0 where the system does not say."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
