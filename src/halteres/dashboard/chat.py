"""Chat with a run's policies on the page: what can be asked, and an answer line by line.

Owns: the form of both, and how many answers may be under way at once.
Never: keeps a conversation, which is the browser's; decides how a question is put or where it is
answered (`runs.conversation`).
Guarantees: an answer whose reader has left is sampled no further.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from halteres.errors import (
    HalteresError,
    NotReady,
    ServerError,
    UserError,
    as_answer,
    boundary,
)
from halteres.next_step import NextStep
from halteres.runs.conversation import (
    BASE,
    GAP,
    MAX_TOKENS,
    NEWEST,
    TEMPERATURE,
    Asked,
    Conversation,
    Piece,
    Policy,
    Sampling,
    Starting,
    policies_of,
    policy_named,
)
from halteres.runs.directory import RunDirectory
from halteres.runs.servers import kept_in, redactor_of

_log = logging.getLogger(__name__)

FORGOTTEN = "the oldest turns are not read: too long a conversation"

MOST_ANSWERS = 16  # at once; a view asks for two

Write = Callable[[NextStep], str]


def chat_of(run: RunDirectory) -> dict[str, Any]:
    """What can be asked of a run, how a question is put, and which service will answer it.

    Raises:
        Conflict: the run trains a reward model.
    """
    policies = [{"name": one.name, "label": _label(one)} for one in policies_of(run)]
    conversation = Conversation.with_run(run)
    words = "As it is: the run has recorded too few prompts to learn from."
    if conversation.words is not None:
        words = f"{conversation.words.head}{GAP}{conversation.words.tail}"
    example = "A question"
    if conversation.example:
        example = f"For example: {conversation.example}"
    return {
        "run": run.state().name,
        "policies": policies,
        "words": words,
        "example": example,
        "history": conversation.goes_on_by_itself,
        "temperature": TEMPERATURE,
        "max_tokens": MAX_TOKENS,
        "service": _service_now(run, has_weights=len(policies) > 1),
    }


def _service_now(run: RunDirectory, *, has_weights: bool) -> str:
    """Which service will answer, and what of the run it can sample, as sentences."""
    state = run.state()
    words: list[str] = []
    if not has_weights:
        words.append("The run has written no checkpoint yet: there is its base model alone.")
    if state.service_given:
        words.append("The service that the run trained on answers.")
    elif not state.terminal:
        words.append("The run's own service answers, next to its training.")
    elif kept_in(run) is not None:
        words.append("A service is ready for this run.")
    else:
        words.append(
            "No service is running for this run. The first question starts one, and waits until "
            "it has loaded the model."
        )
    return " ".join(words)


def _label(policy: Policy) -> str:
    if policy.name == BASE:
        return f"base: {policy.path}"
    if policy.name == NEWEST:
        return f"newest: step {policy.step}"
    return f"step {policy.step}"


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question of before, and its answer."""

    question: str
    answer: str


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the page asks."""

    policy: str  # BASE, NEWEST or RUN@STEP
    question: Annotated[str, msgspec.Meta(min_length=1)]
    temperature: Annotated[float, msgspec.Meta(ge=0)] = TEMPERATURE
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = MAX_TOKENS
    turns: tuple[Turn, ...] = ()  # that the policy reads before it, oldest first


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A question that was found good, before a service was looked for."""

    conversation: Conversation
    question: Asked
    policy: Policy
    sampling: Sampling


def question_of(run: RunDirectory, wanted: Mapping[str, Any]) -> _Asked:
    """The question in a request's body.

    Raises:
        UserError: it is none.
        NotFound: the run has no such weights.
        Conflict: the run trains a reward model.
    """
    try:
        given = msgspec.convert(dict(wanted), Question)
    except msgspec.ValidationError as error:
        raise UserError(
            "This is no question to a run.",
            f"{error}.",
            "Send policy and question; temperature, max_tokens and turns where they differ.",
        ) from error
    policy = policy_named(run, given.policy)
    conversation = Conversation.with_run(run)
    conversation.turns += [(conversation.asked(turn.question), turn.answer) for turn in given.turns]
    return _Asked(
        conversation=conversation,
        question=conversation.asked(given.question),
        policy=policy,
        sampling=Sampling(temperature=given.temperature, max_tokens=given.max_tokens),
    )


class ChatAnswer(StreamingResponse):
    """An answer as it comes: JSON lines.

    `{"about": ...}`: which policy answers, and how that goes, in words that take the place of those
    before; `{"text": ...}`: a piece of the answer; at the end of one that fails its error, as the
    tools have it.

    Args:
        asked: of `question_of`.
        write: a call as a person types it.
        ended: set where the server ends.
        places: one for each answer that may be under way.
    """

    def __init__(
        self, asked: _Asked, *, write: Write, ended: asyncio.Event, places: asyncio.Semaphore
    ) -> None:
        self._lines = _lines(asked, write)
        self._ended, self._places = ended, places
        super().__init__(
            self._lines, media_type="application/x-ndjson", headers={"Cache-Control": "no-store"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, for as long as both sides want.

        Raises:
            NotReady: too many answers are under way; nothing was sent yet.
        """
        if self._places.locked():
            raise NotReady(
                f"{MOST_ANSWERS} answers are being written.",
                "That is the limit.",
                "Ask again once one of them has ended.",
            )
        async with self._places, aclosing(self._lines):
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """As starlette's; a server that ends says so in the last line."""
        answering = asyncio.create_task(super().stream_response(send), name="answer of a chat")
        ending = asyncio.create_task(self._ended.wait(), name="end of the server")
        try:
            await asyncio.wait((answering, ending), return_when=asyncio.FIRST_COMPLETED)
            is_cut = not answering.done()
        finally:
            answering.cancel()
            ending.cancel()
            await asyncio.gather(answering, ending, return_exceptions=True)
        if is_cut:
            error = NotReady("The answer was cut off.", "The server ends.", "Run: halteres ui")
            last = _line(as_answer(error))
            await send({"type": "http.response.body", "body": last, "more_body": False})
        elif not answering.cancelled():
            answering.result()


async def _lines(asked: _Asked, write: Write) -> AsyncGenerator[bytes, None]:
    """The lines of an answer; a failure is the last of them."""
    began = time.monotonic()
    label, facts = _label(asked.policy), list[str]()
    yield _about(label)
    try:
        with boundary(ServerError, "The chat"):
            answer = asked.conversation.answer(asked.question, asked.policy, asked.sampling)
            async with aclosing(answer) as said:
                async for one in said:
                    if isinstance(one, Piece):
                        yield _line({"text": one.text})
                        if one.finish == "length":
                            facts.append(f"cut off at {asked.sampling.max_tokens} tokens")
                    elif isinstance(one, Starting):
                        yield _about(label, f"a service starts: {one.seconds} s")
                        began = time.monotonic()
                    else:
                        facts = [FORGOTTEN]
                        yield _about(label, *facts)
        yield _about(label, f"{time.monotonic() - began:.1f} s", *facts)
    except HalteresError as error:
        if isinstance(error, ServerError):
            _log.warning("%s", error)
        yield _line(redactor_of(asked.conversation.run).json(as_answer(error, write)))


def _about(*facts: str) -> bytes:
    return _line({"about": " · ".join(facts)})


def _line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"
