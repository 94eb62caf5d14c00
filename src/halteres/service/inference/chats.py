"""From a chat to the prompt's tokens, by the model's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from halteres.errors import InvalidData, shortened
from halteres.text import Tokenizer

OURS = frozenset(("messages", "tools", "add_generation_prompt", "tokenize", "chat_template"))
"""What a template is given by us, and nobody may give it a second time."""

CONTINUED = "[the answer goes on here]"
"""Stands behind the last message's content while it is rendered, and is cut off with all that follows."""

TEXT_PARTS = frozenset(("text", "input_text", "output_text", "refusal"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation to be answered."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def render(tokenizer: Tokenizer, chat: Chat) -> str:
    """The prompt's text."""
    if not chat.messages:
        raise InvalidData("`messages` is empty.", next="Send at least one message.", param="messages")
    _refuse_unreadable(tokenizer, chat)
    messages = [flat(message) for message in chat.messages]
    continued = chat.continue_final_message
    extra = dict(chat.template_kwargs) | ({"tools": _checked(chat.tools)} if chat.tools else {})
    if continued:
        messages[-1]["content"] += CONTINUED
    text = tokenizer.render(messages, add_generation_prompt=chat.add_generation_prompt and not continued, **extra)
    return _open_end(text) if continued else text


def _refuse_unreadable(tokenizer: Tokenizer, chat: Chat) -> None:
    if given := sorted(OURS.intersection(chat.template_kwargs)):
        raise InvalidData(f"`chat_template_kwargs` may not hold '{given[0]}'.", param="chat_template_kwargs")
    if chat.tools and not tokenizer.template_reads("tools"):
        raise InvalidData(
            "The model's chat template has no place for tools.",
            next="Describe them in the system message, or use a model whose template reads `tools`.",
            param="tools",
        )


def _checked(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    try:
        msgspec.convert(tools, type=list[Tool])
    except msgspec.ValidationError as error:
        raise InvalidData("`tools` does not fit.", f"{error}.", param="tools") from error
    return [dict(tool) for tool in tools]


def flat(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: content as one text, arguments of calls as objects."""
    if not isinstance(message.get("role"), str):
        raise InvalidData("A message has no role.", next="Send role and content.", param="messages")
    flat = {**message, "content": _content(message.get("content"))}
    calls = message.get("tool_calls")
    if calls is None:
        flat.pop("tool_calls", None)  # templates ask whether it is there
    else:
        flat["tool_calls"] = [_call(one) for one in calls] if isinstance(calls, list) else _no_call()
    return flat


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        kind = str(part.get("type", "text") if isinstance(part, dict) else type(part).__name__)
        if kind not in TEXT_PARTS or not isinstance(_words(part), str):
            raise InvalidData(
                f"A message holds a part of type '{shortened(kind)}'.",
                "The model reads text only: no images, audio or files.",
                "Send parts of type text.",
                param="messages",
            )
    return "".join(_words(part) for part in parts)


def _words(part: Mapping[str, Any]) -> Any:
    return part.get("refusal") if part.get("type") == "refusal" else part.get("text")


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return _no_call()
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: Any) -> Any:
    """OpenAI's API writes them as a JSON text, templates expect the object."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        read = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _no_call() -> Any:
    raise InvalidData(
        "A message's tool_calls do not fit.", next="Send function.name and function.arguments.", param="messages"
    )


def _open_end(text: str) -> str:
    """The rendered chat up to the end of its last message's content, which is to be continued."""
    at = text.rfind(CONTINUED)
    if at < 0:
        raise InvalidData(
            "The last message cannot be continued.",
            "The chat template leaves its content out, or changes it.",
            "Send continue_final_message=false.",
        )
    return text[:at]


class Function(msgspec.Struct, kw_only=True):
    """What a tool does."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool that the model may call."""

    function: Function
    type: Literal["function"] = "function"
