"""Inference: requests of any shape sampled, and their tokens as text, whole or in pieces while they
come.

Guarantees: the pieces of an answer, joined, are the text of the whole.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from halteres.clients import rewards
from halteres.engine.protocol import (
    ExtraLogprobs,
    LogprobKind,
    Piece,
    SampleResult,
    Sequence,
    TopK,
)
from halteres.errors import (
    HalteresError,
    InvalidData,
    NotFound,
    NotReady,
    ServerError,
    nearest,
    shortened,
    unknown,
)
from halteres.process import steady_time
from halteres.scores import Scorable, best_first
from halteres.service.context_window import check_room
from halteres.service.durable.futures import Outcome, failure
from halteres.service.durable.journal import Entry, new_id
from halteres.service.inference.fields import Dialect, read
from halteres.service.inference.requests import (
    Call,
    Chat,
    InferenceRequest,
    Prompt,
    SamplingFields,
    Weights,
    render,
)
from halteres.service.keys import Tenant
from halteres.service.limits import LONG
from halteres.service.sampling.samples import CANCELLED, Draw, checked_seed, drawn_seed, packed
from halteres.service.service import GENERATE, Service
from halteres.service.wire.results import FILLER_LOGPROB
from halteres.short_texts import beginning
from halteres.tokenizer import Tokenizer
from halteres.tool_calls import ToolCall, ToolReader

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

BROKEN = "\N{REPLACEMENT CHARACTER}"

CONTEXT_TOKENS = 8
"""Tokens before new ones that are decoded with them: tokenizers join neighbours, over a few tokens
at most.
"""

WINDOW_TOKENS = 64

_KINDS: Mapping[str, LogprobKind] = {"raw_logprobs": "raw", "processed_logprobs": "tempered"}
"""What `logprobs_mode` names, by vLLM's words."""

# bytes; of a run of broken ones that is longer, all but the last few stay broken
LONGEST_CHARACTER = 4

SCORED_WITHIN_S = 120.0

log = logging.getLogger(__name__)


# From tokens to text


class Detokenizer:
    """The text of one sequence; a character whose bytes are spread over tokens comes when it is
    whole.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._window: list[int] = []  # the newest tokens
        self._sent = 0  # characters of the window's text

    def add(self, tokens: list[int], *, last: bool = False) -> str:
        """The text that is certain now; with the last tokens, all of it."""
        self._window += tokens
        text = self._decoded()
        certain = (
            len(text) if last else max(len(text.rstrip(BROKEN)), len(text) - LONGEST_CHARACTER)
        )
        new = text[self._sent : certain]
        self._sent += len(new)
        if len(self._window) > WINDOW_TOKENS:
            unsent = len(text) - self._sent
            self._window = self._window[-CONTEXT_TOKENS:]
            self._sent = max(0, len(self._decoded()) - unsent)
        return new

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)


class Cut:
    """Ends a text before (or behind) the first of some strings, wherever the pieces break."""

    def __init__(self, stops: tuple[str, ...], *, keep: bool = False) -> None:
        self._stops, self._keep = stops, keep
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str, *, last: bool = False) -> str:
        """The text that holds no stop string and no beginning of one; with the last piece,
        beginnings too.
        """
        if self.matched is not None:
            return ""
        self._held += text
        found = min(
            ((at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0), default=None
        )
        if found is not None:
            at, self.matched = found
            return self._held[: at + (len(self.matched) if self._keep else 0)]
        whole = len(self._held) if last else beginning(self._held, self._stops)
        sent, self._held = self._held[:whole], self._held[whole:]
        return sent


# tokens and their log-probabilities at one position, the most likely first
Row = list[tuple[int, float]]

Position = tuple[int, float | None, Row]
"""A token, its log-probability (None where nothing predicts it), and what was likely there where
that is answered.
"""


def positions_of(tokens: list[int], logprobs: bytes, top: TopK | None) -> list[Position]:
    """One for each token."""
    rows: list[Row] = [[] for _ in tokens]
    if top is not None:
        ids = np.frombuffer(top.ids, np.int32).reshape(top.length, top.k).tolist()
        values = np.frombuffer(top.logprobs, np.float32).reshape(top.length, top.k).tolist()
        for row, *pairs in zip(rows, ids, values, strict=True):
            row += [
                (token, value)
                for token, value in zip(*pairs, strict=True)
                if value > FILLER_LOGPROB
            ]
    values = np.frombuffer(logprobs, np.float32).tolist()
    return [
        (token, None if value != value else value, row)
        for token, value, row in zip(tokens, values, rows, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One sampled sequence, or its next piece."""

    place: int  # number of the sequence among all of the request
    sample: int  # ... and among those of its prompt
    prompt: Prompt
    of_prompt: list[Position] | None
    tokens: list[int]
    positions: list[Position]  # of the tokens
    first: bool  # nothing of the sequence came before
    text: str  # without special tokens and what stopped it, unless they are to be included
    parts: list[str | ToolCall]  # the text as texts and calls
    called: bool  # there was a call so far
    finish: Literal["stop", "length"] | None  # None: more pieces come
    matched: str | int | None  # the stop string, or the request's own stop token, that ended it
    version: int  # policy version
    # tokens of the sequence, where the context had no room for the `max_tokens` it was to have
    truncated_max_tokens: int | None

    @property
    def plain(self) -> str:
        """The text without calls."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[ToolCall]:
        """The calls."""
        return [part for part in self.parts if isinstance(part, ToolCall)]


@dataclass(slots=True)
class Usage:
    """Tokens and policy versions of an answer, as far as it is written."""

    completion: int = 0
    versions: set[int] = field(default_factory=set)
    # tokens of sequences that the context had no more room for
    truncated: set[int] = field(default_factory=set)

    def add(self, one: Output) -> None:
        """Count a sequence, or a piece of one."""
        self.completion += len(one.tokens)
        self.versions.add(one.version)
        if one.truncated_max_tokens is not None:
            self.truncated.add(one.truncated_max_tokens)

    @property
    def policy_version(self) -> list[int]:
        """Smallest and largest."""
        return [min(self.versions, default=0), max(self.versions, default=0)]

    @property
    def ours(self) -> dict[str, Any]:
        """Fields that an answer has in every dialect: the policy versions, and where `max_tokens`
        did not fit beside a prompt, how many tokens did.
        """
        ours: dict[str, Any] = {"policy_version": self.policy_version}
        if self.truncated:
            ours["truncated_max_tokens"] = min(self.truncated)
        return ours


class Writer:
    """One sequence: from its tokens to its text."""

    def __init__(self, tokenizer: Tokenizer, request: InferenceRequest, place: int) -> None:
        self._place, sampling = place, request.sampling
        self._sample, self._prompt = place % sampling.n, request.prompts[place // sampling.n]
        self._own_stops, self._keeps_stop = (
            frozenset(sampling.stop_tokens),
            sampling.include_stop_str_in_output,
        )
        self._ends = (
            self._own_stops
            if sampling.ignore_eos
            else self._own_stops | frozenset(tokenizer.eos_token_ids)
        )
        self._characters = Detokenizer(tokenizer, skip_special_tokens=sampling.skip_special_tokens)
        self._cut = Cut(sampling.stop_strings, keep=self._keeps_stop)
        self._calls = ToolReader(
            parallel=bool(request.parallel_calls),
            in_thought=request.goes_on_thinking(self._prompt),
        )
        self._reads_calls, self._first = request.parallel_calls is not None, True
        self._max_tokens, self._num_tokens = sampling.max_tokens, 0

    def add(
        self, piece: Sequence | Piece, version: int, of_prompt: list[Position] | None = None
    ) -> Output:
        """The next tokens, or all of them; the last ones have a stop reason."""
        ids: list[int] = np.frombuffer(piece.tokens, np.int32).tolist()
        finish, last = piece.stop_reason, piece.stop_reason is not None
        stopped_by = ids[-1] if finish == "stop" and ids and ids[-1] in self._ends else None
        shown = ids if stopped_by is None or self._keeps_stop else ids[:-1]
        text = self._cut.add(self._characters.add(shown, last=last), last=last)
        plain: list[str | ToolCall] = [text] if text else []
        first, self._first = self._first, False
        if last and self._cut.matched is not None:
            finish = "stop"
        self._num_tokens += len(ids)
        is_truncated = finish == "length" and self._num_tokens < (self._max_tokens or 0)
        return Output(
            place=self._place,
            sample=self._sample,
            prompt=self._prompt,
            of_prompt=of_prompt,
            tokens=ids,
            positions=positions_of(ids, piece.logprobs, piece.top),
            first=first,
            text=text,
            parts=self._calls.add(text, last=last) if self._reads_calls else plain,
            called=self._calls.calls > 0,
            finish=finish,
            matched=(stopped_by if stopped_by in self._own_stops else self._cut.matched)
            if last
            else None,
            version=version,
            truncated_max_tokens=self._num_tokens if is_truncated else None,
        )


# Sampling


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
            return [Prompt.of(one, self.tokenizer, context, special) for one in found]

        return await self.in_thread(call, made, len(call.body))

    async def chat_prompt(
        self, call: Call, chat: Callable[[], Chat], special: bool | None = None
    ) -> Prompt:
        """A chat's tokens; the template writes the special ones itself. It is the model's code: it
        runs in a thread.
        """
        context = await self.context_length()
        return await self.in_thread(
            call,
            lambda: Prompt.of(
                render(self.tokenizer, chat()), self.tokenizer, context, bool(special)
            ),
        )

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
                    outputs.append(
                        Writer(self.tokenizer, request, place).add(
                            sequence, result.version, of_prompt
                        )
                    )
            return shape(outputs)

        async with self._recorded(request, seed):
            calls = (self._service.samples.draw(draw) for draw in self._calls_of(request, seed))
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
            return await self.in_thread(request.call, shaped, TOKEN_WORK * work)

    async def stream(self, request: InferenceRequest) -> AsyncGenerator[Output, None]:
        """The same, in pieces as they are sampled (in one where the prompt is scored); whoever
        stops reading frees the rows.
        """
        seed, n = await self._checked(request, MAX_STREAMED_SCORES), request.sampling.n
        if request.prompt_top is not None:
            for one in await self.write(request, list):
                yield one
            return
        writers = [
            Writer(self.tokenizer, request, place) for place in range(len(request.prompts) * n)
        ]
        async with self._recorded(request, seed):
            streams = [self._service.samples.stream(draw) for draw in self._calls_of(request, seed)]
            async with aclosing(merged(streams)) as pieces:
                async for at, piece in pieces:
                    yield writers[at * n + piece.sample].add(piece, piece.version)

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
    async def _recorded(self, request: InferenceRequest, seed: int) -> AsyncIterator[None]:
        """The journal has the request, and then how the block ended: samples are not kept, a
        failure is.
        """
        call, name, outcome = (
            request.call,
            new_id(),
            failure(ServerError("The answer was not finished.")),
        )
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
            yield
            outcome = Outcome(b"")
        except HalteresError as error:
            outcome = failure(error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            outcome = CANCELLED
            raise
        finally:
            self._service.journal.settle(name, outcome.state, steady_time(), outcome.body or None)


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
        self,
        outputs: list[Output],
        count: int,
        reward_model: str | None,
        text_of: Callable[[Output], Scorable],
    ) -> list[Output]:
        """So many sequences of each prompt, the best first, by a reward model's score or else the
        mean log-probability of a token; one that could not be scored comes behind all that could.
        NotReady where none could.
        """
        values: list[float | None] = [
            math.fsum(logprob or 0.0 for _, logprob, _ in one.positions) / len(one.tokens)
            if one.tokens
            else None
            for one in outputs
        ]
        if reward_model is not None:
            texts = [text_of(one) for one in outputs]
            try:
                scores = await rewards.score(
                    self._addresses[reward_model], texts, timeout_s=SCORED_WITHIN_S
                )
            except HalteresError as error:
                # it may name the operator's address: that is for the log
                log.warning(
                    "The reward model '%s' could not be asked: %s", reward_model, error.sentence
                )
                what = f"The reward model '{reward_model}' could not be asked."
                raise NotReady(what, next="Try again, or leave `reward_model` out.") from error
            if not any(scores):
                raise NotReady(
                    f"The reward model '{reward_model}' could not score one of {len(texts)} "
                    "answers."
                )
            values = [None if score is None else score.value for score in scores]
        of_prompt: dict[int, list[int]] = {}
        for at, one in enumerate(outputs):
            of_prompt.setdefault(one.place - one.sample, []).append(at)
        return [
            replace(outputs[places[rank]], place=number * count + place, sample=place)
            for number, places in enumerate(of_prompt.values())
            for place, rank in enumerate(best_first([values[at] for at in places])[:count])
        ]
