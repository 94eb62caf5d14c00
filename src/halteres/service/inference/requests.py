"""A request for inference, whatever its shape: its fields, which weights a `model` means, prompts
and chats as tokens.

halteres/tiny, its folder, its aliases      the base model
tinker://RUN/sampler_weights/NAME           named weights; …/weights/NAME too
halteres/tiny;tinker://…                    the same, with the base model said
NAME                                        the newest policy of the tenant's run of that name
nothing                                     the run in the URL; without one, the base model

Which fields of a body are read, refused or passed over, `fields` says.

A call may belong to a gateway session (`Call.capture`). Dialects know nothing of it: a chat, a text
or tokens become a prompt (`Capture.prompt`), a request is sampled as the session says (`version`,
`sampling`), and what is sampled is recorded before a client has it (`recorded`). `service.gateway`
implements these protocols.

Source: OpenAI's and Anthropic's API references, vLLM 0.11 `SamplingParams` and its protocol, sglang
0.5 `GenerateReqInput` and `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from halteres.documents import DocumentError, parse_json
from halteres.engine.protocol import Grammar, LogprobKind, SampleResult, SamplingParams
from halteres.engine.vllm.requests import TokenCount as TokenCount
from halteres.engine.vllm.requests import TokenId as TokenId
from halteres.engine.vllm.requests import TopCount as TopCount
from halteres.errors import InvalidData
from halteres.service.context_window import prompt_too_long, text_too_long
from halteres.service.inference.formats import FormatFields
from halteres.service.keys import Tenant
from halteres.service.sampling.snapshots import Snapshot
from halteres.tokenizer import THINKING, Tokenizer
from halteres.tokenizer import text_of as plain_text
from halteres.tool_calls import ToolCall, in_words

CHARACTERS_PER_TOKEN = 64
"""No text that is meant to be read has more of them on average; a longer one is refused before it
is tokenised.
"""


class SamplingFields(FormatFields, kw_only=True):
    """What every such request says about sampling."""

    include_stop_str_in_output: bool = False
    # of sampled tokens, as vLLM calls them; None: as the service was told
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None

    @property
    def length_field(self) -> str:
        """What the request calls `max_tokens`."""
        return "max_tokens"

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        return tuple(stop for stop in self.stops if isinstance(stop, str) and stop)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end the answer beside the model's own: those of both fields."""
        return (
            *(stop for stop in self.stops if isinstance(stop, int)),
            *(self.stop_token_ids or ()),
        )

    @property
    def stops(self) -> Sequence[str | int]:
        """Texts and tokens of `stop`."""
        return (
            self.stop if isinstance(self.stop, list) else [] if self.stop is None else [self.stop]
        )


def refuse_several(sampling: SamplingFields) -> None:
    """InvalidData unless one sequence is asked for, of a dialect that has room for one."""
    if sampling.n != 1:
        raise InvalidData(
            f"`n` is {sampling.n}.", "One message is answered.", "Send several requests.", param="n"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What an HTTP call brings."""

    run: str | None  # of the URL
    tenant: Tenant
    body: bytes
    # of the gateway session that it belongs to
    capture: Capture | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights to sample from, by the name that a request has for them."""

    name: str
    snapshot: Snapshot | None  # None: the base model

    @property
    def version(self) -> int:
        """Policy version."""
        return self.snapshot.version if self.snapshot else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is to be continued. `text` is None where tokens were sent."""

    tokens: list[int]
    text: str | None = None
    # of a gateway session: what it was made of
    origin: Origin | None = field(default=None, repr=False)

    @property
    def begins_thinking(self) -> bool:
        """Whether the answer goes on with thinking that the prompt began, as some templates do."""
        return (self.text or "").rstrip().endswith(THINKING)

    @staticmethod
    def of(
        given: str | list[int], tokenizer: Tokenizer, context: int, special: bool | None = None
    ) -> Prompt:
        """A text or tokens; ContextLengthExceeded where it cannot fit into so many tokens.
        `special`: whether a text gets the tokens that begin and end one; None: unless it begins so
        already.
        """
        if not isinstance(given, str):
            if len(given) > context:
                raise prompt_too_long(len(given), context)
            return Prompt(tokens=given)
        if len(given) > context * CHARACTERS_PER_TOKEN:
            raise text_too_long(len(given), context)
        begins = tokenizer.specials.get("bos_token")
        added = not (begins and given.startswith(begins)) if special is None else special
        return Prompt(tokens=tokenizer.encode(given, add_special_tokens=added), text=given)


def several(given: str | Sequence[str | int | list[int]], field: str) -> list[str | list[int]]:
    """The prompts of a field that holds a text, a list of texts, a list of token ids or a list of
    such lists.
    """
    if isinstance(given, str):
        return [given]
    tokens = [one for one in given if isinstance(one, int)]
    if len(tokens) == len(given):
        return [tokens]
    if tokens:
        raise InvalidData(
            f"`{field}` mixes token ids with prompts.",
            next="Send one list of ids, or a list of lists.",
        )
    return [one for one in given if not isinstance(one, int)]


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """Prompts, and how to go on with them."""

    call: Call
    weights: Weights
    prompts: Sequence[Prompt]
    sampling: SamplingFields
    top: int = 0  # most likely tokens at each sampled position
    # ... and at each position of the prompt; None: nothing of the prompt is answered
    prompt_top: int | None = None
    prompt_start: int = 0  # the first position of the prompt that is answered
    parallel_calls: bool | None = None  # of tools, several or the first alone; None: calls are text
    # what the answer is held to, where calls of tools are part of that; None: as `sampling` says
    grammar: Grammar | None = None

    def goes_on_thinking(self, prompt: Prompt) -> bool:
        """Whether an answer goes on with thinking that its prompt began: one that is held to a
        grammar has no room for it.
        """
        return self.grammar is None and prompt.begins_thinking

    def params(self, ends: Sequence[int], logprobs: LogprobKind) -> SamplingParams:
        """As an engine takes them, without a seed.

        Args:
            ends: the model's end tokens.
            logprobs: the kind that is answered.
        """
        sampling, max_tokens = self.sampling, self.sampling.max_tokens
        if self.scores_only:
            max_tokens = 1
        if sampling.ignore_eos:
            ends = ()
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            stop_tokens=(*sampling.stop_tokens, *ends),
            stop_strings=sampling.stop_strings,
            logprobs=logprobs,
            grammar=self.grammar or sampling.grammar,
        )

    @property
    def num_prompt_logprobs(self) -> int:
        """Log-probabilities of prompts in the answer, where those of a prompt may stand beside each
        sequence.
        """
        if self.prompt_top is None:
            return 0
        positions = sum(max(0, len(prompt.tokens) - self.prompt_start) for prompt in self.prompts)
        return self.sampling.n * positions * (1 + self.prompt_top)

    def num_likely(self, context_length: int) -> int:
        """Likely tokens at the sampled positions of the answer, were each sequence as long as it
        may be.
        """
        if not self.top or self.scores_only:
            return 0
        most = context_length if self.sampling.max_tokens is None else self.sampling.max_tokens
        positions = sum(
            min(most, max(0, context_length - len(prompt.tokens))) for prompt in self.prompts
        )
        return self.sampling.n * positions * self.top

    @property
    def scores_only(self) -> bool:
        """Whether nothing but the prompt's log-probabilities is answered."""
        return self.sampling.max_tokens == 0 and self.prompt_top is not None


# Chats

OURS = frozenset(("messages", "tools", "add_generation_prompt", "tokenize", "chat_template"))
"""What a template is given by us, and nobody may give it a second time."""

CONTINUED = "[the answer goes on here]"
"""Stands behind the last message's content while it is rendered, and is cut off with all that
follows.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation to be answered."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class Function(msgspec.Struct, kw_only=True):
    """What a tool does."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool that the model may call."""

    function: Function
    type: Literal["function"] = "function"


def render(tokenizer: Tokenizer, chat: Chat) -> str:
    """The prompt's text, by the model's own template; one that does not read tools is given them in
    words. InvalidData where it cannot take the chat.
    """
    if not chat.messages:
        raise _unfit("`messages` is empty.", next="Send at least one message.")
    if given := sorted(OURS.intersection(chat.template_kwargs)):
        raise InvalidData(
            f"`chat_template_kwargs` may not hold '{given[0]}'.", param="chat_template_kwargs"
        )
    _check_tools(chat.tools)
    extra = dict(chat.template_kwargs)
    messages, continued = [flat(message) for message in chat.messages], chat.continue_final_message
    if not tokenizer.template_reads("tools"):
        messages = in_words(messages, chat.tools)
    elif chat.tools:
        extra["tools"] = [dict(tool) for tool in chat.tools]
    if continued:
        messages[-1]["content"] += CONTINUED
    text = tokenizer.render(
        messages, add_generation_prompt=chat.add_generation_prompt and not continued, **extra
    )
    if not continued:
        return text
    if (end := text.rfind(CONTINUED)) < 0:
        raise InvalidData(
            "The last message cannot be continued.",
            "The chat template leaves its content out, or changes it.",
            "Send continue_final_message=false.",
        )
    return text[:end]


def _check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    try:
        msgspec.convert(tools, type=list[Tool])
    except msgspec.ValidationError as error:
        raise InvalidData("`tools` does not fit.", f"{error}.", param="tools") from error


def flat(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: content as one text, arguments of calls as objects."""
    if not isinstance(message.get("role"), str):
        raise _unfit("A message has no role.", next="Send role and content.")
    flat = {**message, "content": text_of(message.get("content"))}
    calls = flat.pop("tool_calls", None)
    if calls is not None:  # templates ask whether it is there
        flat["tool_calls"] = [_call(one) for one in (calls if isinstance(calls, list) else [None])]
    return flat


def text_of(content: Any, field: str = "messages") -> str:
    """The text of a message's content: a text, or a list of parts, as OpenAI and Anthropic have
    them; `field`: of the body, where it stands.
    """
    try:
        return plain_text(content)
    except InvalidData as error:
        raise InvalidData(error.what, error.why, error.next, param=field) from error


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _unfit(
            "A message's tool_calls do not fit.", next="Send function.name and function.arguments."
        )
    arguments = function.get("arguments") or {}
    # OpenAI's API writes them as a JSON text, templates expect the object
    if isinstance(arguments, str):
        with suppress(msgspec.DecodeError, DocumentError, RecursionError):
            read = msgspec.json.decode(arguments)
            # A key that is given twice leaves open what was called: the text stays what it is.
            parse_json(arguments, most_values=len(arguments))
            arguments = read if isinstance(read, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def _unfit(what: str, why: str = "", next: str = "") -> InvalidData:
    return InvalidData(what, why, next, param="messages")


# Calls within a gateway session

# a token, its log-probability (None where nothing predicts it), and what was likely there
Position = tuple[int, float | None, list[tuple[int, float]]]


class Origin(Protocol):
    """What a session made a prompt of, for itself alone."""


class SampledPiece(Protocol):
    """What a record reads of an answer's sequence, or of its next piece (`outputs.Output`)."""

    @property
    def place(self) -> int:
        """Number of the sequence among all of the request."""
        ...

    @property
    def tokens(self) -> list[int]:
        """As they were sampled."""
        ...

    @property
    def positions(self) -> list[Position]:
        """Of each token: itself, its log-probability, and what was likely there."""
        ...

    @property
    def of_prompt(self) -> list[Position] | None:
        """The same of the prompt's tokens, where the request asks for that."""
        ...

    @property
    def parts(self) -> list[str | ToolCall]:
        """Texts and calls."""
        ...

    @property
    def finish(self) -> Literal["stop", "length"] | None:
        """Why it ended; None: more pieces come."""
        ...

    @property
    def version(self) -> int:
        """Policy version."""
        ...


class Record(Protocol):
    """One request in a session's journal."""

    @property
    def seed(self) -> int:
        """Of its first prompt."""
        ...

    @property
    def stored(self) -> Sequence[SampleResult] | None:
        """What was sampled for this very request before, of each prompt; None: it is to be sampled
        now.
        """
        ...

    def add(self, output: SampledPiece) -> None:
        """A sequence of the answer, or its next piece."""
        ...

    async def keep(self) -> None:
        """All sequences are whole: return once the journal has them. NotReady where it cannot be
        written.
        """
        ...


@dataclass(frozen=True, slots=True)
class Unkept:
    """The record of a call outside of any gateway session: what is sampled is kept by nobody."""

    seed: int
    stored: None = None

    def add(self, output: SampledPiece) -> None:
        """Nothing."""

    async def keep(self) -> None:
        """Nothing."""


class Capture(Protocol):
    """One call within a session."""

    @property
    def run(self) -> str | None:
        """The run to sample from; None: the base model."""
        ...

    @property
    def model(self) -> str | None:
        """The name of the weights to sample from; None: the run's policy."""
        ...

    @property
    def version(self) -> int | None:
        """The policy version to sample from; None: the newest."""
        ...

    def prompt(
        self,
        given: Chat | str | list[int],
        context: int,
        *,
        special: bool | None,
        place: int = 0,
        num_prompts: int = 1,
    ) -> Prompt:
        """The prompt that this becomes, `context` tokens at most: token ids that the session has
        sampled stay what they were. It is number `place` of the request's `num_prompts`. It may run
        in a thread. Raises as `Prompt.of` and `render`.
        """
        ...

    def sampling(self, asked: SamplingFields) -> SamplingFields:
        """How the session samples, where a client asks for this."""
        ...

    def recorded(self, request: InferenceRequest, seed: int) -> AbstractAsyncContextManager[Record]:
        """The journal has the request while the block runs, and then how it ended. `seed`: for a
        request that was not made before.
        """
        ...


class CapturedSession(Protocol):
    """A gateway session as the guard lets requests into it."""

    @property
    def tenant(self) -> Tenant:
        """Whose it is."""
        ...

    @property
    def policy_name(self) -> str:
        """The run that it samples from, or the base model."""
        ...

    async def call(self, path: str, headers: Mapping[str, str], body: bytes) -> Capture:
        """A call that comes now, to this path below the session. Raises where the session is over
        or holds as much as it may.
        """
        ...
