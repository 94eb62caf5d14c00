"""Run-addressed inference: the newest policy of a run, for its environments.

Owns: which weights a request means, prompts to tokens and tokens to text, the journal's row of each request.
Never: shapes an answer (`routes.inference` does).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from halteres.engine.protocol import SampleResult
from halteres.engine.protocol import Sequence as SampledSequence
from halteres.errors import HalteresError, InvalidData
from halteres.service.base import BaseModel
from halteres.service.checkpoints import Checkpoints
from halteres.service.journal import Entry, Journal
from halteres.service.promises import failure
from halteres.service.samplers import Samplers
from halteres.service.sampling import Samples, checked_seed, drawn_seed, packed
from halteres.service.snapshots import Snapshot, Snapshots
from halteres.service.wire.codec import JSON
from halteres.service.wire.inference import Sampled
from halteres.text import Tokenizer

MAX_PROMPTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One sampled sequence, as tokens and as text."""

    tokens: list[int]
    logprobs: list[float]
    text: str  # without special tokens and what stopped it
    finish_reason: str
    version: int  # policy version
    prompt: list[int]
    sample: int  # number of the sequence among its prompt's


class Inference:
    """Sampling for environments."""

    def __init__(
        self,
        *,
        base: BaseModel,
        tokenizer: Tokenizer,
        journal: Journal,
        checkpoints: Checkpoints,
        snapshots: Snapshots,
        samplers: Samplers,
        samples: Samples,
    ) -> None:
        self.base, self.tokenizer = base, tokenizer
        self._journal, self._checkpoints = journal, checkpoints
        self._snapshots, self._samplers, self._samples = snapshots, samplers, samples

    def weights(self, run: str, model: str | None) -> Snapshot | None:
        """What a request means: a tinker:// path, the base model by name, or else the run's newest policy.

        Raises:
            NotFound: no weights at that path.
            NotReady: the run has published nothing yet.
        """
        if model is not None and model.startswith("tinker://"):
            return self._snapshots.of(self._checkpoints.find(model))
        if model in (self.base.name, str(self.base.folder)):
            return None
        return self._samplers.policy(run)

    async def write(
        self,
        run: str,
        body: bytes,
        model: str | None,
        prompts: Sequence[str | list[int]],
        asked: Sampled,
        max_tokens: int | None,
        seed: int | None,
    ) -> list[Written]:
        """Sample `asked.n` sequences after each prompt; prompt i uses `seed` + i.

        Raises:
            InvalidData: a prompt or a parameter cannot be used.
            Overloaded: too much is under way.
        """
        snapshot = self.weights(run, model)
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise InvalidData(f"The request has {len(prompts)} prompts.", f"It may have 1 to {MAX_PROMPTS}.")
        tokens = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        self._samples.refuse_if_full()
        first = drawn_seed() if seed is None else checked_seed(seed)
        name = await self._record(run, body, None if seed is not None else first)
        end_tokens = self.tokenizer.eos_token_ids
        with self._settled(name):
            results = await _all(
                self._samples.draw(
                    snapshot, packed(prompt), asked.n, asked.params(max_tokens, end_tokens, first + index)
                )
                for index, prompt in enumerate(tokens)
            )
        return [
            self._written(sequence, result, prompt, sample, asked.stop_strings)
            for prompt, result in zip(tokens, results, strict=True)
            for sample, sequence in enumerate(result.sequences)
        ]

    async def _record(self, run: str, body: bytes, drawn: int | None) -> str:
        name = uuid.uuid4().hex
        seeds = None if drawn is None else {"seed": drawn}
        await self._journal.accept(
            Entry(id=name, key=name, kind="generate", subject=run, seq=None, content_type=JSON, body=body, drawn=seeds)
        )
        return name

    @contextmanager
    def _settled(self, name: str) -> Iterator[None]:
        """The journal hears how the block ended: samples are not kept, a failure is."""
        outcome = None
        try:
            yield
        except HalteresError as error:
            outcome = failure(error).body
            raise
        finally:
            self._journal.settle(name, JSON, outcome)

    def _written(
        self, sequence: SampledSequence, result: SampleResult, prompt: list[int], sample: int, stops: Sequence[str]
    ) -> Written:
        tokens = np.frombuffer(sequence.tokens, np.int32).tolist()
        text = self.tokenizer.decode(tokens)
        ends = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
        return Written(
            tokens=tokens,
            logprobs=np.frombuffer(sequence.logprobs, np.float32).tolist(),
            text=text[: min(ends)] if ends else text,
            finish_reason=sequence.stop_reason,
            version=result.version,
            prompt=prompt,
            sample=sample,
        )


async def _all(draws: Iterable[Awaitable[SampleResult]]) -> list[SampleResult]:
    """All results; if any fails, the first failure, once none is under way any more."""
    results = await asyncio.gather(*draws, return_exceptions=True)
    for one in results:
        if isinstance(one, BaseException):
            raise one
    return [one for one in results if not isinstance(one, BaseException)]
