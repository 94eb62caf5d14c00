"""The calls of one session: what each is sampled with, the node that it becomes, and the answer of
one that is sent again.

A call's row in the journal has a key that a client's retry has, too:

    Idempotency-Key             the same key
    x-stainless-retry-count > 0  the same body as the newest call

settled: the answer is made from its nodes    ended otherwise, or open when the service died: it is
                                              sampled again with the row's seed and policy version
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from halteres.engine.protocol import SampleResult, TopK
from halteres.engine.protocol import Sequence as Sampled
from halteres.errors import Conflict, HalteresError, NotReady, ServerError
from halteres.process import steady_time
from halteres.service.durable.futures import Outcome, failure
from halteres.service.durable.journal import GATEWAY, Entry, Journal
from halteres.service.gateway.history import History, text_behind
from halteres.service.gateway.nodes import (
    Node,
    Origin,
    ids_mark,
    read_nodes,
    text_mark,
    token_list,
    write_nodes,
)
from halteres.service.gateway.sessions import GatewaySession
from halteres.service.inference.requests import (
    Chat,
    InferenceRequest,
    Position,
    Prompt,
    SampledPiece,
    SamplingFields,
)
from halteres.service.limits import Limits
from halteres.service.sampling.samples import CANCELLED, packed
from halteres.service.wire.results import FILLER_LOGPROB
from halteres.tokenizer import Tokenizer
from halteres.tool_calls import ToolCall

OUTCOME_TYPE = "application/x-msgpack"

SAME_WITHIN_S = 600.0
"""How long a repeated request waits for the first one, which is still under way."""

RECORDED_WITHIN_S = 30.0
"""How long an answer waits for the journal to have it."""

HARNESS_HEADERS = ("x-session-id", "session_id", "session-id")
"""By which programs name their own sessions: verifiers, Codex."""

SEED_STEP = 1_000_003
"""Between the seeds of two calls: the prompts of one call have seeds that follow each other."""

LONGEST_NAME = 200  # characters of one of those

NEUTRAL: Mapping[str, Any] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "seed": None,
    "logprobs_mode": None,
}
"""What a session samples with where its program asks for something else: the whole distribution, a
seed of its own, the kind of log-probabilities that the service was started with.
"""


PENALTIES: Mapping[str, float] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""What shapes a distribution that the policy does not have, each with the value that does not."""


def shaped_by(request: InferenceRequest) -> list[str]:
    """What a request's answer is held to beside the policy: penalties by their names, `grammar`."""
    sampling = request.sampling
    found = [name for name, neutral in PENALTIES.items() if getattr(sampling, name) != neutral]
    if (request.grammar or sampling.grammar) is not None:
        found.append("grammar")
    return found


@dataclass(slots=True, kw_only=True)
class Row:
    """One call in the journal."""

    id: str
    key: str
    drawn: Mapping[str, int]  # its seed and policy version
    num_bytes: int  # of its body, and of its nodes
    nodes: list[Node] = field(default_factory=list[Node])  # empty: it was never whole


class SessionCapture:
    """All calls of one session."""

    def __init__(
        self, session: GatewaySession, journal: Journal, tokenizer: Tokenizer, limits: Limits
    ) -> None:
        self.session, self._journal, self.tokenizer = session, journal, tokenizer
        self._limits = limits
        self.history = History(
            tokenizer,
            keep_reasoning=session.opening.keep_reasoning,
            train_shaped=session.opening.train_shaped,
        )
        self._rows: dict[str, Row] = {}  # by key
        self._num_rows: dict[str, int] = {}  # of each body: how often it came as a new request
        self._under_way: dict[str, asyncio.Event] = {}  # by key
        self._num_seeds = 0  # that were given
        self._num_bytes = 0
        self._num_keeping = 0  # calls that were whole in time, and are being recorded
        self._nothing_to_keep = asyncio.Event()
        self._nothing_to_keep.set()

    async def load(self) -> None:
        """Read the calls that the journal has."""
        for row in await self._journal.of_session(self.session.id):
            found = Row(
                id=row["id"], key=row["key"], drawn=row["drawn"], num_bytes=row["num_bytes"]
            )
            if row["state"] == "done":
                found.nodes = read_nodes(row["outcome"])
                found.num_bytes += len(row["outcome"])
            self._enter(found)
        self._num_seeds = len(self._rows)
        for node in sorted(self._nodes(), key=lambda node: node.at):
            self.history.add(node)

    def _nodes(self) -> list[Node]:
        return [node for row in self._rows.values() for node in row.nodes]

    def _enter(self, row: Row) -> None:
        self._rows[row.key] = row
        self._num_bytes += row.num_bytes
        body, _, number = row.key.rpartition("#")
        if body:
            self._num_rows[body] = max(self._num_rows.get(body, 0), int(number) + 1)

    def next_seed(self) -> int | None:
        """A seed for one more request, where the session has seeds of its own; no two are alike."""
        first = self.session.opening.sampling.seed
        if first is None:
            return None
        seed = (first + SEED_STEP * self._num_seeds) % 2**31
        self._num_seeds += 1
        return seed

    async def call(self, path: str, headers: Mapping[str, str], body: bytes) -> CapturedCall:
        """A call that comes now. Raises SessionOver, LimitReached; Conflict for an Idempotency-Key
        that came with another body.
        """
        self.session.check_open(steady_time())
        digest = hashlib.blake2b(path.encode() + b"\0" + body, digest_size=16).hexdigest()
        key = self._key_of(digest, headers)
        while (under_way := self._under_way.get(key)) is not None:
            try:
                async with asyncio.timeout(SAME_WITHIN_S):
                    await under_way.wait()
            except TimeoutError:
                raise NotReady("The first request of this kind is still under way.") from None
        row = self._rows.get(key)
        if row is None or not row.nodes:
            # calls that failed are kept, too
            num_calls = max(len(self.history.nodes), len(self._rows))
            self._limits.check_gateway_session(num_calls, self._num_bytes)
        named = (headers.get(name) for name in HARNESS_HEADERS)
        harness_session = next((name[:LONGEST_NAME] for name in named if name), None)
        return CapturedCall(self, path, digest, key, harness_session, row)

    def _key_of(self, digest: str, headers: Mapping[str, str]) -> str:
        """The key of a request's row, where a client names it or sends it again; empty: it is a new
        one, and its row has a number of its own once there is a row.
        """
        place = f"{GATEWAY}/{self.session.id}/"
        given = headers.get("idempotency-key")
        if given:
            named = hashlib.blake2b(given.encode(), digest_size=16).hexdigest()
            key = f"{place}{named}/"
            other = next((one for one in self._rows if one.startswith(key)), None)
            if other is not None and other != key + digest:
                raise Conflict(
                    "This Idempotency-Key came before with another body.",
                    next="Send a key of its own with every new request.",
                )
            return key + digest
        count = self._num_calls(place + digest)
        is_retry = headers.get("x-stainless-retry-count", "0") not in ("", "0")
        if is_retry and count > 0:
            return f"{place}{digest}#{count - 1}"
        return ""

    def _new_key(self, digest: str) -> str:
        """The key of a request that no other one repeats yet."""
        body = f"{GATEWAY}/{self.session.id}/{digest}"
        return f"{body}#{self._num_calls(body)}"

    def _num_calls(self, body: str) -> int:
        """How often a body came as a new request, those included whose rows the journal does not
        have yet.
        """
        number = self._num_rows.get(body, 0)
        while f"{body}#{number}" in self._under_way:
            number += 1
        return number

    @asynccontextmanager
    async def recorded(
        self, call: CapturedCall, request: InferenceRequest, seed: int
    ) -> AsyncIterator[NodeRecord]:
        """The journal has a call while the block runs."""
        key = call.key or self._new_key(call.digest)
        if key in self._under_way:
            raise NotReady("The same request is under way.", next="Send it again.", retry_after_s=1)
        row = self._rows.get(key)
        if row is not None and row.nodes:
            yield NodeRecord(self, call, request, row)
            return
        done = self._under_way[key] = asyncio.Event()
        outcome = failure(ServerError("The answer was not finished."))
        try:
            if row is None:
                row = await self._accept(key, request, seed)
            record = NodeRecord(self, call, request, row)
            try:
                yield record
            except HalteresError as error:
                outcome = failure(error)
                raise
            except (asyncio.CancelledError, GeneratorExit):
                outcome = CANCELLED
                raise
            finally:
                if not record.is_settled:
                    self._journal.settle(row.id, outcome.state, steady_time(), outcome.body)
        finally:
            del self._under_way[key]
            done.set()

    async def _accept(self, key: str, request: InferenceRequest, seed: int) -> Row:
        entry = Entry(
            key=key,
            kind=GATEWAY,
            subject=self.session.id,
            tenant=self.session.tenant,
            body=request.call.body,
            drawn={"seed": seed, "version": request.weights.version},
        )
        row_id = await self._journal.accept(entry)
        row = Row(id=row_id, key=key, drawn=entry.drawn or {}, num_bytes=len(entry.body))
        self._enter(row)
        return row

    async def settled(self) -> None:
        """Return once every call that was whole in time is in the journal. NotReady where it cannot
        be written.
        """
        try:
            async with asyncio.timeout(RECORDED_WITHIN_S):
                await self._nothing_to_keep.wait()
        except TimeoutError:
            raise NotReady("Calls of the session are not recorded yet.") from None

    async def keep(self, row: Row, nodes: list[Node]) -> None:
        """The nodes of a call are in the journal when this returns. NotReady where it cannot be
        written.
        """
        if not self.session.is_open(steady_time()):
            nodes = [msgspec.structs.replace(node, late=True) for node in nodes]
            await self._keep(row, nodes)
            return
        self._num_keeping += 1
        self._nothing_to_keep.clear()
        try:
            await self._keep(row, nodes)
        finally:
            self._num_keeping -= 1
            if self._num_keeping == 0:
                self._nothing_to_keep.set()

    async def _keep(self, row: Row, nodes: list[Node]) -> None:
        outcome = Outcome(write_nodes(nodes), OUTCOME_TYPE)
        recorded = self._journal.settle(
            row.id, outcome.state, steady_time(), outcome.body, outcome.content_type
        )
        try:
            async with asyncio.timeout(RECORDED_WITHIN_S):
                await asyncio.shield(recorded)
        except TimeoutError:
            raise NotReady(
                "The answer could not be recorded.",
                "The journal cannot be written.",
                "Free space where the service keeps its state; the same request is answered then.",
            ) from None
        row.nodes = nodes
        row.num_bytes += len(outcome.body)
        self._num_bytes += len(outcome.body)
        for node in nodes:
            self.history.add(node)


class CapturedCall:
    """One call; what dialects see of a session (`inference.requests.Capture`)."""

    def __init__(
        self,
        capture: SessionCapture,
        dialect: str,
        digest: str,
        key: str,
        harness_session: str | None,
        row: Row | None,
    ) -> None:
        self._capture, self.dialect, self.digest, self.key = capture, dialect, digest, key
        self.harness_session, self._row = harness_session, row
        self.asked: dict[str, Any] = {}
        self._sampled_with: SamplingFields | None = None

    @property
    def run(self) -> str | None:
        """The session's."""
        return self._capture.session.opening.run

    @property
    def model(self) -> str | None:
        """The session's."""
        return self._capture.session.opening.model

    @property
    def version(self) -> int | None:
        """That of a request which is sampled again, else the session's."""
        if self._row is not None and not self._row.nodes:
            return self._row.drawn["version"]
        return self._capture.session.opening.pin_policy

    def prompt(
        self,
        given: Chat | str | list[int],
        context: int,
        *,
        special: bool | None,
        place: int = 0,
        num_prompts: int = 1,
    ) -> Prompt:
        """The prompt that this becomes; that of the first request where this one repeats it."""
        history = self._capture.history
        prompt = history.prompt(
            given, context, special=special, harness_session=self.harness_session
        )
        if self._row is None or not self._row.nodes:
            return prompt
        # as many nodes for each prompt, in the prompts' order
        node = self._row.nodes[place * len(self._row.nodes) // num_prompts]
        return Prompt(tokens=token_list(history.prompt_of(node)), text=prompt.text)

    def sampling(self, asked: SamplingFields) -> SamplingFields:
        """The session's temperature and the whole distribution; what was asked is noted."""
        # a streamed request whose prompt is scored comes by here twice
        if asked is self._sampled_with:
            return asked
        own = self._capture.session.opening.sampling
        chosen = {**NEUTRAL, "temperature": own.temperature, "seed": self._capture.next_seed()}
        if own.max_tokens is not None:
            most = own.max_tokens
            chosen["max_tokens"] = most if asked.max_tokens is None else min(asked.max_tokens, most)
        before = {name: getattr(asked, name) for name in chosen}
        self.asked = {name: value for name, value in before.items() if value != chosen[name]}
        # not by `replace`, which would put a length by its newer name in the session's place again
        sampled = copy.copy(asked)
        for name, value in chosen.items():
            setattr(sampled, name, value)
        self._sampled_with = sampled
        return sampled

    def recorded(self, request: InferenceRequest, seed: int) -> Any:
        """The journal has the request while the block runs."""
        return self._capture.recorded(self, request, seed)


@dataclass(slots=True)
class _Sequence:
    """One sequence as far as it is written."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float | None] = field(default_factory=list[Any])
    likely: list[list[tuple[int, float]]] = field(default_factory=list[Any])
    of_prompt: Sequence[Position] = ()
    parts: list[str | ToolCall] = field(default_factory=list[Any])
    versions: list[int] = field(default_factory=list[int])
    finish: str | None = None

    def add(self, output: SampledPiece) -> None:
        """All of it, or the next piece."""
        self.tokens += output.tokens
        for _, logprob, row in output.positions:
            self.logprobs.append(logprob)
            self.likely.append(row)
        if output.of_prompt is not None:
            self.of_prompt = output.of_prompt
        self.parts += output.parts
        self.versions.append(output.version)
        self.finish = output.finish

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message in OpenAI's form, arguments as objects."""
        content = "".join(part for part in self.parts if isinstance(part, str))
        message: dict[str, Any] = {"role": "assistant", "content": content}
        calls = [part for part in self.parts if isinstance(part, ToolCall)]
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments or {}},
                }
                for call in calls
            ]
        return message


class NodeRecord:
    """One call's row while it is answered (`inference.requests.Record`)."""

    def __init__(
        self, capture: SessionCapture, call: CapturedCall, request: InferenceRequest, row: Row
    ) -> None:
        self._capture, self._call, self._request, self._row = capture, call, request, row
        self.seed = row.drawn["seed"]
        self.stored = _results(row.nodes, request) if row.nodes else None
        self._sequences: dict[int, _Sequence] = {}
        self.is_settled = False

    def add(self, output: SampledPiece) -> None:
        """A sequence of the answer, or its next piece."""
        if self.stored is None:
            self._sequences.setdefault(output.place, _Sequence()).add(output)

    async def keep(self) -> None:
        """The journal has the nodes when this returns."""
        if self.stored is not None or self.is_settled:
            return
        nodes = [self._node(place, one) for place, one in sorted(self._sequences.items())]
        self.is_settled = True
        await self._capture.keep(self._row, nodes)

    def _node(self, place: int, one: _Sequence) -> Node:
        request, call, tokenizer = self._request, self._call, self._capture.tokenizer
        prompt = request.prompts[place // request.sampling.n]
        origin = prompt.origin
        assert isinstance(origin, Origin)  # noqa: S101 - `CapturedCall.prompt` made it
        sampled, ids = packed(one.tokens), packed(prompt.tokens)
        likely = _Likely.of(one.likely)
        of_prompt = one.of_prompt
        if place % request.sampling.n != 0:
            of_prompt = ()
        likely_of_prompt = _Likely.of([row for _, _, row in of_prompt])
        text_end, chat_end, said = None, None, origin.conversation
        if origin.text is not None:
            text_end = text_mark(origin.text + text_behind(tokenizer, prompt.tokens, one.tokens))
        answer, begun = one.message, ""
        history: dict[str, Any] = {}
        if said is not None:
            begun = said.begun
            answer["content"] = begun + answer["content"]
            chat_end = said.end_with(answer)
            last = len(said.messages) - said.continued
            history = {
                "system": said.system,
                "messages": said.messages[origin.recalled : last],
                "tools": said.tools,
            }
        return Node(
            id=f"{self._row.id}.{place}",
            at=steady_time(),
            dialect=call.dialect,
            harness_session=call.harness_session,
            request=call.digest,
            parent=origin.parent,
            reused=origin.reused,
            continues=origin.continues,
            recalled=origin.recalled,
            why=origin.why,
            prompt=ids[4 * origin.reused :],
            sampled=sampled,
            logprobs=_float32(one.logprobs),
            likely=likely.width,
            likely_ids=likely.ids,
            likely_logprobs=likely.logprobs,
            prompt_logprobs=_float32([logprob for _, logprob, _ in of_prompt]),
            prompt_likely=likely_of_prompt.width,
            prompt_likely_ids=likely_of_prompt.ids,
            prompt_likely_logprobs=likely_of_prompt.logprobs,
            version_min=min(one.versions),
            version_max=max(one.versions),
            stop_reason="length" if one.finish == "length" else "stop",
            **history,
            begun=begun,
            answer=answer,
            asked=call.asked,
            shaped_by=shaped_by(request),
            ids_end=ids_mark(ids + sampled),
            text_end=text_end,
            chat_end=chat_end,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Likely:
    """The K likeliest tokens of each position, as a node has them."""

    width: int  # K
    ids: bytes
    logprobs: bytes

    @classmethod
    def of(cls, rows: Sequence[Sequence[tuple[int, float]]]) -> _Likely:
        """Of pairs of a token and its log-probability, a row for each position."""
        width = max((len(row) for row in rows), default=0)
        return cls(
            width=width,
            ids=_filled(rows, width, 0, 0, np.int32),
            logprobs=_filled(rows, width, 1, FILLER_LOGPROB, np.float32),
        )


def _float32(logprobs: Sequence[float | None]) -> bytes:
    """Packed; NaN where nothing predicts a token."""
    known = [math.nan if one is None else one for one in logprobs]
    return np.asarray(known, np.float32).tobytes()


def _filled(
    rows: Sequence[Sequence[tuple[int, float]]], width: int, at: int, filler: float, kind: Any
) -> bytes:
    """One part of the pairs of each row, and fillers where it has fewer."""
    if width == 0:
        return b""
    return np.asarray(
        [[*(pair[at] for pair in row), *[filler] * (width - len(row))] for row in rows], kind
    ).tobytes()


def _results(nodes: Sequence[Node], request: InferenceRequest) -> list[SampleResult]:
    """What was sampled, as an engine gives it: one result for each prompt."""
    n = request.sampling.n
    found = list[SampleResult]()
    for first in range(0, len(nodes), n):
        of_prompt = nodes[first : first + n]
        node = of_prompt[0]
        found.append(
            SampleResult(
                sequences=tuple(map(_sequence, of_prompt)),
                version=node.version_max,
                prompt_logprobs=node.prompt_logprobs or None,
                topk_prompt=_top(
                    node.prompt_likely,
                    node.num_prompt,
                    node.prompt_likely_ids,
                    node.prompt_likely_logprobs,
                ),
            )
        )
    return found


def _sequence(node: Node) -> Sampled:
    return Sampled(
        tokens=node.sampled,
        logprobs=node.logprobs,
        stop_reason=node.stop_reason,
        top=_top(node.likely, node.num_sampled, node.likely_ids, node.likely_logprobs),
    )


def _top(k: int, length: int, ids: bytes, logprobs: bytes) -> TopK | None:
    if k == 0:
        return None
    return TopK(k=k, length=length, ids=ids, logprobs=logprobs)
