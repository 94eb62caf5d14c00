"""Measuring an engine, as a process of its own: `python -m halteres.agent.starting.probe SHAPE`.

Owns: what is timed: sampling, one training pass, one optimiser step; growing each until the figure is worth something;
the engine's peak memory.
Never: leaves an engine behind; needs a dataset, an environment or a service.

It prints one JSON line after every figure, each whole: whoever runs out of patience takes the last one.
"""

from __future__ import annotations

import asyncio
import random
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from halteres import process
from halteres.engine.process import EngineCommand, EngineProcess
from halteres.engine.protocol import Adam, Array, Datum, Engine, LoraConfig, LossSpec, ModelInfo, SamplingParams
from halteres.errors import HalteresError

T = TypeVar("T")

ADAPTER = SNAPSHOT = "probe"
LOSS = LossSpec(name="importance_sampling")
LONG_ENOUGH_S = 1.0
"""A figure measured over less time is measured again with four times the work."""

GROWTH = 4
FIRST_TOKENS = 64  # of the first training pass
FIRST_ROWS, FIRST_ANSWER = 8, 4  # of the first sampling


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured: an engine, and the largest piece of work that a run will give it at once."""

    backend: str
    folder: str
    name: str
    threads: int
    rank: int
    rows: int  # sequences decoded together
    prompt_tokens: int
    answer_tokens: int
    pass_tokens: int  # of one micro-batch
    sequence_tokens: int  # of one sequence in it


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured; 0: not yet."""

    load_s: float
    decode_tokens_per_s: float = 0.0
    train_tokens_per_s: float = 0.0
    update_s: float = 0.0  # optimiser step and publication
    peak_gb: float = 0.0  # of the engine's process
    rows: int = 0  # decoded together when that figure was taken
    pass_tokens: int = 0  # of the largest training pass
    share: float = 1.0  # of the processor time that the engine could have used, what it got: others may have been busy

    @property
    def complete(self) -> bool:
        """Whether a step's time can be told from it."""
        return self.decode_tokens_per_s > 0 and self.train_tokens_per_s > 0


def main() -> int:
    """Measure what argv names; exit code 0 with figures on stdout, 1 with one sentence on stderr."""
    process.begin("probe")
    try:
        asyncio.run(_measure(msgspec.json.decode(sys.argv[1], type=Shape)))
    except HalteresError as error:
        sys.stderr.write(f"error: {error.sentence}\n")
        return 1
    return 0


async def _measure(shape: Shape) -> None:
    with tempfile.TemporaryDirectory(prefix="halteres-probe-") as folder:
        began = time.perf_counter()
        command = EngineCommand(
            backend="scripted" if shape.backend == "scripted" else "torch",
            folder=Path(shape.folder),
            name=shape.name,
            threads=shape.threads,
        )
        host = EngineProcess(command, Path(folder) / "engine.log")
        await host.start()
        try:
            speed, info = Speed(load_s=time.perf_counter() - began), await host.engine.info()
            await _Probe(shape, host, speed, info, turns_of(host.pid)).run()
        finally:
            await host.stop()


@dataclass(slots=True)
class _Probe:
    """Figures as they come."""

    shape: Shape
    host: EngineProcess
    speed: Speed
    info: ModelInfo
    before: Turns

    async def run(self) -> None:
        """Measure in the order in which a figure is missed most, coarsely first."""
        await self.engine.create_adapter(ADAPTER, LoraConfig(rank=self.shape.rank, seed=0))
        await self._train(FIRST_TOKENS)
        await self._update()
        await self._sample(FIRST_ROWS, FIRST_ANSWER)  # all of it once: the first use of a kernel is slow
        await self._grow_training()
        await self._grow_sampling()
        await self._update()

    @property
    def engine(self) -> Engine:
        return self.host.engine

    async def _grow_training(self) -> None:
        tokens, took = FIRST_TOKENS, 0.0
        while took < LONG_ENOUGH_S and tokens < self.shape.pass_tokens:
            tokens = min(tokens * GROWTH, self.shape.pass_tokens)
            took = await self._train(tokens)

    async def _grow_sampling(self) -> None:
        rows, answer, took = FIRST_ROWS, FIRST_ANSWER, 0.0
        while took < LONG_ENOUGH_S and (rows, answer) != (self.shape.rows, self.shape.answer_tokens):
            rows, answer = min(rows * GROWTH, self.shape.rows), min(answer * GROWTH, self.shape.answer_tokens)
            took = await self._sample(rows, answer)

    async def _train(self, tokens: int) -> float:
        length = min(self.shape.sequence_tokens, tokens)
        data = tuple(self._datum(length) for _ in range(max(1, tokens // length)))
        took, _ = await _timed(lambda: self.engine.forward_backward(ADAPTER, data, LOSS))
        self._tell(train_tokens_per_s=len(data) * length / took, pass_tokens=len(data) * length)
        return took

    async def _update(self) -> None:
        async def update() -> None:
            await self.engine.optim_step(ADAPTER, Adam(learning_rate=1e-6))
            await self.engine.snapshot(ADAPTER, SNAPSHOT)

        if self.speed.update_s:  # the second time there is no gradient left over
            await self.engine.forward_backward(ADAPTER, (self._datum(8),), LOSS)
        took, _ = await _timed(update)
        self._tell(update_s=took)

    async def _sample(self, rows: int, answer: int) -> float:
        prompt = np.asarray(self._tokens(self.shape.prompt_tokens), np.int32).tobytes()
        params = SamplingParams(max_tokens=answer, stop_tokens=())
        took, result = await _timed(lambda: self.engine.sample(SNAPSHOT, prompt, rows, params))
        count = sum(len(sequence.tokens) // 4 for sequence in result.sequences)
        self._tell(decode_tokens_per_s=count / took, rows=rows)
        return took

    def _datum(self, length: int) -> Datum:
        targets = np.asarray(self._tokens(length), np.int64)
        ones = np.ones(length, np.float32)
        inputs = {
            "target_tokens": Array(dtype="int64", shape=(length,), data=targets.tobytes()),
            "logprobs": Array(dtype="float32", shape=(length,), data=(-ones).tobytes()),
            "advantages": Array(dtype="float32", shape=(length,), data=ones.tobytes()),
        }
        return Datum(tokens=np.asarray(self._tokens(length), np.int32).tobytes(), inputs=inputs)

    def _tokens(self, length: int) -> list[int]:
        return random.Random(length).choices(range(self.info.vocab_size), k=length)  # noqa: S311 - no secret

    def _tell(self, **figures: float) -> None:
        share = turns_of(self.host.pid).share_since(self.before)
        self.speed = msgspec.structs.replace(self.speed, **figures, peak_gb=peak_gb(self.host.pid), share=share)
        sys.stdout.write(msgspec.json.encode(self.speed).decode() + "\n")
        sys.stdout.flush()


async def _timed(work: Callable[[], Awaitable[T]]) -> tuple[float, T]:
    began = time.perf_counter()
    result = await work()
    return time.perf_counter() - began, result


@dataclass(frozen=True, slots=True)
class Turns:
    """How long a process has run, and has waited for its turn though it could have run; nanoseconds, all threads."""

    ran: int = 0
    waited: int = 0

    def share_since(self, before: Turns) -> float:
        """What it got of what it could have used; 1 where that is not known."""
        ran, waited = self.ran - before.ran, self.waited - before.waited
        return round(ran / (ran + waited), 3) if ran > 0 and waited >= 0 else 1.0


def turns_of(pid: int | None) -> Turns:
    """As Linux counts them; elsewhere none."""
    try:
        rows = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return Turns(sum(int(row[0]) for row in rows), sum(int(row[1]) for row in rows))
    except (OSError, IndexError, ValueError):  # a thread may just have ended
        return Turns()


def peak_gb(pid: int | None) -> float:
    """The most memory that a process ever had resident, in GB; where the kernel tells it of ended children alone, 0."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e9
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e9


if __name__ == "__main__":
    sys.exit(main())
