"""Inference: requests of any shape, answered whole or while they are written."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import msgspec

from halteres.clients import rewards
from halteres.engine.protocol import SampleResult, SamplingParams, Sequence, Wanted
from halteres.errors import HalteresError, InvalidData, NotReady, ServerError, unknown
from halteres.process import steady_time
from halteres.scores import Scorable, best_first
from halteres.service.durable.futures import Outcome, failure
from halteres.service.durable.journal import Ended, Entry, new_id
from halteres.service.fleet import running
from halteres.service.inference.chats import Chat, render
from halteres.service.inference.outputs import Output, Writer, prompt_positions
from halteres.service.inference.requests import Addresses, Call, InferenceRequest, Prompt, Refused, Weights, read
from halteres.service.sampling.samples import CANCELLED, Draw, checked_seed, drawn_seed, packed
from halteres.service.service import GENERATE, Service
from halteres.service.tenancy.fair_queue import LONG
from halteres.service.wire.codec import JSON

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_PROMPTS, MAX_SEQUENCES = 1024, 4096  # of one request

MAX_SCORES, MAX_STREAMED_SCORES = 2**19, 2**16
"""Log-probabilities of prompts in one answer: some 20 MB of JSON, made aside; those of a stream are not."""

CHARACTERS_PER_TOKEN = 64
"""No text that is meant to be read has more of them on average; a longer one is refused before it is tokenised."""

TOKEN_WORK = 16  # of a sampled token that is turned to text, beside the reading of one byte


class Inference:
    """Sampling for whoever speaks no Tinker: environments, agents, people."""

    def __init__(self, service: Service) -> None:
        self.tokenizer, self.base, self.addresses = service.tokenizer, service.base, Addresses(service)
        self.best_of = BestOf(service.options.reward_models)
        self._fleet, self._journal, self._samples = service.fleet, service.journal, service.samples
        self._threads, self._options, self._longest = service.threads, service.options, 0

    async def context_length(self) -> int:
        """Tokens that the model reads, prompt and answer together; waits for an engine that starts."""
        return (await (await running(self._fleet.pick(None, b""))).info()).max_context_length

    @property
    def ready(self) -> bool:
        """Whether an engine that samples is there."""
        return self._fleet.samples

    async def read(self, call: Call, kind: type[T], refused: Refused | None = None) -> T:
        """What a body asks for; a long one is read aside."""
        return await self.aside(call, lambda: read(call.body, kind, refused), len(call.body))

    async def aside(self, call: Call, make: Callable[[], T], size: int = LONG) -> T:
        """What may take long to make, beside the requests that wait; small things are made at once."""
        return await self._threads.run(call.tenant, size, make)

    async def prompts(self, call: Call, given: list[str | list[int]], special: bool | None = None) -> list[Prompt]:
        """Texts or tokens as prompts; long ones are tokenised aside, and a text that no model reads is refused."""
        longest = await self._longest_text()

        def read() -> list[Prompt]:
            return [Prompt.of(one, self.tokenizer, longest, special) for one in given]

        return await self.aside(call, read, len(call.body))

    async def chat_prompt(self, call: Call, chat: Callable[[], Chat], special: bool | None = None) -> Prompt:
        """A chat's tokens; the template writes the special ones itself. It is the model's code: it runs aside."""
        longest = await self._longest_text()
        return await self.aside(
            call, lambda: Prompt.of(render(self.tokenizer, chat()), self.tokenizer, longest, bool(special))
        )

    def weights(self, call: Call, model: str | None, version: int | None = None) -> Weights:
        """Those that a call means by this name; raises as `Addresses.find`."""
        return self.addresses.find(model, call.run, call.tenant, version)

    async def _longest_text(self) -> int:
        """Characters that a prompt may have."""
        if not self._longest:
            self._longest = await self.context_length() * CHARACTERS_PER_TOKEN
        return self._longest

    async def write(self, request: InferenceRequest, shape: Callable[[list[Output]], T]) -> T:
        """What `shape` makes of every sequence of a request, prompt by prompt; a large answer is made aside.

        Raises:
            InvalidData: a prompt or a parameter cannot be used.
            Overloaded: too much is under way.
        """
        seed, n = self._checked(request, MAX_SCORES), request.sampling.n

        def shaped() -> T:
            return shape([one for at, result in enumerate(results) for one in self._outputs(request, at * n, result)])

        async with self._recorded(request, seed):
            draws = (self._samples.draw(draw) for draw in self._draws(request, seed))
            results = list[SampleResult]()
            for result in await asyncio.gather(*draws, return_exceptions=True):  # none is under way any more
                if isinstance(result, BaseException):
                    raise result
                results.append(result)
            sequences = [one for result in results for one in result.sequences]
            tokens = sum(len(one.tokens) + (len(one.top.ids) if one.top else 0) for one in sequences) // 4
            return await self.aside(request.call, shaped, TOKEN_WORK * (request.num_prompt_logprobs + tokens))

    def _outputs(self, request: InferenceRequest, first: int, result: SampleResult) -> Iterator[Output]:
        of_prompt = prompt_positions(request.prompts[first // request.sampling.n], result)
        for place, one in enumerate(result.sequences, first):
            piece = Sequence(tokens=b"", logprobs=b"", stop_reason="length") if request.scores_only else one
            yield Writer(self.tokenizer, request, place).add(piece, result.version, of_prompt)

    async def stream(self, request: InferenceRequest) -> AsyncGenerator[Output, None]:
        """The same, in pieces as they are sampled; whoever stops reading frees the rows.

        What is asked of a prompt comes with the first piece, which then holds the whole answer.
        """
        seed, n = self._checked(request, MAX_STREAMED_SCORES), request.sampling.n
        if request.prompt_top is not None:
            for one in await self.write(request, list):
                yield one
            return
        writers = [Writer(self.tokenizer, request, place) for place in range(len(request.prompts) * n)]
        async with self._recorded(request, seed):
            streams = [self._samples.stream(draw) for draw in self._draws(request, seed)]
            async with aclosing(merged(streams)) as pieces:
                async for at, piece in pieces:
                    yield writers[at * n + piece.sample].add(piece, piece.version)

    def _draws(self, request: InferenceRequest, seed: int) -> list[Draw]:
        """One for each prompt."""
        sampling = request.sampling
        ends = () if sampling.ignore_eos else self.tokenizer.eos_token_ids
        params = SamplingParams(
            max_tokens=1 if request.scores_only else sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            stop_tokens=(*sampling.named_stop_tokens, *ends),
            stop_strings=sampling.stop_strings,
            logprobs=self._options.sample_logprobs,
        )
        scored, top = request.prompt_top is not None, request.prompt_top or 0
        wanted = Wanted(topk_sampled=request.top, prompt_logprobs=scored, topk_prompt=top)
        return [
            Draw(
                snapshot=request.weights.snapshot,
                prompt=packed(prompt.tokens),
                num_samples=sampling.n,
                params=msgspec.structs.replace(params, seed=seed + at),
                wanted=wanted,
                tenant=request.call.tenant,
            )
            for at, prompt in enumerate(request.prompts)
        ]

    def _checked(self, request: InferenceRequest, most_logprobs: int) -> int:
        """The seed of the first prompt of a request that is not too large."""
        count, sequences = len(request.prompts), len(request.prompts) * request.sampling.n
        if not 1 <= count <= MAX_PROMPTS:
            raise InvalidData(f"The request has {count} prompts.", f"It may have 1 to {MAX_PROMPTS}.")
        if sequences > MAX_SEQUENCES:
            raise InvalidData(f"The request asks for {sequences} sequences.", f"It may have {MAX_SEQUENCES}.")
        if request.num_prompt_logprobs > most_logprobs:
            raise InvalidData(
                f"The answer would tell {request.num_prompt_logprobs} log-probabilities of its prompts.",
                f"It may have {most_logprobs}: every sequence of a prompt and every likely token at a position counts.",
                "Ask for them once, with n=1, max_tokens=0 and no stream, and send fewer prompts at a time.",
            )
        self._samples.refuse_if_full(request.call.tenant)
        return drawn_seed() if request.sampling.seed is None else checked_seed(request.sampling.seed)

    @asynccontextmanager
    async def _recorded(self, request: InferenceRequest, seed: int) -> AsyncIterator[None]:
        """The journal has the request, and then how the block ended: samples are not kept, a failure is."""
        call, name, outcome = request.call, new_id(), failure(ServerError("The answer was not finished."))
        entry = Entry(
            id=name,
            key=name,
            kind=GENERATE,
            subject=call.run or request.weights.name,
            tenant=call.tenant,
            body=call.body,
            drawn={"seed": seed} if request.sampling.seed is None else None,
        )
        try:
            await self._journal.accept(entry)
            yield
            outcome = Outcome(b"")
        except HalteresError as error:
            outcome = failure(error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            outcome = CANCELLED
            raise
        finally:
            ended = Ended(
                id=name,
                state=outcome.state,
                settled_at=steady_time(),
                outcome_type=JSON,
                outcome=outcome.body or None,
            )
            self._journal.settle(ended)


async def merged(streams: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams as they come, each with its stream's number; the first failure ends all."""
    if len(streams) == 1:  # the usual case needs no task for each item
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    waiting = {asyncio.create_task(_next(stream)): at for at, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                at = waiting.pop(task)
                if (item := task.result()) is not None:
                    waiting[asyncio.create_task(_next(streams[at]))] = at
                    yield at, item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[T, None]) -> T | None:
    return await anext(stream, None)


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
        self, outputs: list[Output], count: int, reward_model: str | None, text_of: Callable[[Output], Scorable]
    ) -> list[Output]:
        """So many sequences of each prompt, the best first; one that could not be scored comes behind all that could.

        Args:
            reward_model: None: the mean log-probability of a token is the score.

        Raises:
            NotReady: the reward model could not be asked, or scored no sequence at all.
        """
        values: list[float | None] = [
            math.fsum(logprob or 0.0 for _, logprob, _ in one.positions) / len(one.tokens) if one.tokens else None
            for one in outputs
        ]
        if reward_model is not None:
            values = await self._scores(reward_model, [text_of(one) for one in outputs])
        of_prompt: dict[int, list[int]] = {}
        for at, one in enumerate(outputs):
            of_prompt.setdefault(one.place - one.sample, []).append(at)
        return [
            replace(outputs[places[rank]], place=number * count + place, sample=place)
            for number, places in enumerate(of_prompt.values())
            for place, rank in enumerate(best_first([values[at] for at in places])[:count])
        ]

    async def _scores(self, name: str, texts: list[Scorable]) -> list[float | None]:
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
