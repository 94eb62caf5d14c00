"""Requests for scores, gathered: those of a few milliseconds are computed together, in one thread.

Owns: the order of requests (as they came), how many texts may wait, what was computed in what time.
Never: mixes two models in one computation; lets one text's failure reach another.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from halteres.errors import HalteresError, ServerError, boundary
from halteres.rewards.scorer import Model
from halteres.scores import Scorable, Score

GATHER_S = 0.003
"""How long the first request waits for others to be computed with."""

MOST_AT_ONCE = 256
"""Texts computed together, but for one request of more. The model sorts them by length and bounds each forward pass."""

MOST_WAITING = 4096
"""Texts that may wait; a client that brings more has to come again."""

Result = Score | HalteresError


class Busy(HalteresError):
    """Too many texts wait already."""

    code, status = "busy", 429


@dataclass(slots=True)
class Figures:
    """What this server has done since its start."""

    scored: int = 0  # texts
    failed: int = 0  # texts
    refused: int = 0  # requests, because of a full queue
    tokens: int = 0
    computations: int = 0
    busy_s: float = 0.0

    @property
    def texts_per_s(self) -> float:
        """While it computes; of a server that has computed nothing, a guess."""
        return (self.scored + self.failed) / self.busy_s if self.busy_s else 100.0


@dataclass(slots=True)
class _Request:
    model: str
    texts: Sequence[Scorable]
    results: asyncio.Future[Sequence[Result]]


@dataclass(slots=True)
class ScoringQueue:
    """One thread that scores, and those who wait for it. `work` runs for as long as the server does."""

    models: Mapping[str, Model]
    figures: Figures = field(default_factory=Figures)
    num_waiting: int = 0  # texts, those being computed too
    _requests: deque[_Request] = field(default_factory=deque["_Request"])
    _work_waits: asyncio.Event = field(default_factory=asyncio.Event)

    async def score(self, model: str, texts: Sequence[Scorable]) -> Sequence[Result]:
        """One raw score per text, in order; in place of one that could not be made, why.

        Raises:
            Busy: too many wait; `retry_after_s` says when to come again.
            ServerError: the computation failed, whatever the texts.
        """
        if self.num_waiting and self.num_waiting + len(texts) > MOST_WAITING:
            self.figures.refused += 1
            after_s = math.ceil(max(1.0, self.num_waiting / self.figures.texts_per_s / 2))
            raise Busy(
                f"{self.num_waiting} texts wait already.",
                f"With {len(texts)} more they are above {MOST_WAITING}.",
                f"Send them again in {after_s} s.",
                retry_after_s=after_s,
            )
        request = _Request(model, texts, asyncio.get_running_loop().create_future())
        self._requests.append(request)
        self.num_waiting += len(texts)
        self._work_waits.set()
        try:
            return await request.results
        finally:
            self.num_waiting -= len(texts)

    async def work(self) -> None:
        """Compute what comes, until cancelled."""
        with ThreadPoolExecutor(1, "scoring") as thread:
            while True:
                await self._work_waits.wait()
                await asyncio.sleep(GATHER_S)
                while gathered := self._gathered():
                    await self._compute(thread, gathered)
                self._work_waits.clear()

    def _gathered(self) -> list[_Request]:
        """The oldest requests, of one model."""
        gathered, num_texts = list[_Request](), 0
        for request in list(self._requests):
            if gathered and (request.model != gathered[0].model or num_texts + len(request.texts) > MOST_AT_ONCE):
                break
            gathered.append(self._requests.popleft())
            num_texts += len(request.texts)
        return gathered

    async def _compute(self, thread: ThreadPoolExecutor, gathered: Sequence[_Request]) -> None:
        model = self.models[gathered[0].model]
        texts = [text for request in gathered for text in request.texts]
        began = time.monotonic()
        try:
            with boundary(ServerError, "Scoring"):
                results = await asyncio.get_running_loop().run_in_executor(thread, model.score_each, texts)
        except HalteresError as error:
            for request in gathered:
                if not request.results.done():  # whoever asked may be gone
                    request.results.set_exception(error)
            return
        self._count(results, time.monotonic() - began)
        for request in gathered:
            own, results = results[: len(request.texts)], results[len(request.texts) :]
            if not request.results.done():
                request.results.set_result(own)

    def _count(self, results: Sequence[Result], seconds: float) -> None:
        scores = [result for result in results if isinstance(result, Score)]
        self.figures.scored += len(scores)
        self.figures.failed += len(results) - len(scores)
        self.figures.tokens += sum(score.num_tokens for score in scores)
        self.figures.computations += 1
        self.figures.busy_s += seconds
