"""Tokens and chat templates of a model's folder, without torch and without transformers."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halteres.errors import InvalidData, NotFound, boundary, shortened
from halteres.files import UnreadableFile, read_json, text_of_file

if TYPE_CHECKING:
    from halteres.chat_template import ChatTemplate

Message = Mapping[str, Any]
"""{"role": str, "content": str, text in parts, or null}; further keys go to the template."""


TEXT_PARTS = frozenset(("text", "input_text", "output_text", "refusal"))
"""Types of the parts of a message's content that are text, as OpenAI and Anthropic have them."""

TOKENIZER_FILES = (
    *(
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "generation_config.json",
        "merges.txt",
    ),
    *(
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    ),
)
THINKING, THOUGHT = "<think>", "</think>"
"""Between these a model thinks: nothing that stands there is a verdict or a call."""

SPECIALS = ("bos_token", "eos_token", "pad_token")
TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"
"""File of the chat template, and folder of those that have names: `tool_use.jinja` is used for
chats with tools.
"""

LONG_TEXT = 2**13
"""Characters; the library keeps Python's lock while it reads a text alone, and lets go of it for a
batch.
"""

PART_LENGTH = 8
"""Characters for each token that is asked for, in the first part of a long text that is read."""

LONGEST_WHOLE = 2**18
"""Characters of a text that is read whole where it has no place to be cut."""

HALF_A_CHARACTER = "\ufffd"
LONGEST_CHARACTER = 8
"""Tokens that may share one character; what is no text after so many will not become one."""

_GAPS = ((" ", "Ġ▁ "), ("\n", "Ċ\n"))
"""What a long text is cut before, where it follows a letter or digit; and how vocabularies write
it, those of bytes (Ġ, Ċ) and SentencePiece's (▁).
"""


class Tokenizer:
    """Encode, decode and render chats exactly as transformers would from the same folder (a test
    holds it).

    Raises:
        NotFound: the folder holds no tokenizer.json.
        InvalidData: a file of the tokenizer cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            next = "Name a model folder in Hugging Face format, or 'halteres/tiny'."
            raise NotFound(
                f"The folder {folder} holds no tokenizer.", "tokenizer.json is missing.", next
            )
        # these two take longer than all else that a process imports which only names the type
        import tokenizers

        from halteres.chat_template import read_templates

        self.folder = folder
        with _readable(folder):
            # The library refuses a byte order mark.
            content = file.read_bytes().removeprefix(codecs.BOM_UTF8)
            self._tokens = tokenizers.Tokenizer.from_buffer(content)
            # a file may ask for both, and transformers turns them off
            self._tokens.no_truncation()
            self._tokens.no_padding()
            config = _tokenizer_config(folder)
            self.specials = _specials(config)
            ids = {name: self._tokens.token_to_id(token) for name, token in self.specials.items()}
            self.eos_token_ids = _named_end_tokens(folder) or _as_ids(ids.get("eos_token"))
            self._templates = read_templates(_template_files(folder) or config.get("chat_template"))
        self.pad_token_id = ids.get("pad_token")
        self._texts_alone: dict[tuple[int, bool], str] = {}

    @property
    def eos_token_id(self) -> int:
        """The token that ends an answer."""
        if not self.eos_token_ids:
            what = f"The tokenizer in {self.folder} names no end token."
            raise NotFound(what, next=SET_EOS)
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
        """Token ids of a text; special tokens in it are recognised. Other threads run while a long
        one is read.
        """
        if len(text) < LONG_TEXT:
            return self._tokens.encode(text, add_special_tokens=add_special_tokens).ids
        return self._tokens.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_first(
        self, text: str, num_tokens: int, *, add_special_tokens: bool = False
    ) -> list[int]:
        """As `encode`, but of a long text only a beginning is read: it has more than `num_tokens`
        tokens where the text has, and the first `num_tokens` are the text's. InvalidData: a text of
        more than `LONGEST_WHOLE` characters has no place to be cut.
        """
        num_special = len(self.encode("", add_special_tokens=add_special_tokens))
        for length in self._part_lengths(text, num_tokens):
            end = self._place_to_cut.search(text, length * 3 // 4, length)
            if end is None:
                continue
            tokens = self.encode(text[: end.start()], add_special_tokens=add_special_tokens)
            if len(tokens) - num_special > num_tokens:
                return tokens
        return self._encode_whole(text, num_tokens, add_special_tokens)

    def encode_last(
        self, text: str, num_tokens: int, *, add_special_tokens: bool = False
    ) -> list[int]:
        """As `encode_first`, but of a long text an end is read, and the last `num_tokens` tokens
        are the text's.
        """
        for length in self._part_lengths(text, num_tokens):
            start = len(text) - length
            cut = self._place_to_cut.search(text, start, start + length // 4)
            # A tokenizer may put a space before a text: what the first word becomes does not count.
            second = cut and self._place_to_cut.search(text, cut.start() + 1, start + length // 2)
            if cut is None or second is None:
                continue
            tokens = self.encode(text[cut.start() :], add_special_tokens=add_special_tokens)
            first_word = self.encode(
                text[cut.start() : second.start()], add_special_tokens=add_special_tokens
            )
            if len(tokens) - len(first_word) > num_tokens:
                return tokens
        return self._encode_whole(text, num_tokens, add_special_tokens)

    def _part_lengths(self, text: str, num_tokens: int) -> Iterator[int]:
        """Characters of the parts that are tried, shorter than the text."""
        length = PART_LENGTH * (num_tokens + 1)
        while length < len(text):
            yield length
            length *= 4

    def _encode_whole(self, text: str, num_tokens: int, add_special_tokens: bool) -> list[int]:
        if len(text) > max(LONGEST_WHOLE, 4 * PART_LENGTH * (num_tokens + 1)):
            raise InvalidData(
                f"A text of {len(text)} characters cannot be read in part.",
                "It has no spaces or line breaks between words where it would be cut.",
                f"Shorten it to {LONGEST_WHOLE} characters.",
            )
        return self.encode(text, add_special_tokens=add_special_tokens)

    @cached_property
    def _place_to_cut(self) -> re.Pattern[str]:
        """Where a word ends before one space or line break: the tokens on either side do not depend
        on the other side, where the vocabulary has no token across such a place.
        """
        vocabulary = self._tokens.get_vocab()
        gaps = ""
        for gap, written in _GAPS:
            across = re.compile(rf"[^\W_ĠĊ][{written}]")
            found = (
                self.token(number) for token, number in vocabulary.items() if across.search(token)
            )
            if not any(across.search(token) for token in found):
                gaps += gap
        return re.compile(rf"(?<=[^\W_])(?=[{gaps}]\S)" if gaps else r"(?!)")

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._tokens.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def token_texts(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> list[str]:
        """The text that each token adds; joined, they are `decode(tokens)`.

        Where several tokens make one character, the last of them adds it, the others nothing.
        """
        whole = self.decode(tokens, skip_special_tokens=skip_special_tokens)
        texts = [self._text_alone(token, skip_special_tokens) for token in tokens]
        if "".join(texts) == whole:
            return texts
        return self._texts_in_context(tokens, whole, skip_special_tokens)

    def _text_alone(self, token: int, skip_special_tokens: bool) -> str:
        known = (token, skip_special_tokens)
        text = self._texts_alone.get(known)
        if text is None:
            text = self.decode([token], skip_special_tokens=skip_special_tokens)
            self._texts_alone[known] = text
        return text

    def _texts_in_context(
        self, tokens: Sequence[int], whole: str, skip_special_tokens: bool
    ) -> list[str]:
        """Each token's text as it follows those before it: vocabularies drop the space at the
        beginning of a text, and have tokens that are a part of a character.
        """
        texts: list[str] = []
        before, begin = 0, 0  # tokens: of the context, and first of the next text
        for end in range(1, len(tokens) + 1):
            context = self.decode(tokens[before:begin], skip_special_tokens=skip_special_tokens)
            text = self.decode(tokens[before:end], skip_special_tokens=skip_special_tokens)
            is_open = text.endswith(HALF_A_CHARACTER) and end - begin < LONGEST_CHARACTER
            if is_open and end < len(tokens):
                texts.append("")
                continue
            texts.append(text[len(context) :])
            before, begin = begin, end
        if "".join(texts) == whole:
            return texts
        # No token's text is certain: the last one adds all of it.
        return [*[""] * (len(tokens) - 1), whole]

    def token(self, token_id: int) -> str:
        """The text of one token, special ones by name."""
        return self.decode([token_id], skip_special_tokens=False)

    def render(
        self, messages: Sequence[Message], /, *, add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """The chat template's text for these messages; a folder may have a template of its own for
        chats with tools.

        Content in parts is rendered as their text. Content that is null, or missing next to calls
        of tools, is an empty text, but for a template that asks for it.

        Raises:
            InvalidData: the folder has no template, a message holds what is no text, or the
                template refuses the messages.
        """
        found = self._template(with_tools=bool(extra.get("tools")))
        if found is None:
            what = f"The tokenizer in {self.folder} has no chat template."
            raise InvalidData(what, next="Send a plain prompt instead.")
        chat = [_rendered_message(message, found) for message in messages]
        try:
            return found.render(
                messages=chat, add_generation_prompt=add_generation_prompt, **self.specials, **extra
            )
        except Exception as error:
            raise InvalidData(
                "The chat template refused the messages.", f"{type(error).__name__}: {error}."
            ) from error

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **extra: Any
    ) -> list[int]:
        """Token ids of the rendered chat."""
        return self.encode(
            self.render(messages, add_generation_prompt=add_generation_prompt, **extra)
        )

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
    """A message with its content as one text; null stays null. InvalidData: it has no role, or
    holds what is no text.

    >>> parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 1?"}]
    >>> flat({"role": "user", "content": parts})
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


def tokenizer_files(folder: Path) -> list[str]:
    """The files of a folder that its tokenizer is made of, chat templates among them, relative to
    it.
    """
    own = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return own + [f"{TEMPLATES}/{file.name}" for file in named_templates(folder)]


def named_templates(folder: Path) -> list[Path]:
    """The files of a folder's chat templates that have names."""
    return sorted(file for file in (folder / TEMPLATES).glob("*.jinja") if file.is_file())


SET_EOS = "Set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json."


def end_tokens(folder: Path) -> tuple[int, ...]:
    """The tokens that end an answer of the model in a folder: those that its settings name, else
    its tokenizer's.

    InvalidData where a file cannot be read.
    """
    with _readable(folder):
        named = _named_end_tokens(folder)
    if named or not (folder / "tokenizer.json").is_file():
        return named
    return load_tokenizer(str(folder)).eos_token_ids


def end_token_file(folder: Path) -> str:
    """The file that `end_tokens` are read from. InvalidData where a file cannot be read."""
    with _readable(folder):
        named = next((file for file, ids in _settings_of_end_tokens(folder) if ids), None)
    return named or "tokenizer_config.json"


def _named_end_tokens(folder: Path) -> tuple[int, ...]:
    """The end tokens that a model's settings name."""
    return next((ids for _, ids in _settings_of_end_tokens(folder) if ids), ())


def _settings_of_end_tokens(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The files that may name end tokens, in the order in which they count: generation_config.json,
    or else config.json.

    transformers' `generate` reads the second where the first is missing; where the first says null,
    nothing would end an answer there, and the second is read here, too.
    """
    config = _json(folder / "config.json")
    inner = config.get("text_config")
    places = (
        ("generation_config.json", _json(folder / "generation_config.json")),
        ("config.json", config),
        ("config.json", inner if isinstance(inner, dict) else {}),
    )
    for file, place in places:
        yield file, _as_ids(place.get("eos_token_id"))


def _as_ids(value: object) -> tuple[int, ...]:
    """Token ids of a setting: one, a list, or none. UnreadableFile for anything else."""
    if value is None:
        return ()
    given: list[Any] = value if isinstance(value, list) else [value]
    ids = tuple(
        one for one in given if isinstance(one, int) and not isinstance(one, bool) and one >= 0
    )
    if len(ids) != len(given):
        raise UnreadableFile(f"eos_token_id is {value!r}, which names no tokens")
    return tuple(dict.fromkeys(ids))


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with what special_tokens_map.json says in an older folder.

    Source: transformers 5.24, `PreTrainedTokenizerBase._from_pretrained`: the map counts where
    there is no `added_tokens_decoder`, and then before the config.
    """
    config = _json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _json(folder / "special_tokens_map.json")
    return config


def _specials(config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in SPECIALS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if value and not isinstance(text, str):
            raise UnreadableFile(f"{name} is {value!r}, which is no token")
        if text:
            found[name] = text
    return found


def _template_files(folder: Path) -> dict[str, str]:
    """The chat templates that are files, by name: where there is one, those of
    tokenizer_config.json do not count.

    Source: transformers 5.24, as above.
    """
    files = {file.name.removesuffix(".jinja"): file for file in named_templates(folder)}
    if (folder / TEMPLATE).is_file():
        files.setdefault("default", folder / TEMPLATE)
    return {name: text_of_file(file) for name, file in files.items()}


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """A file that cannot be read, or that a library refuses, is InvalidData."""
    what, next = f"The tokenizer in {folder} cannot be used.", "Download or save its files again."
    try:
        with boundary(InvalidData, "Reading its files"):
            try:
                yield
            except UnreadableFile as error:
                raise InvalidData(f"{error}.") from error
    except InvalidData as failure:
        raise InvalidData(what, failure.what, next) from failure


def _json(file: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    return read_json(file, dict[str, Any]) if os.path.lexists(file) else {}
