"""Inference: requests of any shape, answered whole or while they are written."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TypeVar

import msgspec

from halteres.clients import rewards
from halteres.engine.protocol import SampleResult
from halteres.errors import HalteresError, InvalidData, NotReady, ServerError, unknown
from halteres.process import steady_time
from halteres.scores import Scorable, best_first
from halteres.service.durable.futures import Outcome, failure
from halteres.service.durable.journal import Ended, Entry, new_id
from halteres.service.fleet import running
from halteres.service.inference.chats import Chat, render
from halteres.service.inference.requests import Addresses, Ask, Call, Prompt
from halteres.service.inference.written import Writer, Written, scores_of
from halteres.service.sampling.samples import CANCELLED, Draw, checked_seed, drawn_seed, packed
from halteres.service.service import GENERATE, Service
from halteres.service.tenancy.fair_queue import LONG
from halteres.service.wire.codec import JSON

T = TypeVar("T")


log = logging.getLogger(__name__)


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams as they come, each with its stream's number; the first failure ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    asked = {asyncio.create_task(_next(stream)): at for at, stream in enumerate(streams)}
    try:
        while asked:
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                at = asked.pop(task)
                for item in task.result():
                    asked[asyncio.create_task(_next(streams[at]))] = at
                    yield at, item
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[T, None]) -> tuple[T, ...]:
    """The next item, or nothing at the end."""
    try:
        return (await anext(stream),)
    except StopAsyncIteration:
        return ()


SCORED_WITHIN_S = 120.0


class BestOf:
    """The choice, by reward models that are served elsewhere: name -> address."""

    def __init__(self, reward_models: Mapping[str, str]) -> None:
        self._addresses = reward_models

    def check(self, reward_model: str | None) -> None:
        """See that there is such a reward model, before anything is sampled."""
        if reward_model is None or reward_model in self._addresses:
            return
        if not self._addresses:
            raise InvalidData(
                "This service has no reward models.",
                "It is started with them: halteres serve --reward-model NAME=URL.",
                "Leave `reward_model` out: `best_of` then goes by log-probability.",
                param="reward_model",
            )
        raise unknown(InvalidData, "reward model", reward_model, self._addresses)

    async def chosen(
        self, written: Sequence[Written], count: int, reward_model: str | None, text_of: Callable[[Written], Scorable]
    ) -> list[Written]:
        """So many sequences of each prompt, the best first; one that could not be scored comes behind all that could.

        Raises:
            NotReady: the reward model could not be asked, or scored no sequence at all.
        """
        if reward_model is None:
            values = [_mean_logprob(one) for one in written]
        else:
            values = await self._scores(reward_model, [text_of(one) for one in written])
        of_prompt: dict[int, list[int]] = {}
        for at, one in enumerate(written):
            of_prompt.setdefault(one.place - one.sample, []).append(at)
        return [
            replace(written[places[rank]], place=number * count + place, sample=place)
            for number, places in enumerate(of_prompt.values())
            for place, rank in enumerate(best_first([values[at] for at in places])[:count])
        ]

    async def _scores(self, name: str, texts: Sequence[Scorable]) -> list[float | None]:
        try:
            scores = await rewards.score(self._addresses[name], texts, timeout_s=SCORED_WITHIN_S)
        except HalteresError as error:  # it may name the operator's address: that is for the log
            log.warning("The reward model '%s' could not be asked: %s", name, error.sentence)
            raise NotReady(
                f"The reward model '{name}' could not be asked.", next="Try again, or leave `reward_model` out."
            ) from error
        if not any(scores):
            raise NotReady(f"The reward model '{name}' could not score one of {len(texts)} answers.")
        return [None if score is None else score.value for score in scores]


def _mean_logprob(one: Written) -> float | None:
    """Per token; None of a sequence without tokens."""
    return math.fsum(one.logprobs) / len(one.logprobs) if one.logprobs else None


MAX_PROMPTS, MAX_SEQUENCES = 1024, 4096
"""Of one request."""

MAX_SCORES, MAX_STREAMED_SCORES = 2**19, 2**16
"""Log-probabilities of prompts that one answer tells: some 20 MB of JSON, made aside; those of a stream are not."""

CHARACTERS_PER_TOKEN = 64
"""No text that is meant to be read has more of them on average; a longer one is refused before it is tokenised."""

TOKEN_WORK = 16
"""Of a sampled token that is turned to text, beside the reading of one byte."""


CRASHED = failure(ServerError("The answer was not finished."))


class Inference:
    """Sampling for whoever speaks no Tinker: environments, agents, people."""

    def __init__(self, service: Service) -> None:
        self.tokenizer, self.base = service.tokenizer, service.base
        self.addresses = Addresses(
            service.base, service.checkpoints, service.snapshots, service.samplers, service.sessions
        )
        self._fleet, self._journal, self._samples = service.fleet, service.journal, service.samples
        self._threads, self._longest = service.threads, 0
        self.best_of = BestOf(service.options.reward_models)

    async def context_length(self) -> int:
        """Tokens that the model reads, prompt and answer together; waits for an engine that starts."""
        return (await (await running(self._fleet.pick(None, b""))).info()).max_context_length

    @property
    def ready(self) -> bool:
        """Whether an engine that samples is there."""
        return self._fleet.samples

    async def read(self, call: Call, reader: Callable[[bytes], T]) -> T:
        """What a body asks for; a long one is read aside."""
        return await self._threads.run(call.tenant, len(call.body), lambda: reader(call.body))

    async def prompts(
        self, call: Call, given: Sequence[str | list[int]], special: bool | None = None
    ) -> tuple[Prompt, ...]:
        """Texts or tokens as the prompts that they are; long ones are tokenised aside.

        Raises:
            InvalidData: a text is longer than the model reads.
        """
        longest = await self._longest_text()

        def read() -> tuple[Prompt, ...]:
            return tuple(Prompt.of(one, self.tokenizer, longest, special) for one in given)

        return await self._threads.run(call.tenant, len(call.body), read)

    async def chat_prompt(self, call: Call, chat: Callable[[], Chat], special: bool | None = None) -> Prompt:
        """A chat's tokens; the template writes the special ones itself. It is the model's code: it runs aside.

        Raises:
            InvalidData: the template cannot take the chat, or its text is longer than the model reads.
        """
        longest = await self._longest_text()

        def read() -> Prompt:
            return Prompt.of(render(self.tokenizer, chat()), self.tokenizer, longest, bool(special))

        return await self._threads.run(call.tenant, max(LONG, len(call.body)), read)

    async def _longest_text(self) -> int:
        """Characters that a prompt may have."""
        if not self._longest:
            self._longest = await self.context_length() * CHARACTERS_PER_TOKEN
        return self._longest

    async def write(self, ask: Ask, shape: Callable[[list[Written]], T]) -> T:
        """What `shape` makes of every sequence of a request, prompt by prompt; a large answer is made aside.

        Raises:
            InvalidData: a prompt or a parameter cannot be used.
            Overloaded: too much is under way.
        """
        seed = self._checked(ask, MAX_SCORES)
        with self._settled(name := new_id()):
            await self._accept(name, ask, seed)
            results = await _all(map(self._samples.draw, self._draws(ask, seed)))
            return await self._threads.run(
                ask.call.tenant,
                TOKEN_WORK * (ask.scores + sum(map(_cells, results))),
                lambda: shape([one for at, result in enumerate(results) for one in self._written(ask, at, result)]),
            )

    async def aside(self, call: Call, shape: Callable[[], T]) -> T:
        """What may take long to make, beside the requests that wait."""
        return await self._threads.run(call.tenant, LONG, shape)

    async def stream(self, ask: Ask) -> AsyncGenerator[Written, None]:
        """The same, in pieces as they are sampled; whoever stops reading frees the rows.

        What is asked of a prompt comes with the first piece, which then holds the whole answer.
        """
        seed, n = self._checked(ask, MAX_STREAMED_SCORES), ask.sampled.n
        if ask.prompt_top is not None:
            for one in await self.write(ask, list):
                yield one
            return
        writers = [
            Writer(self.tokenizer, ask, at * n + sample, sample, prompt)
            for at, prompt in enumerate(ask.prompts)
            for sample in range(n)
        ]
        with self._settled(name := new_id()):
            await self._accept(name, ask, seed)
            streams = map(self._samples.stream, self._draws(ask, seed))
            async with aclosing(merged(list(streams))) as pieces:
                async for at, piece in pieces:
                    writer = writers[at * n + piece.sample]
                    yield writer.add(piece.tokens, piece.logprobs, piece.top, piece.stop_reason, piece.version)

    def _draws(self, ask: Ask, seed: int) -> list[Draw]:
        """One for each prompt."""
        limit = 1 if ask.scores_only else ask.max_tokens
        first = ask.sampled.params(limit, self.tokenizer.eos_token_ids, seed)
        return [
            Draw(
                snapshot=ask.weights.snapshot,
                prompt=packed(prompt.tokens),
                num_samples=ask.sampled.n,
                params=msgspec.structs.replace(first, seed=seed + at, logprobs=self._samples.logprobs),
                wanted=ask.wanted,
                tenant=ask.call.tenant,
            )
            for at, prompt in enumerate(ask.prompts)
        ]

    def _written(self, ask: Ask, at: int, result: SampleResult) -> Iterator[Written]:
        scores, n = scores_of(result), ask.sampled.n
        for sample, one in enumerate(result.sequences):
            writer = Writer(self.tokenizer, ask, at * n + sample, sample, ask.prompts[at])
            if ask.scores_only:
                yield writer.add(b"", b"", None, "length", result.version, scores)
            else:
                yield writer.add(one.tokens, one.logprobs, one.top, one.stop_reason, result.version, scores)

    def _checked(self, ask: Ask, most_scores: int) -> int:
        """The seed of the first prompt of a request that is not too large."""
        count, sequences = len(ask.prompts), len(ask.prompts) * ask.sampled.n
        if not 1 <= count <= MAX_PROMPTS:
            raise InvalidData(f"The request has {count} prompts.", f"It may have 1 to {MAX_PROMPTS}.")
        if sequences > MAX_SEQUENCES:
            raise InvalidData(f"The request asks for {sequences} sequences.", f"It may have {MAX_SEQUENCES}.")
        if ask.scores > most_scores:
            raise InvalidData(
                f"The answer would tell {ask.scores} log-probabilities of its prompts.",
                f"It may have {most_scores}: every sequence of a prompt and every likely token at a position counts.",
                "Ask for them once, with n=1, max_tokens=0 and no stream, and send fewer prompts at a time.",
            )
        self._samples.refuse_if_full(ask.call.tenant)
        return drawn_seed() if ask.seed is None else checked_seed(ask.seed)

    async def _accept(self, name: str, ask: Ask, seed: int) -> None:
        drawn, call = None if ask.seed is not None else {"seed": seed}, ask.call
        await self._journal.accept(
            Entry(
                id=name, key=name, kind=GENERATE, subject=ask.subject, tenant=call.tenant, body=call.body, drawn=drawn
            )
        )

    @contextmanager
    def _settled(self, name: str) -> Iterator[None]:
        """The journal hears how the block ended: samples are not kept, a failure is."""
        outcome = CRASHED
        try:
            yield
            outcome = Outcome(b"")
        except HalteresError as error:
            outcome = failure(error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            outcome = CANCELLED
            raise
        finally:
            body, now = outcome.body or None, steady_time()
            self._journal.settle(Ended(id=name, state=outcome.state, settled_at=now, outcome_type=JSON, outcome=body))


def _cells(result: SampleResult) -> int:
    """Sampled tokens, and those that were likely in their place."""
    return sum(len(one.tokens) + (len(one.top.ids) if one.top else 0) for one in result.sequences) // 4


async def _all(draws: Iterable[Awaitable[SampleResult]]) -> list[SampleResult]:
    """All results; if any fails, the first failure, once none is under way any more."""
    results = await asyncio.gather(*draws, return_exceptions=True)
    for one in results:
        if isinstance(one, BaseException):
            raise one
    return [one for one in results if not isinstance(one, BaseException)]
