"""How an observation becomes a prompt: GEM's wordings, in Qwen's chat markup or in any model's own.

Source: GEM's example script for Tinker (Apache License 2.0), whose wordings and markup these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from halteres.errors import InvalidConfig, unknown
from halteres.text import Message

TemplateName = Literal["qwen3_game", "qwen3_general", "no"]

_ASKED_FOR = "\nPlease reason step by step, and put your final answer within \\boxed{}."


class ChatTemplate(Protocol):
    """What renders a chat as a model's own template does, e.g. `halteres.text.Tokenizer`."""

    def render(self, messages: Sequence[Message], /, *, add_generation_prompt: bool = True) -> str:
        """The text of these messages, with the assistant's turn opened."""
        ...


def user_message(template: TemplateName, observation: str) -> str:
    """What the user says, without any markup.

    Raises:
        InvalidConfig: there is no such template; the nearest is named.
    """
    match template:
        case "qwen3_game":
            return f"You are playing language games. Make valid actions to win.\nObservation: {observation}{_ASKED_FOR}"
        case "qwen3_general":
            return f"Question: {observation}{_ASKED_FOR}"
        case "no":
            return observation
        case _:
            raise unknown(InvalidConfig, "template", template, get_args(TemplateName))


def prompt(template: TemplateName, observation: str, chat: ChatTemplate | None = None) -> str:
    """The whole prompt, as text to be encoded without further special tokens.

    Args:
        template: "no" leaves the observation as it is, markup included; for wrappers that render the chat themselves.
        observation: as the environment gave it.
        chat: the model's own template; without one it is the markup of Qwen, which GEM's script writes for all models.

    Raises:
        InvalidConfig: there is no such template.
        InvalidData: the model's template refuses a user's message.
    """
    content = user_message(template, observation)
    if template == "no":
        return content
    if chat is not None:
        return chat.render([{"role": "user", "content": content}], add_generation_prompt=True)
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
