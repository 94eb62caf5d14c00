"""Agreement: how far each sampler that is not exact differs from the engine that trains.

One in RECOMPUTED of its answers is computed again there, one at a time, beside everything else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from halteres.engine.protocol import (
    Engine,
    ExtraLogprobs,
    SampleResult,
    Samples,
    SamplingParams,
)
from halteres.errors import HalteresError, ServerError, boundary
from halteres.service.fleet import Fleet, Host
from halteres.service.sampling.snapshots import Snapshot, Snapshots

RECOMPUTED = 64  # answers of a sampler, of which the first is computed again

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Figures:
    """Of one sampler, over all that was computed again."""

    answers: int = 0
    tokens: int = 0
    squares: float = 0.0  # sum of squared differences of log-probability
    largest: float = 0.0  # absolute difference, nats

    @property
    def facts(self) -> dict[str, Any]:
        """As an answer has them."""
        mean = self.squares / (2 * self.tokens) if self.tokens else None
        return {
            "answers": self.answers,
            "tokens": self.tokens,
            "half_mean_square": mean,
            "largest": self.largest,
        }


class Agreement:
    """The figures of a fleet."""

    def __init__(self, fleet: Fleet, snapshots: Snapshots, tasks: asyncio.TaskGroup) -> None:
        self._fleet, self._snapshots, self._tasks = fleet, snapshots, tasks
        self._seen = Counter[Host[Samples]]()  # answers
        self._figures: dict[Host[Samples], Figures] = {}
        self._is_busy = False

    def of(self, host: Host[Samples]) -> dict[str, Any] | None:
        """Figures of a sampler; None where nothing of it was computed again."""
        figures = self._figures.get(host)
        if figures is None:
            return None
        return figures.facts

    def note(
        self,
        engine: Samples,
        snapshot: Snapshot | None,
        prompt: bytes,
        params: SamplingParams,
        result: SampleResult,
    ) -> None:
        """An engine has answered."""
        host = next((one for one in self._fleet.samplers if _is_of(one, engine)), None)
        if host is None or not self._fleet.apart:
            return
        self._seen[host] += 1
        is_raw = params.logprobs == "raw" or params.temperature in (0, 1)
        if self._seen[host] % RECOMPUTED == 1 and is_raw and not self._is_busy:
            self._is_busy = True
            work = self._recompute(host, snapshot, prompt, result)
            self._tasks.create_task(work, name="agreement")

    async def _recompute(
        self, host: Host[Samples], snapshot: Snapshot | None, prompt: bytes, result: SampleResult
    ) -> None:
        sequence = result.sequences[0]
        try:
            with boundary(ServerError, "The agreement of a sampler"):
                trainer = self._fleet.trainer
                info = trainer.info
                if trainer.state != "ready" or info is None or not info.samples:
                    return
                engine = cast("Engine", trainer.engine)
                tokens = (prompt + sequence.tokens)[: 4 * (info.max_context_length - 1)]
                async with self._snapshots.resident(snapshot, engine):
                    scored = await engine.sample(
                        snapshot.name if snapshot else None,
                        tokens,
                        1,
                        SamplingParams(max_tokens=1),
                        ExtraLogprobs(prompt_logprobs=True),
                    )
                assert scored.prompt_logprobs is not None  # noqa: S101 - it was asked for
                own = np.frombuffer(scored.prompt_logprobs, np.float32)[len(prompt) // 4 :]
                theirs = np.frombuffer(sequence.logprobs, np.float32)[: len(own)]
                apart = own.astype(np.float64) - theirs
                figures = self._figures.setdefault(host, Figures())
                figures.answers += 1
                figures.tokens += len(apart)
                figures.squares += float(np.square(apart).sum())
                figures.largest = max(figures.largest, float(np.abs(apart).max(initial=0.0)))
        except HalteresError as error:
            log.warning("A sampler's answer could not be computed again: %s", error)
        finally:
            self._is_busy = False


def _is_of(host: Host[Samples], engine: Samples) -> bool:
    """Whether it is this host's engine, which is not exact."""
    return (
        host.info is not None
        and not host.info.exact
        and host.state == "ready"
        and host.engine is engine
    )
