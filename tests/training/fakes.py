"""Stand-ins for the trainer's two peers, and batches to feed it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from halteres.clients.critic import Rows, Updated, UpdateRequest
from halteres.clients.trajectories import TrainerRegistration
from halteres.errors import NotReady
from halteres.training.datums import Example, Row, to_sequence
from halteres.training.policy import Checkpoint, Pass, SentCall
from halteres.training.stopping import Stopping
from halteres.types import CONTEXT_LOGPROB, Batch, Group

REGISTRATION = TrainerRegistration(
    run_id="r1", batch_size=4, max_token_len=64, num_steps=4, max_staleness=0
)


def batch(*scores: Sequence[float], version: int = 0) -> Batch:
    """One group per score list; every sequence is two context and two action tokens."""
    return Batch(
        groups=tuple(
            Group(
                tokens=tuple((1, 2, 3 + i, 4) for i in range(len(group))),
                masks=tuple((-100, -100, 3 + i, 4) for i in range(len(group))),
                scores=tuple(group),
                logprobs=((1.0, 1.0, -0.5, -0.25),) * len(group),
                versions=((version, version),) * len(group),
            )
            for group in scores
        )
    )


def example(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    advantage: float,
    versions: tuple[int, int] | None = None,
) -> Example:
    """One sequence whose sampled tokens, those without the sentinel, have one advantage."""
    made = to_sequence(tokens, logprobs, np.asarray(logprobs) != CONTEXT_LOGPROB, versions)
    return replace(
        made, advantages_N=np.where(made.actions_N, np.float32(advantage), np.float32(0))
    )


class FakeServer:
    """A trajectory server whose batches are what `make` returns for each version; None: not yet."""

    def __init__(self, make: Callable[[int], Batch | None]) -> None:
        self.make, self.versions = make, list[int]()
        self.registered: list[TrainerRegistration] = []
        self.num_accepted = 0

    def register(self, registration: TrainerRegistration) -> int:
        self.registered.append(registration)
        return 1

    def batch(self, policy_version: int, *, deadline_s: float) -> Batch:
        self.versions.append(policy_version)
        if (batch := self.make(policy_version)) is None:
            raise NotReady(f"No batch came within {deadline_s:g} s.", "Nobody is here.")
        return batch

    def diagnostics(self) -> dict[str, Any]:
        return {"groups_accepted": self.num_accepted}


class FakePolicy:
    """A learner that writes down what it was asked, in order, and agrees with its sampler to the
    last bit.
    """

    def __init__(self, version: int = 0, calls: list[str] | None = None) -> None:
        self.version, self.calls = version, [] if calls is None else calls
        self.update_norm: float | None = 0.01
        self.tempered = False
        self.exact = True
        self.loss: Callable[[], float] = lambda: -1.0
        self.trained: list[int] = []
        self.rates: list[float] = []
        self.drift = 0.0  # of every sampled token's log-probability since it was sampled
        self.divergence = 0.0  # of every sampled token, from the reference policy

    def forward_backward(self, examples: Sequence[Example]) -> SentCall[Pass]:
        self.calls.append("forward_backward")
        self.trained.append(len(examples))
        self.examples = list(examples)
        logprobs = tuple(example.logprobs_N + np.float32(0) for example in examples)
        return SentCall(
            soon(None), "forward_backward", lambda _: Pass(loss=self.loss(), logprobs=logprobs)
        )

    def forward(self, examples: Sequence[Example]) -> SentCall[tuple[Row, ...]]:
        self.calls.append("forward")
        rows = tuple(example.logprobs_N + np.float32(self.drift) for example in examples)
        return SentCall(soon(None), "forward", lambda _: rows)

    def reference(self, examples: Sequence[Example]) -> SentCall[tuple[Row, ...]]:
        self.calls.append("reference")
        rows = tuple(example.logprobs_N - np.float32(self.divergence) for example in examples)
        return SentCall(soon(None), "reference", lambda _: rows)

    def optim_step(self, learning_rate: float) -> SentCall[int]:
        self.calls.append("optim_step")
        self.rates.append(learning_rate)
        return SentCall(soon(None), "optim_step", self._step)

    async def publish(self) -> None:
        self.calls.append(f"publish {self.version}")

    async def save(self, name: str, step: int, *, with_state: bool = True) -> Checkpoint:
        self.calls.append(f"save {name}")
        state_path = f"tinker://t/weights/{name}" if with_state else None
        sampler_path = f"tinker://t/sampler_weights/{name}"
        return Checkpoint(
            name=name,
            step=step,
            version=self.version,
            state_path=state_path,
            sampler_path=sampler_path,
        )

    def _step(self, _: None) -> int:
        self.version += 1
        return self.version


class FakeCritic:
    """A critic's process that answers one value for every place, and writes down what it is
    asked.
    """

    def __init__(self, value: float = 0.0, calls: list[str] | None = None) -> None:
        self.value, self.calls = value, [] if calls is None else calls
        self.updates: list[UpdateRequest] = []
        self.fails: Exception | None = None

    async def values(self, step: int, sequences: Sequence[Rows]) -> list[list[float]]:
        self.calls.append(f"values {step}")
        if self.fails:
            raise self.fails
        return [[self.value] * len(one.rows) for one in sequences]

    async def update(self, request: UpdateRequest) -> Updated:
        self.calls.append(f"update {request.step}")
        self.updates.append(request)
        if self.fails:
            raise self.fails
        return Updated(step=request.step, loss=0.5, clipped=0.25, gradient_norm=1.0)

    async def save(self, step: int) -> None:
        self.calls.append(f"keep {step}")


class _Soon:
    """Awaitable that has not begun before it is awaited, so that an unredeemed promise leaves
    nothing behind.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Any:
        yield from asyncio.sleep(0).__await__()
        return self._value


def soon(value: Any) -> _Soon:
    return _Soon(value)


def stopping(folder: Path, max_minutes: float | None = None) -> Stopping:
    return Stopping(folder / "control" / "stop.json", max_minutes)
