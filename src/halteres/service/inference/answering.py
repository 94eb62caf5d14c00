"""Inference: requests of any shape sampled, whole or in pieces while they come."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import msgspec

from halteres.engine.protocol import (
    ExtraLogprobs,
    LogprobKind,
    SampleResult,
    Sequence,
)
from halteres.errors import (
    HalteresError,
    InvalidData,
    NotFound,
    ServerError,
    nearest,
    shortened,
)
from halteres.process import steady_time
from halteres.service.context_window import check_room
from halteres.service.durable.futures import Outcome, failure
from halteres.service.durable.journal import Entry, new_id
from halteres.service.inference.best_of import BestOf
from halteres.service.inference.fields import Dialect, read
from halteres.service.inference.outputs import Output, Writer, positions_of
from halteres.service.inference.requests import (
    Call,
    Chat,
    InferenceRequest,
    Prompt,
    Record,
    SamplingFields,
    Unkept,
    Weights,
    render,
)
from halteres.service.keys import Tenant
from halteres.service.limits import LONG
from halteres.service.sampling.samples import CANCELLED, Draw, checked_seed, drawn_seed, packed
from halteres.service.service import GENERATE, Service

T = TypeVar("T")

SCHEME = "tinker://"

MAX_PROMPTS, MAX_SEQUENCES = 1024, 4096  # of one request

MAX_SCORES, MAX_STREAMED_SCORES = 2**19, 2**16
"""Log-probabilities of prompts in one answer: some 20 MB of JSON, made in a thread; those of a
stream are not.
"""

MAX_LIKELY = 2**20
"""Likely tokens beside the sampled ones in one answer, were each sequence as long as it may be: 25
MB of JSON, made of 200 MB of objects.
"""

TOKEN_WORK = 16  # of a sampled token that is turned to text, beside the reading of one byte

_KINDS: Mapping[str, LogprobKind] = {"raw_logprobs": "raw", "processed_logprobs": "tempered"}
"""What `logprobs_mode` names, by vLLM's words."""


class Inference:
    """Sampling for whoever speaks no Tinker: environments, agents, people."""

    def __init__(self, service: Service) -> None:
        self.tokenizer, self.base = service.tokenizer, service.base
        self.best_of = BestOf(service.options.reward_models)
        self._service = service

    async def context_length(self) -> int:
        """Tokens that the model reads, prompt and answer together; waits for the first engine
        to be ready.
        """
        return await self._service.fleet.context()

    @property
    def known_context(self) -> int | None:
        """The same without waiting; None where no engine was ever ready."""
        return self._service.fleet.known_context

    @property
    def ready(self) -> bool:
        """Whether an engine that samples is there."""
        return self._service.fleet.samples

    # What a request names

    async def read(self, call: Call, kind: type[T], dialect: Dialect) -> T:
        """The fields of a body; a long one is read in a thread."""
        return await self.in_thread(call, lambda: read(call.body, kind, dialect), len(call.body))

    async def in_thread(self, call: Call, make: Callable[[], T], size: int = LONG) -> T:
        """What may take long to make, beside the requests that wait; small things are made at
        once.
        """
        return await self._service.threads.run(call.tenant, size, make)

    async def prompts(
        self, call: Call, given: Callable[[], list[str | list[int]]], special: bool | None = None
    ) -> list[Prompt]:
        """Texts or tokens as prompts; too many of them, and one that no model reads, are refused
        before a text is tokenised.
        """
        context = await self.context_length()

        def made() -> list[Prompt]:
            found = given()
            if not 1 <= len(found) <= MAX_PROMPTS:
                raise InvalidData(
                    f"The request has {len(found)} prompts.", f"It may have 1 to {MAX_PROMPTS}."
                )
            if call.capture is not None:
                return [
                    call.capture.prompt(
                        one, context, special=special, place=place, num_prompts=len(found)
                    )
                    for place, one in enumerate(found)
                ]
            return [Prompt.of(one, self.tokenizer, context, special) for one in found]

        return await self.in_thread(call, made, len(call.body))

    async def chat_prompt(
        self, call: Call, chat: Callable[[], Chat], special: bool | None = None
    ) -> Prompt:
        """A chat's tokens; the template writes the special ones itself. It is the model's code: it
        runs in a thread.
        """
        context = await self.context_length()

        def made() -> Prompt:
            found = chat()
            if call.capture is not None:
                return call.capture.prompt(found, context, special=bool(special))
            return Prompt.of(render(self.tokenizer, found), self.tokenizer, context, bool(special))

        return await self.in_thread(call, made)

    def weights(
        self, model: str | None, run: str | None, tenant: Tenant, version: int | None = None
    ) -> Weights:
        """The weights that a name means. Below a run's URL, what is neither a path nor the base
        model means the run, at this policy version or its newest. NotFound where nothing has this
        name, NotReady where the run has not published that yet, SnapshotLost where it is no longer
        kept.
        """
        if model is not None and SCHEME in model:
            base, _, path = model.rpartition(";")
            if base:
                self.base.check(base)
            found = self._service.checkpoints.find(path, tenant)
            return Weights(name=model, snapshot=self._service.snapshots.of(found))
        name = model or run or self.base.name
        is_base = run is None
        if model:
            is_base = self.is_base(model)
        # whether a name is the base model's is asked of the store's folders: last
        if run is not None and run not in self._runs(tenant) and self.is_base(run):
            # A gateway session of the base model: whatever a client calls it, that is meant.
            is_base = True
        if is_base:
            return Weights(name=name, snapshot=None)
        if run is None and name not in self._runs(tenant):
            raise NotFound(
                f"There is no model '{shortened(name)}' here.",
                f"The base model is '{self.base.name}'.",
                "Name it, a tinker:// path or a run; GET /v1/models lists them.",
                did_you_mean=nearest(name, self.models(tenant)),
                param="model",
            )
        return Weights(
            name=name, snapshot=self._service.samplers.policy(run or name, tenant, version)
        )

    def check_run(self, run: str, tenant: Tenant, model: str | None) -> None:
        """NotFound where a run's policy is to answer, and the tenant has no run of this name; one
        may have published nothing yet.
        """
        # evaluations name their weights, below a run that no trainer has
        if model is not None and (SCHEME in model or self.is_base(model)):
            return
        runs = self._runs(tenant).keys() | self._service.samplers.versions(tenant).keys()
        if run in runs or self.is_base(run):
            return
        why = "No trainer has a session here whose user_metadata.halteres_run names one."
        if runs:
            why = f"The runs here are {shortened(', '.join(sorted(runs)))}."
        guess = nearest(run, runs)
        next_step = "Name a run that trains here; or leave `run` out, and the base model answers."
        if guess is not None:
            next_step = f"Did you mean '{guess}'?"
        raise NotFound(f"There is no run '{shortened(run)}' here.", why, next_step, param="run")

    @property
    def base_names(self) -> tuple[str, ...]:
        """Every name of the base model; one with slashes also as clients write it that take what
        stands before a slash for something else, `halteres--tiny` for `halteres/tiny`.
        """
        names = self.base.names
        return (*names, *(name.replace("/", "--") for name in names if "/" in name))

    def is_base(self, name: str) -> bool:
        """Whether a name means the base model."""
        return self.base.answers_to(name) or ("--" in name and name in self.base_names)

    def models(self, tenant: Tenant) -> dict[str, tuple[int, float]]:
        """Policy version and unix s of making, of the base model, every run with a policy, every
        named checkpoint.
        """
        began, policies = self._runs(tenant), self._service.samplers.versions(tenant)
        saved = [
            one
            for one in self._service.checkpoints.all(tenant=tenant)
            if one.path.kind == "sampler_weights"
        ]
        return {
            **dict.fromkeys(self.base_names, (0, 0.0)),
            **{run: (version, began.get(run, 0.0)) for run, version in policies.items()},
            **{str(one.path): (one.version, one.created_at) for one in saved},
        }

    def _runs(self, tenant: Tenant) -> dict[str, float]:
        """The tenant's runs, and when each began (unix s)."""
        sessions = self._service.sessions.all(tenant)
        return {session.run: session.created_at for session in reversed(sessions) if session.run}

    # Answers

    async def write(self, request: InferenceRequest, shape: Callable[[list[Output]], T]) -> T:
        """What `shape` makes of every sequence of a request, prompt by prompt; a large answer is
        made in a thread.
        """
        request = self._in_session(request)
        seed, n = await self._checked(request, MAX_SCORES), request.sampling.n

        def shaped() -> T:
            outputs, silent = (
                list[Output](),
                Sequence(tokens=b"", logprobs=b"", stop_reason="length"),
            )
            for at, result in enumerate(results):
                of_prompt = None
                if result.prompt_logprobs is not None:
                    of_prompt = positions_of(
                        request.prompts[at].tokens, result.prompt_logprobs, result.topk_prompt
                    )
                for place, one in enumerate(result.sequences, at * n):
                    sequence = silent if request.scores_only else one
                    output = Writer(self.tokenizer, request, place).add(
                        sequence, result.version, of_prompt
                    )
                    record.add(output)
                    outputs.append(output)
            return shape(outputs)

        async with self._recorded(request, seed) as record:
            calls = self._answers(request, record)
            results, work = list[SampleResult](), request.num_prompt_logprobs
            # none is under way any more
            for result in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
                results.append(result)
                work += (
                    sum(
                        len(one.tokens) + (len(one.top.ids) if one.top else 0)
                        for one in result.sequences
                    )
                    // 4
                )
            answer = await self.in_thread(request.call, shaped, TOKEN_WORK * work)
            await record.keep()
            return answer

    async def stream(self, request: InferenceRequest) -> AsyncGenerator[Output, None]:
        """The same, in pieces as they are sampled (in one where the prompt is scored); whoever
        stops reading frees the rows.
        """
        request = self._in_session(request)
        seed, n = await self._checked(request, MAX_STREAMED_SCORES), request.sampling.n
        if request.prompt_top is not None:
            for one in await self.write(request, list):
                yield one
            return
        writers = [
            Writer(self.tokenizer, request, place) for place in range(len(request.prompts) * n)
        ]
        async with self._recorded(request, seed) as record:
            if record.stored is not None:
                for writer, (one, version) in zip(writers, _each(record.stored), strict=True):
                    yield writer.add(one, version)
                return
            draws = self._calls_of(request, record.seed)
            streams = [self._service.samples.stream(draw) for draw in draws]
            open_rows = len(writers)
            async with aclosing(merged(streams)) as pieces:
                async for at, piece in pieces:
                    output = writers[at * n + piece.sample].add(piece, piece.version)
                    record.add(output)
                    open_rows -= output.finish is not None
                    if open_rows == 0:
                        # Nobody has the end of an answer that is not kept.
                        await record.keep()
                    yield output

    def _answers(
        self, request: InferenceRequest, record: Record
    ) -> Iterable[Awaitable[SampleResult]]:
        """What comes of each prompt: drawn now, or what was drawn for this very call before."""
        if record.stored is not None:
            return [_known(result) for result in record.stored]
        draws = self._calls_of(request, record.seed)
        return [self._service.samples.draw(draw) for draw in draws]

    def _in_session(self, request: InferenceRequest) -> InferenceRequest:
        """The request as it is sampled: in a gateway session by that session's policy, and as that
        session samples.
        """
        capture = request.call.capture
        if capture is None:
            return request
        tenant = request.call.tenant
        weights = self.weights(capture.model, capture.run, tenant, capture.version)
        request = replace(request, weights=replace(weights, name=request.weights.name))
        if request.scores_only:
            return request
        return replace(request, sampling=capture.sampling(request.sampling))

    def _calls_of(self, request: InferenceRequest, seed: int) -> list[Draw]:
        sampling = request.sampling
        kind = self._kind_of_logprobs(sampling)
        params = request.params(self.tokenizer.eos_token_ids, kind)
        scored, top = request.prompt_top is not None, request.prompt_top or 0
        return [
            Draw(
                snapshot=request.weights.snapshot,
                prompt=packed(prompt.tokens),
                num_samples=sampling.n,
                params=msgspec.structs.replace(params, seed=seed + at),
                extra=ExtraLogprobs(
                    topk_sampled=request.top, prompt_logprobs=scored, topk_prompt=top
                ),
                tenant=request.call.tenant,
            )
            for at, prompt in enumerate(request.prompts)
        ]

    def _kind_of_logprobs(self, sampling: SamplingFields) -> LogprobKind:
        if sampling.logprobs_mode is None:
            return self._service.options.sample_logprobs
        return _KINDS[sampling.logprobs_mode]

    async def _checked(self, request: InferenceRequest, most_logprobs: int) -> int:
        """The seed of the first prompt of a request that is not too large."""
        sampling, strict = request.sampling, self._service.options.strict_context
        context = await self.context_length()
        if sampling.max_tokens == 0 and not request.scores_only:
            name = sampling.length_field
            raise InvalidData(
                f"`{name}` is 0.",
                "It must be at least 1.",
                "Ask for a token or more, or leave it out.",
                param=name,
            )
        for prompt in request.prompts:
            check_room(len(prompt.tokens), sampling.max_tokens, context, strict=strict)
        sequences = len(request.prompts) * sampling.n
        if sequences > MAX_SEQUENCES:
            raise InvalidData(
                f"The request asks for {sequences} sequences.", f"It may have {MAX_SEQUENCES}."
            )
        if request.num_prompt_logprobs > most_logprobs:
            raise InvalidData(
                f"The answer would tell {request.num_prompt_logprobs} log-probabilities of its "
                "prompts.",
                f"It may have {most_logprobs}: every sequence of a prompt and every likely token "
                "at a position counts.",
                "Ask for them once, with n=1, max_tokens=0 and no stream, and send fewer prompts "
                "at a time.",
            )
        num_likely = request.num_likely(context)
        if num_likely > MAX_LIKELY:
            raise InvalidData(
                f"The answer may hold {num_likely} likely tokens and their log-probabilities.",
                f"{MAX_LIKELY} are the limit: sequences times tokens of each times the likely "
                "ones at a position.",
                "Ask for fewer of them, for fewer sequences, or set max_tokens.",
            )
        self._service.samples.refuse_if_full(request.call.tenant)
        return drawn_seed() if sampling.seed is None else checked_seed(sampling.seed)

    @asynccontextmanager
    async def _recorded(self, request: InferenceRequest, seed: int) -> AsyncIterator[Record]:
        """The journal has the request, and then how the block ended: samples are not kept, a
        failure is. In a gateway session they are kept.
        """
        call = request.call
        if call.capture is not None and not request.scores_only:
            async with call.capture.recorded(request, seed) as record:
                yield record
            return
        name, outcome = new_id(), failure(ServerError("The answer was not finished."))
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
            await self._service.journal.accept(entry)
            yield Unkept(seed)
            outcome = Outcome(b"")
        except HalteresError as error:
            outcome = failure(error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            outcome = CANCELLED
            raise
        finally:
            self._service.journal.settle(name, outcome.state, steady_time(), outcome.body or None)


def _each(results: Iterable[SampleResult]) -> Iterator[tuple[Sequence, int]]:
    """Every sequence with its policy version."""
    for result in results:
        for one in result.sequences:
            yield one, result.version


async def _known(result: SampleResult) -> SampleResult:
    return result


async def merged(streams: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams as they come, each with its stream's number; the first failure ends
    all.
    """
    if len(streams) == 1:  # the usual case needs no task for each item
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return

    async def next_of(at: int) -> T | None:
        return await anext(streams[at], None)

    waiting = {asyncio.create_task(next_of(at)): at for at in range(len(streams))}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                at = waiting.pop(task)
                if (item := task.result()) is not None:
                    waiting[asyncio.create_task(next_of(at))] = at
                    yield at, item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
