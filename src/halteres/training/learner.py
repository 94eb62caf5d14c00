"""A learner: what the loop needs of a model in training, and its values: a sent call, a pass, a checkpoint."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from halteres.errors import HalteresError, failed_future
from halteres.training.datums import Example, Row
from halteres.training.failures import LossNotFinite, RequestRefused, ServiceFailed

T = TypeVar("T")

CALL_S = 1800.0  # deadline of any one call: a pass over a large model takes long; for ever it must not


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What a forward-backward pass answered."""

    loss: float  # summed over tokens
    logprobs: tuple[Row, ...]  # per example, N: of its targets, before the step
    clipped: float | None = None  # tokens whose ratio the loss clipped; None of a loss or a service that does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A named checkpoint."""

    name: str
    step: int
    version: int
    state_path: str | None  # weights and optimiser; None where only sampler weights were written
    sampler_path: str


class SentCall(Generic[T]):
    """A call already sent to the service, to be awaited later."""

    def __init__(self, call: Awaitable[Any], name: str, read: Callable[[Any], T]) -> None:
        self._call, self._name, self._read = call, name, read

    def __await__(self) -> Generator[Any, None, T]:
        return self._redeem().__await__()

    async def _redeem(self) -> T:
        try:
            async with asyncio.timeout(CALL_S):
                answer = await self._call
        except HalteresError:
            raise
        except TimeoutError as error:
            raise ServiceFailed(f"The training service did not answer {self._name} within {CALL_S:.0f} s.") from error
        except Exception as error:
            raise _as_ours(error, self._name) from error
        return self._read(answer)


_SERVICE_SENTENCE = re.compile(r"Request failed: (.*) for self\.request_id=", re.DOTALL)
"""tinker 0.38 puts the service's sentence between its own words."""


def _as_ours(error: Exception, call: str) -> HalteresError:
    """What the SDK raised, as an error of ours, with the service's own sentence where there is one."""
    category = getattr(error, "category", None)  # of a RequestFailedError
    if category is None:
        return ServiceFailed(f"The training service's {call} raised {type(error).__name__}: {error}.")
    inside = _SERVICE_SENTENCE.search(str(error))
    code, sentence = failed_future(inside[1] if inside else str(error))
    if category != "user":
        return ServiceFailed(f"The training service failed at {call}: {sentence}")
    if code == LossNotFinite.code:
        return LossNotFinite(sentence, next="Resume from the last checkpoint with a lower trainer.learning_rate.")
    return RequestRefused(f"The training service refused {call}: {sentence}")


class Learner(Protocol):
    """A model in training. Methods that answer a SentCall have sent their request before they return."""

    @property
    def version(self) -> int:
        """Optimiser steps taken so far: the policy version."""
        ...

    @property
    def tempered(self) -> bool:
        """Sampled log-probabilities are those of the sampling temperature, which is not 1."""
        ...

    @property
    def update_norm(self) -> float | None:
        """Norm of what the adapter adds to the base weights, relative to theirs; None where nobody has said."""
        ...

    def forward_backward(self, examples: Sequence[Example]) -> SentCall[Pass]:
        """Accumulate the gradient of the loss summed over tokens. Awaiting it may raise LossNotFinite."""
        ...

    def forward(self, examples: Sequence[Example]) -> SentCall[tuple[Row, ...]]:
        """The log-probabilities of the examples' targets under the present weights, N of each; no gradient."""
        ...

    def reference(self, examples: Sequence[Example]) -> SentCall[tuple[Row, ...]]:
        """The same under the base model, which a KL penalty refers to."""
        ...

    def optim_step(self, learning_rate: float) -> SentCall[int]:
        """One optimiser step with what was accumulated; answers the new policy version."""
        ...

    async def publish(self) -> None:
        """Make the present weights the ones that environments sample."""
        ...

    async def save(self, name: str, step: int) -> Checkpoint:
        """A named checkpoint: state to resume from, weights to sample from."""
        ...

    async def save_baseline(self, name: str) -> Checkpoint:
        """Named sampler weights alone: what the evaluation before training samples."""
        ...
