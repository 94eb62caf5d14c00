"""The engines of one service: one trains, one or more sample. Ours do both, so that one may be all
of them.

What an engine held dies with it. Whoever keeps something in an engine therefore remembers the
engine itself, and compares: `placement.engine is host.engine`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from halteres.engine.process import State
from halteres.engine.protocol import (
    BaseType,
    Engine,
    EngineGone,
    HoldsModel,
    LoraConfig,
    ModelInfo,
    Samples,
    Target,
    Trains,
)
from halteres.engine.shapes import MAX_RANK, TARGETS_OF_ADAPTERS
from halteres.errors import HalteresError, InvalidData, NotReady, ServerError

T = TypeVar("T")
E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)

READY_S = 900.0  # how long a request waits for an engine that is starting
# engines that may die under one request before it is held to be the cause, and fails
MAX_DEATHS = 3


class EngineDied(ServerError):
    """The engine died again and again under one request."""

    code = "engine_died"


class Host(Protocol[E_co]):
    """Keeps one engine alive, and says how it is without asking it."""

    @property
    def state(self) -> State:
        """Of the engine."""
        ...

    @property
    def restarts(self) -> int:
        """How many engines have taken the place of one that died."""
        ...

    @property
    def failure(self) -> HalteresError | None:
        """Why the engine last died."""

    @property
    def pid(self) -> int | None:
        """Of its process, where it has one on this machine."""

    @property
    def info(self) -> ModelInfo | None:
        """What the engine answered before it was ready; of its predecessor while it starts again;
        None until one was ever ready.
        """

    @property
    def engine(self) -> E_co:
        """The engine now running: another object after each restart, for it holds nothing of what
        the one before held. Once a call of it has failed with EngineGone another is started.

        Raises:
            NotReady: none was ever ready.
        """
        ...

    async def start(self) -> None:
        """Start it and wait until it is ready; a HalteresError where it cannot be."""

    async def stop(self) -> None:
        """End it. Calls that wait for it fail with EngineGone."""

    async def settled(self, restarts: int = 0) -> None:
        """Wait until it is ready, after at least so many restarts, or failed or stopped."""


Pick = Callable[[Collection[Host[E]]], Host[E]]
"""Which host a request goes to, given those whose engine died under it and has no successor yet:
their state may not say so yet.
"""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Who trains, and who samples."""

    trainer: Host[Trains]
    samplers: tuple[Host[Samples], ...]  # at least one
    # what an adapter may be on so that a sampler takes it, and its largest rank, as far as is known
    # before one is ready
    targets: tuple[Target, ...] = TARGETS_OF_ADAPTERS
    max_rank: int = MAX_RANK

    @classmethod
    def of(
        cls,
        host: Host[Engine],
        *samplers: Host[Samples],
        targets: tuple[Target, ...] = TARGETS_OF_ADAPTERS,
        max_rank: int = MAX_RANK,
    ) -> Fleet:
        """One engine that trains; it samples too where no other does."""
        return cls(host, samplers or (host,), targets, max_rank)

    def check_adapter(self, lora: LoraConfig) -> None:
        """InvalidData for an adapter that no sampler can be given."""
        if lora.train_unembed and "unembed" not in self.targets:
            raise InvalidData(
                "An adapter with an unembedding cannot be sampled here.",
                "Every sampler of this service is a vLLM, which ignores that part.",
                "Create it with train_unembed=False.",
            )
        if lora.rank > self.max_rank:
            raise InvalidData(
                f"An adapter of rank {lora.rank} cannot be sampled here.",
                f"Every sampler of this service is a vLLM that takes ranks up to {self.max_rank}.",
                "Create it with a smaller rank, or start the service with a larger --lora-rank.",
            )

    @property
    def apart(self) -> bool:
        """The trainer does not sample: weights reach the samplers as folders."""
        return self.trainer not in self.samplers

    @property
    def hosts(self) -> tuple[Host[Trains | Samples], ...]:
        """Each once, the trainer first."""
        return (self.trainer, *self.samplers) if self.apart else (self.trainer,)

    @property
    def trouble(self) -> str:
        """Why not every request can be executed now; "" where it can."""
        if self.trainer.state != "ready":
            what, host = "The trainer" if self.apart else "The engine", self.trainer
        elif not self.samples:
            what, host = "The sampler", self.samplers[0]
        else:
            return ""
        return (
            f"{what} is not ready. {host.failure.sentence if host.failure else 'It is starting.'}"
        )

    @property
    def samples(self) -> bool:
        """A sampler is there."""
        return any(host.state == "ready" for host in self.samplers)

    @property
    def samples_exactly(self) -> bool | None:
        """Whether the same request has the same bits in every sampler; None while none was ever
        ready. Else what one has answered is kept: nothing can compute it again.
        """
        known = [host.info.exact for host in self.samplers if host.info is not None]
        return all(known) if known else None

    @property
    def published_type(self) -> BaseType:
        """Of unnamed weights that are written for the samplers: that of the base weights where all
        are engines of others; ours have the trainer's bits, which are fp32.
        """
        trainer = self.trainer.info
        infos = [host.info for host in self.samplers]
        if trainer is None or any(info is None or info.trains for info in infos):
            return "float32"
        if trainer.dtype == "bfloat16":
            return "bfloat16"
        return "float32"

    @property
    def any_sampler(self) -> Host[Samples]:
        """One that is ready, where one is."""
        return next((host for host in self.samplers if host.state == "ready"), self.samplers[0])

    async def context(self) -> int:
        """Tokens of the longest sequence that every sampler reads whose figure is known; one is
        waited for where none was ever ready.
        """
        known = self.known_context
        if known is not None:
            return known
        return (await info_of(self.any_sampler)).max_context_length

    @property
    def known_context(self) -> int | None:
        """The same without waiting; None where no sampler was ever ready."""
        known = [host.info.max_context_length for host in self.samplers if host.info is not None]
        return min(known, default=None)


async def running(host: Host[E], *, restarts: int = 0) -> E:
    """The engine, once it is ready after at least so many restarts."""
    try:
        async with asyncio.timeout(READY_S):
            await host.settled(restarts)
    except TimeoutError:
        raise NotReady(
            f"The engine is not ready after {READY_S:g} s.", next="Ask again in a moment."
        ) from None
    if host.state != "ready":
        raise NotReady(
            "No engine is running.",
            host.failure.sentence if host.failure else "",
            "Restart the service.",
        )
    return host.engine


async def info_of(host: Host[HoldsModel]) -> ModelInfo:
    """What a host's engine is; one that never was ready is waited for."""
    return host.info or await (await running(host)).info()


async def with_failover(pick: Pick[E], call: Callable[[E], Awaitable[T]]) -> T:
    """The result of a call that needs nothing an engine held before; if that engine dies under it,
    the next is asked. Raises as `failover_engines`.
    """
    async with aclosing(failover_engines(pick)) as engines:
        async for engine in engines:
            try:
                return await call(engine)
            except EngineGone:
                continue
    raise AssertionError("failover_engines ends by raising")


async def failover_engines(pick: Pick[E]) -> AsyncGenerator[E, None]:
    """The engine of the host that is picked, and after each death that of the one then picked, as
    long as the caller asks; EngineDied where engines keep dying under this one request, NotReady
    where none is running.
    """
    before: dict[Host[E], int] = {}  # restarts of those whose engine died
    why = ""
    for _ in range(MAX_DEATHS):
        host = pick([one for one, restarts in before.items() if one.restarts == restarts])
        engine = await running(host, restarts=before.get(host, -1) + 1)
        before[host] = host.restarts
        yield engine
        why = host.failure.sentence if host.failure else ""
    what = f"The engine died {MAX_DEATHS} times while it executed this request."
    raise EngineDied(what, why, "Send less at once: fewer, shorter or smaller pieces.")
