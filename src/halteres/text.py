"""Tokens and chat templates of a model's folder, without torch and without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halteres.errors import InvalidData, NotFound, shortened

if TYPE_CHECKING:
    from halteres.chat_template import ChatTemplate

Message = Mapping[str, Any]
"""{"role": str, "content": str, text in parts, or null}; further keys go to the template."""


TEXT_PARTS = frozenset(("text", "input_text", "output_text", "refusal"))
"""Types of the parts of a message's content that are text, as OpenAI and Anthropic have them."""

LONG_TEXT = 2**13
"""Characters; the library keeps Python's lock while it reads a text alone, and lets go of it for a batch."""


class Tokenizer:
    """Encode, decode and render chats exactly as transformers would from the same folder (a test holds it)."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            next = "Name a model folder in Hugging Face format, or 'halteres/tiny'."
            raise NotFound(f"The folder {folder} holds no tokenizer.", "tokenizer.json is missing.", next)
        import tokenizers  # these two take longer than all else that a process imports which only names the type

        from halteres.chat_template import read_templates

        self.folder = folder
        self._tokens = tokenizers.Tokenizer.from_file(str(file))
        config = _json(folder / "tokenizer_config.json")
        given = {name: config[name] for name in ("bos_token", "eos_token", "pad_token") if config.get(name)}
        self.specials = {name: one["content"] if isinstance(one, dict) else one for name, one in given.items()}
        ids = {name: self._tokens.token_to_id(token) for name, token in self.specials.items()}
        ends = _json(folder / "generation_config.json").get("eos_token_id", ids.get("eos_token"))
        self.eos_token_ids: tuple[int, ...] = () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)
        self.pad_token_id = ids.get("pad_token")
        template = folder / "chat_template.jinja"
        self._templates = read_templates(template.read_text() if template.is_file() else config.get("chat_template"))

    @property
    def eos_token_id(self) -> int:
        """The token that ends an answer."""
        if not self.eos_token_ids:
            what = f"The tokenizer in {self.folder} names no end token."
            raise NotFound(what, next="Set eos_token in tokenizer_config.json.")
        return self.eos_token_ids[0]

    @property
    def vocab_size(self) -> int:
        """Tokens, special ones included."""
        return self._tokens.get_vocab_size()

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the tokens that stand for no text."""
        added = self._tokens.get_added_tokens_decoder()
        return {token.content: number for number, token in sorted(added.items()) if token.special}

    def knows(self, token_id: int) -> bool:
        """Whether there is a token of this id."""
        return token_id >= 0 and self._tokens.id_to_token(token_id) is not None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; special tokens in it are recognised. Other threads run while a long one is read."""
        if len(text) < LONG_TEXT:
            return self._tokens.encode(text, add_special_tokens=add_special_tokens).ids
        return self._tokens.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._tokens.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str:
        """The text of one token, special ones by name."""
        return self.decode([token_id], skip_special_tokens=False)

    def render(self, messages: Sequence[Message], /, *, add_generation_prompt: bool = True, **extra: Any) -> str:
        """The chat template's text for these messages; a folder may have a template of its own for chats with tools.

        Content in parts is rendered as their text. Content that is null, or missing next to calls of tools, is an empty
        text, but for a template that asks for it.

        Raises:
            InvalidData: the folder has no template, a message holds what is no text, or the template refuses the
                messages.
        """
        found = self._template(with_tools=bool(extra.get("tools")))
        if found is None:
            what = f"The tokenizer in {self.folder} has no chat template."
            raise InvalidData(what, next="Send a plain prompt instead.")
        chat = [_rendered_message(message, found) for message in messages]
        try:
            return found.render(messages=chat, add_generation_prompt=add_generation_prompt, **self.specials, **extra)
        except Exception as error:
            raise InvalidData("The chat template refused the messages.", f"{type(error).__name__}: {error}.") from error

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **extra: Any
    ) -> list[int]:
        """Token ids of the rendered chat."""
        return self.encode(self.render(messages, add_generation_prompt=add_generation_prompt, **extra))

    def template_reads(self, name: str) -> bool:
        """Whether the chat template looks at a variable of this name, `tools` for example."""
        found = self._template(with_tools=name == "tools")
        return found is not None and name in found.reads

    def _template(self, *, with_tools: bool) -> ChatTemplate | None:
        default = self._templates.get("default")
        return self._templates.get("tool_use", default) if with_tools else default


@lru_cache(maxsize=8)
def load_tokenizer(folder: str) -> Tokenizer:
    """The tokenizer of a model folder; read once per process."""
    return Tokenizer(Path(folder))


def flat(message: Message) -> dict[str, Any]:
    """A message with its content as one text; null stays null. InvalidData: it has no role, or holds what is no text.

    >>> flat({"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 1?"}]})
    {'role': 'user', 'content': 'What is 1 + 1?'}
    """
    if not isinstance(message.get("role"), str):
        raise InvalidData("A message has no role.", next="Send role and content.")
    if message.get("content") is None:
        return dict(message)
    return {**message, "content": text_of(message["content"])}


def text_of(content: Any) -> str:
    """The text of a message's content: a text, null, or parts. InvalidData: a part is no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else [content]
    return "".join(_text_of_part(part) for part in parts)


def _text_of_part(part: Any) -> str:
    kind, text = type(part).__name__, None
    if isinstance(part, Mapping):
        kind = str(part.get("type") or "text")
        if kind in TEXT_PARTS:
            text = part.get("refusal" if kind == "refusal" else "text")
    if isinstance(text, str):
        return text
    raise InvalidData(
        f"A message holds a part of type '{shortened(kind)}'.",
        "The model reads text only: no images, audio or files.",
        "Send parts of type text.",
    )


def _rendered_message(message: Any, template: ChatTemplate) -> Message:
    """A message as the template gets it; one that says nothing at all is left for it to refuse."""
    if not isinstance(message, Mapping):
        raise InvalidData("A message is no object.", next="Send role and content.")
    content = message.get("content")
    says_nothing = "content" not in message and not message.get("tool_calls")
    if says_nothing or (content is None and template.asks_for_content):
        return message
    return {**message, "content": text_of(content)}


def beginning(text: str, words: Sequence[str]) -> int:
    """Where the longest end of `text` begins that is a beginning of one of `words`; its length if there is none."""
    longest = max((len(word) for word in words), default=0) - 1
    for at in range(max(0, len(text) - longest), len(text)):
        if any(word.startswith(text[at:]) for word in words):
            return at
    return len(text)


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}
