"""`foreign_sampler` behind the protocol `Samples`, and the command that starts it: what a module for
another kind of sampler has to be.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import aiohttp
import numpy as np

from halteres.config import environ
from halteres.engine import checks
from halteres.engine.connection import CALL_DEADLINE_S
from halteres.engine.protocol import (
    EngineGone,
    ExtraLogprobs,
    ModelInfo,
    Piece,
    SampleResult,
    SamplingParams,
    Sequence,
    Weights,
)
from halteres.errors import HalteresError, InvalidData, ServerError, UserError
from halteres.loopback import open_listener, url_of
from halteres.process import Child

from . import foreign_sampler


class ForeignSampler:
    """One process of it."""

    def __init__(self, url: str, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._http = aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(CALL_DEADLINE_S))
        self._facts: ModelInfo | None = None
        self._failure: HalteresError | None = None
        self.broken = asyncio.Event()
        self.held: dict[str, Weights] = {}

    # What the service asks

    async def info(self) -> ModelInfo:
        facts = await self._ask("GET", "/facts")
        self._facts = ModelInfo(
            name=self._name,
            folder=str(self._folder),
            architecture="foreign",
            vocab_size=facts["vocabulary"],
            max_context_length=facts["context"],
            num_parameters=0,
            dtype="float32",
            device="cpu",
            threads=1,
            trains=False,
        )
        return self._facts

    async def hold(self, name: str, source: Weights) -> int:
        if source.folder is None:
            raise UserError("This sampler takes weights as folders alone.")
        await asyncio.to_thread(checks.check_weights, source, Path(source.folder))
        await self._ask("POST", "/load", name=name, folder=source.folder)
        self.held[name] = source
        return source.version

    async def drop(self, name: str) -> None:
        if self.held.pop(name, None) is not None:
            await self._ask("POST", "/unload", name=name)

    async def sample(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        extra: ExtraLogprobs = ExtraLogprobs(),  # noqa: B008 - frozen
    ) -> SampleResult:
        facts = self._facts or await self.info()
        limit = checks.check_sampling(prompt, num_samples, params, facts, extra)
        if extra != ExtraLogprobs():
            raise UserError("This sampler gives log-probabilities of its own tokens alone.")
        answer = await self._ask(
            "POST",
            "/generate",
            adapter=snapshot,
            prompt=np.frombuffer(prompt, np.int32).tolist(),
            count=num_samples,
            length=limit,
        )
        sequences = tuple(
            Sequence(
                tokens=np.asarray(one["tokens"], np.int32).tobytes(),
                logprobs=np.asarray(one["logprobs"], np.float32).tobytes(),
                stop_reason="length",
            )
            for one in answer["sequences"]
        )
        return SampleResult(sequences=sequences, version=self._version(snapshot))

    async def stream(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        extra: ExtraLogprobs = ExtraLogprobs(),  # noqa: B008 - frozen
    ) -> AsyncIterator[Piece]:
        whole = await self.sample(snapshot, prompt, num_samples, params, extra)
        for number, sequence in enumerate(whole.sequences):
            yield Piece(
                sample=number,
                tokens=sequence.tokens,
                logprobs=sequence.logprobs,
                version=whole.version,
                stop_reason=sequence.stop_reason,
            )

    async def close(self) -> None:
        await self.disconnect()

    # What its host asks

    def fail(self, error: HalteresError) -> None:
        """Later calls raise it; those that wait raise it when the process ends."""
        self._failure = error
        self.broken.set()

    async def disconnect(self) -> None:
        if self._failure is None:
            self.fail(EngineGone("The connection to the sampler was closed."))
        await self._http.close()

    # Inside

    def _version(self, snapshot: str | None) -> int:
        return 0 if snapshot is None else self.held[snapshot].version

    async def _ask(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        if self._failure is not None:
            raise self._failure
        try:
            async with self._http.request(method, path, json=body or None) as response:
                answer = await response.json()
        except aiohttp.ClientError as error:
            if self._failure is None:
                self.fail(EngineGone("The sampler is gone.", f"{type(error).__name__}."))
            assert self._failure is not None
            raise self._failure from error
        if response.status != 200:
            kind = ServerError if response.status >= 500 else InvalidData
            raise kind(f"The sampler refused {path}.", answer.get("why", ""))
        return answer


@dataclass(frozen=True, slots=True)
class SpawnedSampler:
    """A process that is about to serve."""

    process: Child
    url: str
    command: ForeignCommand

    async def connect(self) -> ForeignSampler:
        """Its first answer comes when it serves: until then the request waits in its socket."""
        return ForeignSampler(self.url, self.command.name, self.command.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignCommand:
    """How it is started."""

    name: str  # of the base model
    folder: Path
    gate: Path | None = None  # a named pipe: it serves once that was opened for writing

    def spawn(self, log: IO[bytes]) -> SpawnedSampler:
        gate = [] if self.gate is None else [str(self.gate)]
        with open_listener(0) as bound:
            process = Child(
                [sys.executable, foreign_sampler.__file__, str(bound.fileno()), *gate],
                environment=environ.for_sandboxed(),
                descriptors=[bound.fileno()],
                stdout=log,
                stderr=log,
            )
            return SpawnedSampler(process, url_of(bound, "http"), self)
