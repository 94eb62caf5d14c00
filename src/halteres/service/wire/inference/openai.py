"""JSON bodies of OpenAI's completions and chat completions.

Owns: one struct per request; unknown fields are ignored (those that matter are in `wire.inference.refusals`).
Never: renders a chat.
Source: OpenAI's API reference; vLLM's extra fields (token ids, prompt_logprobs, chat templates).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from halteres.errors import InvalidData
from halteres.service.wire.inference.common import Count, Sampled, TopCount, several


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream tells beside the answer."""

    include_usage: bool = False


class Answered(Sampled, kw_only=True):
    """What both routes know."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: TopCount | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    add_special_tokens: bool | None = None
    best_of: int | None = None  # sequences that are sampled; the best `n` are answered
    reward_model: str | None = None  # by whose score; ours: OpenAI has the mean log-probability alone

    @property
    def num_sampled(self) -> int:
        """Sequences per prompt.

        Raises:
            InvalidData: fewer than are answered; a choice where nothing is chosen, or while it is written.
        """
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidData(f"`best_of` is {self.best_of}, and `n` is {self.n}.", "n are answered.", param="best_of")
        if self.reward_model is not None and self.best_of is None:
            raise InvalidData("`reward_model` chooses among several.", next="Send `best_of`.", param="reward_model")
        if self.stream and self.is_ranked:
            raise InvalidData("The best of several cannot be streamed.", next="Send stream=false.", param="best_of")
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether the answers are chosen, the best first."""
        return self.reward_model is not None or self.best_of not in (None, self.n)

    @property
    def streams_usage(self) -> bool:
        """Whether a stream ends with a count of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class Completions(Answered, kw_only=True):
    """POST v1/completions."""

    prompt: str | list[str | int | list[int]]
    max_tokens: Count | None = 16
    logprobs: bool | TopCount | None = None
    echo: bool = False

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several prompts, each a text or tokens.

        Raises:
            InvalidData: token ids stand beside texts or lists.
        """
        return several(self.prompt, "prompt")

    @property
    def top(self) -> int | None:
        """How many of the most likely tokens are wanted at each position; None: no log-probabilities at all."""
        if self.logprobs is None or self.logprobs is False:
            return None
        return 0 if self.logprobs is True else self.logprobs


class Function(msgspec.Struct, kw_only=True):
    """What a tool does."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool that the model may call."""

    function: Function
    type: Literal["function"] = "function"


class ChatCompletions(Answered, kw_only=True):
    """POST v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: TopCount | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool | None = None  # absent: unless the last message is continued
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @property
    def limit(self) -> int | None:
        """Tokens that an answer may have; None: up to the context limit."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def top(self) -> int | None:
        """As `Completions.top`.

        Raises:
            InvalidData: top_logprobs without logprobs.
        """
        if self.top_logprobs and not self.logprobs:
            raise InvalidData("`top_logprobs` needs `logprobs`.", next="Send logprobs=true.", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None
