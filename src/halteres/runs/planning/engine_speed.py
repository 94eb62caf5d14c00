"""How fast an engine computes on this machine.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from halteres.config import environ
from halteres.config.settings import Settings
from halteres.engine.limits import DECODE_ROWS, PASS_TOKENS
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
from halteres.errors import HalteresError
from halteres.files import replace_file
from halteres.process import usable_cores
from halteres.runs.planning.models import RunModel
from halteres.runs.planning.resources import Machine, Workload

T = TypeVar("T")

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
