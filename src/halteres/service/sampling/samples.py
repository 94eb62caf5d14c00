"""Sampling requests, executed: whole or as a stream, which outlives its engine."""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from halteres.engine import protocol
from halteres.engine.protocol import (
    EngineGone,
    ExtraLogprobs,
    ModelInfo,
    Piece,
    SampleResult,
    SamplingParams,
    TopK,
)
from halteres.engine.stream_buffer import PieceQueue
from halteres.errors import HalteresError, InvalidData, NotReady, ServerError, UserError, boundary
from halteres.service.durable.futures import (
    LOST_SAMPLE,
    Future,
    Futures,
    Outcome,
    binary_result,
    failure,
    outcome_of,
)
from halteres.service.durable.journal import Recorded
from halteres.service.fleet import Fleet, Pick, failover_engines, running, with_failover
from halteres.service.keys import Tenant
from halteres.service.limits import Allowances, FairQueue, Threads
from halteres.service.sampling.agreement import Agreement
from halteres.service.sampling.router import Router
from halteres.service.sampling.sessions import Sampler, Samplers
from halteres.service.sampling.snapshots import Snapshot, Snapshots
from halteres.service.wire.bodies import MOST_STOPS, Drawn, Sample, Sampling, read
from halteres.service.wire.results import ExtraOutputs, extra_outputs_of, write_sample

TOKEN_BYTES = 4

PLACES, MOST_PLACES = 640, 576
"""Sequences in one engine at a time, and of one tenant: those that it decodes together (512), and
the next ones, so that it never waits for the link. All others wait here, where tenants take turns;
the engine's own queue is first come, first served.
"""

MAX_SAMPLES = 1024  # sequences of one request
TARGET_WORK = 8  # of one cell of `target_prompt_logprobs`, beside the reading of one byte


class ResultGone(ServerError):
    """The result of a request that was answered once, and that nothing can compute again."""

    code = "result_gone"


def gone() -> ResultGone:
    """The error for one of them."""
    return ResultGone(
        "The result of this sample is gone.",
        "It was kept for a while, and the engine would not draw the same tokens a second time.",
        "Sample again, as a new request, and poll its result within the hour.",
    )


CANCELLED = failure(UserError("The request was cancelled by its client."))


class StreamBroken(ServerError):
    """A stream that no engine can go on with."""

    code = "stream_broken"


async def stream_with_failover(
    pick: Pick[protocol.Samples],
    begin: Callable[[protocol.Samples], AsyncGenerator[Piece, None]],
    is_exact: Callable[[], bool],
) -> AsyncGenerator[Piece, None]:
    """The pieces of a stream that needs nothing an engine held before; if that engine dies, the
    next one goes on, or StreamBroken is raised where it would write something else than was sent.
    """
    sent: Counter[int] = Counter()  # tokens of each sequence
    async with aclosing(failover_engines(pick)) as engines:
        async for engine in engines:
            written: Counter[int] = Counter()  # by this engine
            try:
                if sent and not is_exact():
                    raise StreamBroken(
                        "The engine died under this stream.",
                        "Its successor would not write the same tokens again.",
                        "Send the request again, with what has come as its prompt where that will "
                        "do.",
                    )
                async with aclosing(begin(engine)) as pieces:
                    async for piece in pieces:
                        known = max(0, sent[piece.sample] - written[piece.sample])
                        written[piece.sample] += len(piece.tokens) // TOKEN_BYTES
                        if (unsent := without(piece, known)) is not None:
                            sent[piece.sample] = written[piece.sample]
                            yield unsent
                return
            except EngineGone:
                continue


def without(piece: Piece, known: int) -> Piece | None:
    """A piece without its first `known` tokens; None if that leaves nothing."""
    if known == 0:
        return piece
    skipped, top = known * TOKEN_BYTES, piece.top
    if skipped >= len(piece.tokens):
        return None
    if top is not None:
        ids, logprobs = top.ids[skipped * top.k :], top.logprobs[skipped * top.k :]
        top = TopK(k=top.k, length=top.length - known, ids=ids, logprobs=logprobs)
    return msgspec.structs.replace(
        piece, tokens=piece.tokens[skipped:], logprobs=piece.logprobs[skipped:], top=top
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What one engine call samples. The seed is in it: another engine draws the same."""

    snapshot: Snapshot | None  # None: the base model
    prompt: bytes  # int32 token ids
    num_samples: int
    params: SamplingParams
    extra: ExtraLogprobs
    tenant: Tenant
    # it was answered before: only an engine that is exact has the same answer
    is_repeated: bool = False

    @property
    def name(self) -> str | None:
        """Of the snapshot in the engine."""
        return None if self.snapshot is None else self.snapshot.name

    def fits(self, model: ModelInfo) -> bool:
        """Whether this engine can answer it."""
        lora = self.snapshot.lora if self.snapshot else None
        return not model.lacks(self.params, self.extra) and (lora is None or model.takes(lora))

    @property
    def call(self) -> tuple[str | None, bytes, int, SamplingParams, ExtraLogprobs]:
        """The arguments of `Samples.sample`."""
        return self.name, self.prompt, self.num_samples, self.params, self.extra


class Samples:
    """Sampling from snapshots."""

    def __init__(
        self,
        fleet: Fleet,
        futures: Futures,
        samplers: Samplers,
        snapshots: Snapshots,
        tasks: asyncio.TaskGroup,
        threads: Threads,
        *,
        logprobs: Literal["raw", "tempered"],
        limits: Allowances,
    ) -> None:
        self._fleet, self._futures, self._samplers, self._snapshots = (
            fleet,
            futures,
            samplers,
            snapshots,
        )
        self._tasks, self._threads = tasks, threads
        self.logprobs: Literal["raw", "tempered"] = logprobs
        self._running: dict[str, asyncio.Task[None]] = {}  # by request id
        self._limits, self._under_way = limits, Counter[Tenant]()
        self._queue = FairQueue(PLACES * len(fleet.samplers), MOST_PLACES * len(fleet.samplers))
        self._router = Router(fleet)
        self.agreement = Agreement(fleet, snapshots, tasks)
        futures.redraw = self.redraw

    def refuse_if_full(self, tenant: Tenant) -> None:
        """Raise Overloaded rather than take more work of a tenant than it may have."""
        self._limits.of(tenant).check_samples(self._under_way[tenant])

    def _is_exact(self) -> bool:
        """What was sampled would be the same another time."""
        return self._fleet.samples_exactly is True

    @contextmanager
    def _counted(self, draw: Draw) -> Iterator[None]:
        if not 1 <= draw.num_samples <= MAX_SAMPLES:
            raise InvalidData(
                f"num_samples is {draw.num_samples}.", f"It must be 1 to {MAX_SAMPLES}."
            )
        self._under_way[draw.tenant] += 1
        try:
            yield
        finally:
            self._under_way[draw.tenant] -= 1

    async def draw(self, draw: Draw) -> SampleResult:
        """Sample when it is the tenant's turn."""
        return (await self._drawn(draw))[0]

    async def _drawn(self, draw: Draw) -> tuple[SampleResult, bool]:
        """As `draw`, and whether it would be the same another time."""

        async def call(engine: protocol.Samples) -> tuple[SampleResult, bool]:
            is_exact = self._is_exact()
            if draw.is_repeated and not is_exact:
                raise gone()
            async with self._snapshots.resident(draw.snapshot, engine):
                result = await engine.sample(*draw.call)
            self.agreement.note(engine, draw.snapshot, draw.prompt, draw.params, result)
            return result, is_exact

        with self._counted(draw):
            async with self._queue.places(draw.tenant, draw.num_samples):
                with self._router.route(draw.name, draw.prompt, draw.fits) as pick:
                    return await with_failover(pick, call)

    async def stream(self, draw: Draw) -> AsyncGenerator[Piece, None]:
        """As `draw`, sent while it is written; a reader that goes away frees the rows. The places
        are held until the rows are done, however slowly they are read.
        """

        async def begin(engine: protocol.Samples) -> AsyncGenerator[Piece, None]:
            async with self._snapshots.resident(draw.snapshot, engine):
                pieces = engine.stream(*draw.call)
                try:
                    async for piece in pieces:
                        yield piece
                finally:
                    # whoever leaves early ends the rows at once
                    if isinstance(pieces, AsyncGenerator):
                        await pieces.aclose()

        waiting = PieceQueue()

        async def fill() -> None:
            try:
                async with self._queue.places(draw.tenant, draw.num_samples):
                    with (
                        boundary(ServerError, "The stream"),
                        self._router.route(draw.name, draw.prompt, draw.fits) as pick,
                    ):
                        written = stream_with_failover(pick, begin, self._is_exact)
                        async with aclosing(written) as pieces:
                            async for piece in pieces:
                                waiting.put(piece)
                waiting.end()
            except HalteresError as error:
                waiting.end(error)

        with self._counted(draw):
            filling = asyncio.create_task(fill(), name="stream")
            try:
                async for piece in waiting.read():
                    yield piece
            finally:
                filling.cancel()
                await asyncio.gather(filling, return_exceptions=True)

    # Requests of the journal

    def start(
        self,
        future: Future,
        sampler: Sampler,
        body: Sample,
        drawn: Drawn | None,
        *,
        is_repeated: bool = False,
    ) -> None:
        """Execute a client's request, with what was drawn when it came; its future is settled when
        it is done. `is_repeated`: it was answered before.
        """

        async def execute() -> None:
            try:
                work = self._sample(
                    sampler, body, drawn or {}, future.size, is_repeated=is_repeated
                )
                outcome = await outcome_of(future, work)
            except asyncio.CancelledError:
                self._futures.settle(future, CANCELLED)
                raise
            self._futures.settle(future, outcome)

        task = self._running[future.request_id] = self._tasks.create_task(execute(), name="sample")
        task.add_done_callback(lambda _: self._running.pop(future.request_id, None))

    def cancel(self, request_id: str) -> None:
        """Stop a request that nobody waits for any more; unknown ones are fine."""
        if (task := self._running.get(request_id)) is not None:
            task.cancel()

    def stop(self) -> None:
        """The service ends: what runs is left to its successor."""
        for task in self._running.values():
            task.cancel()

    async def redraw(self, row: Recorded) -> Future:
        """Execute a request of the journal, which an earlier life of the service began or answered.
        The seed is in it: an engine that is exact has the same outcome. One that is not executes
        what nobody has the answer of; of the rest it says that the result is gone.
        """
        future = self._futures.adopt(row)
        try:
            body, sampler = read(row.body, Sample), self._samplers.find(row.subject, row.tenant)
            self.start(future, sampler, body, row.drawn, is_repeated=row.state != "accepted")
        except HalteresError as error:
            self._futures.settle(future, failure(error))
        return future

    async def lost(self) -> Outcome:
        """What a poll gets for a sample that is in no journal any more: its client submits it again
        by itself, unless that would be another answer than it may have had.
        """
        try:
            async with asyncio.timeout(self._futures.poll_s):
                await running(self._fleet.any_sampler)
                return LOST_SAMPLE if self._is_exact() else failure(gone())
        except TimeoutError:
            raise NotReady("The engine is starting.", next="Ask again in a moment.") from None

    async def _sample(
        self, sampler: Sampler, body: Sample, drawn: Drawn, size: int, *, is_repeated: bool
    ) -> Outcome:
        """`size`: of the body in bytes; of a large one, tokens are packed in a thread."""
        snapshot = self._samplers.at(sampler, drawn.get("weights"))

        def read_prompt() -> tuple[bytes, ExtraOutputs]:
            prompt = _prompt_of(body)
            return prompt, extra_outputs_of(body, len(prompt) // TOKEN_BYTES)

        work = max(
            size, TARGET_WORK * len(targets.data) if (targets := body.target_prompt_logprobs) else 0
        )
        prompt, extra = await self._threads.run(sampler.tenant, work, read_prompt)
        params = params_of(body.sampling_params, drawn.get("seed", body.sampling_params.seed) or 0)
        draw = Draw(
            snapshot=snapshot,
            prompt=prompt,
            num_samples=body.num_samples,
            params=msgspec.structs.replace(params, logprobs=self.logprobs),
            extra=extra.engine,
            tenant=sampler.tenant,
            is_repeated=is_repeated,
        )
        result, is_exact = await self._drawn(draw)
        return replace(binary_result(write_sample(result, extra)), repeatable=is_exact)


def drawn_for(body: Sample, sampler: Sampler) -> dict[str, int]:
    """What the journal keeps beside a request, so that it gives the same whenever it is executed: a
    seed where the client sent none, and which weights its sampling session means now.
    """
    seed = {} if body.sampling_params.seed is not None else {"seed": drawn_seed()}
    return {**seed, **({} if sampler.weights is None else {"weights": sampler.weights})}


def drawn_seed() -> int:
    """A seed for a request without one."""
    return secrets.randbits(32)


def checked_seed(seed: int) -> int:
    """The seed."""
    if not -(2**63) <= seed < 2**63 - MAX_SAMPLES:
        raise InvalidData(
            f"The seed {seed} is out of range.", f"It must be -2**63 to 2**63 - {MAX_SAMPLES + 1}."
        )
    return seed


def params_of(body: Sampling, seed: int) -> SamplingParams:
    """The engine's sampling parameters. `stop` as text stops at text and at the model's end token;
    as token ids it replaces the end token; an empty list disables every stop.
    """
    stop = [body.stop] if isinstance(body.stop, str | int) else body.stop
    if len(stop or ()) > MOST_STOPS:
        raise InvalidData(
            f"stop has {len(stop or ())} texts and tokens.", f"{MOST_STOPS} are the limit."
        )
    strings = tuple(one for one in stop or () if isinstance(one, str))
    tokens = tuple(one for one in stop or () if isinstance(one, int))
    if any(not text for text in strings):
        raise InvalidData(
            "A stop string is empty.", next="Leave it out, or send stop=[] to disable every stop."
        )
    if any(not -(2**31) <= token < 2**31 for token in tokens):
        raise InvalidData(
            "stop holds something that is no token id.",
            next="Send ids of the model's own tokenizer.",
        )
    return SamplingParams(
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        seed=checked_seed(seed),
        stop_tokens=None if stop is None or (strings and not tokens) else tokens,
        stop_strings=strings,
    )


def _prompt_of(body: Sample) -> bytes:
    for chunk in body.prompt.chunks:
        if chunk.type != "encoded_text":
            raise InvalidData(
                f"The prompt holds a '{chunk.type[:50]}' chunk.",
                "The model reads text tokens only.",
            )
    return b"".join(packed(chunk.tokens) for chunk in body.prompt.chunks)


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as int32."""
    try:
        return array("i", tokens).tobytes()
    except (OverflowError, TypeError) as error:
        raise InvalidData("The prompt holds something that is no token id.", f"{error}.") from error
