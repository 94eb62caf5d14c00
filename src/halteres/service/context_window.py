"""What does not fit into the model's context, and the words by which clients know it.

A client that shortens its history after an overflow looks for its own API's sentence: OpenAI's
code and "maximum context length", Anthropic's "prompt is too long", the hosted Tinker service's
"Prompt length plus max_tokens exceeds".

Source: what litellm 1.110.2, verifiers 0.4.0, tinker-cookbook 0.6.1 and Harbor 0.26.0 look for.
"""

from __future__ import annotations

from halteres.errors import InvalidData


class ContextLengthExceeded(InvalidData):
    """A prompt, or a prompt and the tokens asked for, that the model's context has no room for.

    Its details: `context_length` in tokens, and `prompt_tokens` or, where nothing was tokenised,
    `prompt_characters`; `max_tokens` where it is those that do not fit.
    """

    code = "context_length_exceeded"

    @property
    def for_anthropic(self) -> str:
        """In the words of Anthropic's API."""
        context: int = self.details["context_length"]
        prompt: int | None = self.details.get("prompt_tokens")
        max_tokens: int | None = self.details.get("max_tokens")
        if prompt is None:
            characters = self.details["prompt_characters"]
            return f"prompt is too long: {characters} characters, {context} tokens maximum"
        if max_tokens is not None:
            return (
                f"input length and `max_tokens` exceed context limit: {prompt} + {max_tokens} > "
                f"{context}, decrease input length or `max_tokens` and try again"
            )
        # A prompt that fills the context leaves no room for one token of an answer.
        return f"prompt is too long: {prompt} tokens > {min(context, prompt - 1)} maximum"


def prompt_too_long(num_tokens: int, context: int) -> ContextLengthExceeded:
    """The error for a prompt that leaves no room for an answer."""
    return ContextLengthExceeded(
        f"This model's maximum context length is {context} tokens, the prompt has {num_tokens}.",
        "Prompt and answer together must fit into it.",
        "Shorten the prompt.",
        prompt_tokens=num_tokens,
        context_length=context,
    )


def text_too_long(num_characters: int, context: int) -> ContextLengthExceeded:
    """The error for a prompt so long that it is not even tokenised."""
    return ContextLengthExceeded(
        f"This model's maximum context length is {context} tokens, the prompt has {num_characters} "
        "characters.",
        next="Shorten the prompt.",
        prompt_characters=num_characters,
        context_length=context,
    )


def check_room(num_tokens: int, max_tokens: int | None, context: int, *, strict: bool) -> None:
    """Refuse a prompt that leaves no room for an answer.

    Args:
        num_tokens: of the prompt.
        max_tokens: of the answer; None: as many as there is room for.
        context: tokens that the model reads, prompt and answer together.
        strict: refuse a `max_tokens` that does not fit, too, rather than shorten it.

    Raises:
        ContextLengthExceeded: it does not fit.
    """
    if num_tokens >= context:
        raise prompt_too_long(num_tokens, context)
    if strict and max_tokens is not None and num_tokens + max_tokens > context:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context} tokens, the prompt has {num_tokens} "
            f"and max_tokens is {max_tokens}.",
            "This service shortens no max_tokens (--strict-context).",
            "Shorten the prompt, or ask for fewer tokens.",
            prompt_tokens=num_tokens,
            max_tokens=max_tokens,
            context_length=context,
        )


def check_sample(num_tokens: int, max_tokens: int | None, context: int, *, strict: bool) -> None:
    """As `check_room`, in the words of the hosted Tinker service."""
    try:
        check_room(num_tokens, max_tokens, context, strict=strict)
    except ContextLengthExceeded as error:
        why = "The prompt is too long."
        if num_tokens < context:
            why = "Together they are too long."
        # Without max_tokens an answer has one token at least.
        raise ContextLengthExceeded(
            "Prompt length plus max_tokens exceeds the model's context window: "
            f"{num_tokens} prompt tokens + {max_tokens or 1} max_tokens > {context}.",
            why,
            **error.details,
        ) from error
