"""From a chat to the prompt's text, by the model's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

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
    """The prompt's text; raises InvalidData where the template cannot take the chat."""
    if not chat.messages:
        raise _unfit("`messages` is empty.", next="Send at least one message.")
    if given := sorted(OURS.intersection(chat.template_kwargs)):
        raise InvalidData(f"`chat_template_kwargs` may not hold '{given[0]}'.", param="chat_template_kwargs")
    extra = dict(chat.template_kwargs)
    if chat.tools:
        extra["tools"] = _checked(tokenizer, chat.tools)
    messages, continued = [flat(message) for message in chat.messages], chat.continue_final_message
    if continued:
        messages[-1]["content"] += CONTINUED
    text = tokenizer.render(messages, add_generation_prompt=chat.add_generation_prompt and not continued, **extra)
    if not continued:
        return text
    if (end := text.rfind(CONTINUED)) < 0:
        raise InvalidData(
            "The last message cannot be continued.",
            "The chat template leaves its content out, or changes it.",
            "Send continue_final_message=false.",
        )
    return text[:end]


def _checked(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not tokenizer.template_reads("tools"):
        raise InvalidData(
            "The model's chat template has no place for tools.",
            next="Describe them in the system message, or use a model whose template reads `tools`.",
            param="tools",
        )
    try:
        msgspec.convert(tools, type=list[Tool])
    except msgspec.ValidationError as error:
        raise InvalidData("`tools` does not fit.", f"{error}.", param="tools") from error
    return [dict(tool) for tool in tools]


def flat(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: content as one text, arguments of calls as objects."""
    if not isinstance(message.get("role"), str):
        raise _unfit("A message has no role.", next="Send role and content.")
    flat = {**message, "content": _content(message.get("content"))}
    calls = flat.pop("tool_calls", None)
    if calls is not None:  # templates ask whether it is there
        flat["tool_calls"] = [_call(one) for one in calls] if isinstance(calls, list) else _no_call()
    return flat


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = list[str]()
    for part in content if isinstance(content, list) else [content]:
        kind = str(part.get("type", "text") if isinstance(part, dict) else type(part).__name__)
        text = part.get("refusal" if kind == "refusal" else "text") if kind in TEXT_PARTS else None
        if not isinstance(text, str):
            raise _unfit(
                f"A message holds a part of type '{shortened(kind)}'.",
                "The model reads text only: no images, audio or files.",
                "Send parts of type text.",
            )
        texts.append(text)
    return "".join(texts)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        _no_call()
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = arguments or {}
    else:  # OpenAI's API writes them as a JSON text, templates expect the object
        with suppress(msgspec.DecodeError, RecursionError):
            read = msgspec.json.decode(arguments)
            arguments = read if isinstance(read, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def _no_call() -> NoReturn:
    raise _unfit("A message's tool_calls do not fit.", next="Send function.name and function.arguments.")


def _unfit(what: str, why: str = "", next: str = "") -> InvalidData:
    return InvalidData(what, why, next, param="messages")
