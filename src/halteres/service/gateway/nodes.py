"""A node: one sequence that was sampled within a gateway session, and what its prompt was made of.

A node keeps of its prompt and its history what its predecessors do not have: token ids behind those
of its parent, messages behind those of the node that it continues.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from halteres.service.inference.requests import Chat, flat
from halteres.tokenizer import THINKING, THOUGHT

Why = Literal["first", "template", "history_rewritten", "tools_changed", "system_changed"]
"""Why a prompt does not begin with the token ids of the node before it.

first               nothing of this history was sampled here
template            the template writes an answer in other words than it was sampled in
history_rewritten   an answer in this history is none that was sampled here
tools_changed       the tools are others
system_changed      the system message is another
"""

SYSTEM_ROLES = ("system", "developer")

DIGEST_BYTES = 16

_THOUGHT = re.compile(f"{re.escape(THINKING)}.*?(?:{re.escape(THOUGHT)}|$)", re.DOTALL)


class Mark(msgspec.Struct, frozen=True):
    """A beginning that can be recognised: of token ids, of a text, of a list of messages."""

    length: int
    digest: bytes


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled sequence. P tokens of the prompt, T sampled ones."""

    id: str  # of the request, and the sequence's number in it
    at: float  # unix s: when it was whole
    dialect: str  # the path of its route
    harness_session: str | None = None  # what the program says of itself, by its own header
    request: str  # digest of the request's body, hex

    parent: str | None = None  # the node whose token ids the prompt begins with, all of them
    reused: int = 0  # tokens of the prompt that are the parent's
    continues: str | None = None  # the node whose messages the history begins with
    why: Why | None = None  # why it is not that node's ids that the prompt begins with

    prompt: bytes  # int32: the prompt's token ids behind the reused ones
    sampled: bytes  # T int32, the stop token included where one was sampled
    logprobs: bytes  # T float32, natural log, full vocabulary
    likely: int = 0  # K likeliest tokens at each position, where they were asked for
    likely_ids: bytes = b""  # T x K int32
    likely_logprobs: bytes = b""  # T x K float32
    # where the request asked for log-probabilities of its prompt, of its first sequence alone:
    # P float32, NaN at the first token, and K likeliest tokens at each position
    prompt_logprobs: bytes = b""
    prompt_likely: int = 0
    prompt_likely_ids: bytes = b""  # P x K int32
    prompt_likely_logprobs: bytes = b""  # P x K float32
    version_min: int  # policy version of the first sampled token
    version_max: int  # ... and of the last
    stop_reason: Literal["stop", "length"]
    late: bool = False  # it was whole after its session was over

    system: list[dict[str, Any]] = []  # leading system messages of the request
    recalled: int = 0  # messages behind them that are those of `continues`
    messages: list[dict[str, Any]] = []  # ... and those behind these
    begun: str = ""  # of an answer that goes on with the last message: how it began
    answer: dict[str, Any] = {}  # the whole message that was answered
    tools: list[dict[str, Any]] = []
    shaped_by: list[str] = []  # penalties that its sampling was under, and `grammar`
    asked: dict[str, Any] = {}  # sampling that the program asked for, and that is not the session's

    ids_end: Mark  # of prompt and sampled ids
    text_end: Mark | None = None  # of their text, as the template writes it; None: unknown
    chat_end: Mark | None = None  # of all messages but leading system ones, the answer included

    @property
    def num_sampled(self) -> int:
        """T."""
        return len(self.sampled) // 4

    @property
    def num_prompt(self) -> int:
        """P."""
        return self.reused + len(self.prompt) // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a session made a prompt of; a node keeps it."""

    parent: str | None = None
    reused: int = 0
    continues: str | None = None
    recalled: int = 0  # messages that are those of `continues`
    why: Why | None = None
    # what the prompt's ids stand for, to the letter; None: unknown
    text: str | None = None
    conversation: Conversation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A chat by its messages: leading system messages apart, each other one by a running digest."""

    system: list[dict[str, Any]]
    messages: list[dict[str, Any]]  # without the leading system ones
    tools: list[dict[str, Any]]
    continued: bool  # the answer goes on with the last message
    marks: list[bytes]  # of the first 0, 1, 2, … messages

    @property
    def begun(self) -> str:
        """How the answer begins that is continued."""
        return self.messages[-1]["content"] if self.continued else ""

    @classmethod
    def of(cls, chat: Chat) -> Conversation:
        """A chat's. Raises InvalidData where a message has another form."""
        messages = [flat(message) for message in chat.messages]
        start = next(
            (at for at, one in enumerate(messages) if one["role"] not in SYSTEM_ROLES),
            len(messages),
        )
        rest, marks = messages[start:], [b""]
        for message in rest:
            marks.append(after(marks[-1], message))
        return cls(
            system=messages[:start],
            messages=rest,
            tools=[dict(tool) for tool in chat.tools],
            continued=chat.continue_final_message,
            marks=marks,
        )

    def end_with(self, answer: Mapping[str, Any]) -> Mark:
        """The mark behind this answer to it."""
        count = len(self.messages) - self.continued
        return Mark(count + 1, after(self.marks[count], answer))


def after(mark: bytes, message: Mapping[str, Any]) -> bytes:
    """The running digest behind one message more. Equal are messages of one role whose text, but
    for white space around it and what an assistant thought, and whose calls, as parsed JSON, are
    equal: programs trim, and some keep thinking apart or send none of it back.
    """
    content = message["content"]
    if message["role"] == "assistant":
        # A template may begin the thinking itself: then it only ends in the answer.
        content = _THOUGHT.sub("", content).rpartition(THOUGHT)[2]
    calls = [
        (call["function"]["name"], call["function"].get("arguments") or {})
        for call in message.get("tool_calls") or ()
    ]
    # `order`: a program may have sorted the keys of what it sends back.
    told = msgspec.json.encode((message["role"], content.strip(), calls), order="sorted")
    return hashlib.blake2b(mark + told, digest_size=DIGEST_BYTES).digest()


def ids_mark(ids: bytes) -> Mark:
    """Of int32 token ids."""
    return Mark(len(ids) // 4, digest_of(ids))


def digest_of(content: bytes) -> bytes:
    """A digest of this length that no program chooses."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def text_mark(text: str) -> Mark:
    """Of a text; its length is in bytes of UTF-8."""
    encoded = text.encode("utf-8", "surrogatepass")
    return Mark(len(encoded), digest_of(encoded))


def token_list(ids: bytes) -> list[int]:
    """Of int32 token ids."""
    return np.frombuffer(ids, np.int32).tolist()


_decode = msgspec.msgpack.Decoder(list[Node]).decode


def write_nodes(nodes: Sequence[Node]) -> bytes:
    """The nodes of one request, as its outcome."""
    return msgspec.msgpack.encode(nodes)


def read_nodes(outcome: bytes) -> list[Node]:
    """What `write_nodes` wrote."""
    return _decode(outcome)
