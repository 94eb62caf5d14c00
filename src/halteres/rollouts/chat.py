"""A chat as tokens: each prompt is the tokens before it, the action as it was sampled, and what is
new.

An action is never tokenised again as long as the template keeps it. Where the template rewrites an
answer (it leaves out old thinking, say), the prompt is what the template makes of the whole chat.

    prompt   <|im_start|>user\\nGuess.<|im_end|>\\n<|im_start|>assistant\\n
    action                                                             5<|im_end|>
    prompt   ...the same tokens, and behind them as new context:  \\n<|im_start|>user\\nToo low...

The template is asked for the whole chat each time, and its texts are compared: what it adds to its
last text is the action, whose tokens are known, and new context, which alone is tokenised. White
space is no difference: templates trim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from halteres.tokenizer import Message, Tokenizer
from halteres.tool_calls import in_words


class Chat:
    """A chat with the policy, which answers next.

    Args:
        messages: up to the policy's first answer.
        tools: in OpenAI's form, for the template.
        in_words: tools are described in the system message, and what they gave by the user, also
            where the template has a place for both.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        in_words: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._in_words = bool(tools) and (in_words or not tokenizer.template_reads("tools"))
        self._extra: dict[str, Any] = (
            {"tools": [*map(dict, tools)]} if tools and not self._in_words else {}
        )
        self.messages: list[dict[str, Any]] = self._worded(messages, tools)
        self._text = self._tokenizer.render(self.messages, **self._extra)
        self.prompt: tuple[int, ...] = tuple(tokenizer.encode(self._text))

    def go_on(self, action: Sequence[int], messages: Sequence[Message]) -> None:
        """Append the policy's answer, and these messages behind it."""
        ended = bool(action) and action[-1] in self._tokenizer.eos_token_ids
        answer = self._tokenizer.decode(action[:-1] if ended else action, skip_special_tokens=False)
        self.messages += [{"role": "assistant", "content": answer}, *self._worded(messages)]
        before, self._text = self._text, self._tokenizer.render(self.messages, **self._extra)
        new_text = (
            _text_after(answer, self._text[len(before) :])
            if self._text.startswith(before)
            else None
        )
        if new_text is None:
            self.prompt = tuple(self._tokenizer.encode(self._text))
            return
        context = self._tokenizer.encode(new_text)
        # the template's own end token, which is then the context's first word, is there already
        if ended:
            end = next(
                (i for i, token in enumerate(context) if token in self._tokenizer.eos_token_ids),
                None,
            )
            if (
                end is not None
                and not self._tokenizer.decode(context[:end], skip_special_tokens=False).strip()
            ):
                context = context[end + 1 :]
        self.prompt = (*self.prompt, *action, *context)

    def _worded(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[dict[str, Any]]:
        if self._in_words:
            return in_words(messages, tools)
        return [*map(dict, messages)]


def _text_after(answer: str, text: str) -> str | None:
    """What follows `answer` in a text that begins with it; None where it begins with something
    else.

    >>> _text_after("5 ", " 5<end>")
    '<end>'
    """
    if text.startswith(answer):
        return text[len(answer) :]
    place = 0
    for character in "".join(answer.split()):
        while text[place : place + 1].isspace():
            place += 1
        if text[place : place + 1] != character:
            return None
        place += 1
    return text[place:].removeprefix(answer[len(answer.rstrip()) :])
