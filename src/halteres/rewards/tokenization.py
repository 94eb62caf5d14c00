"""The scoring template: how a text becomes the tokens that a reward model reads, the same in training and in scoring.

Source: TRL 1.16 `RewardTrainer`, whose token ids are these (a test holds it); it drops rows that are too long.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field

from halteres.errors import InvalidConfig, InvalidData
from halteres.rewards.preferences import Comparison, Text
from halteres.scores import Scorable
from halteres.text import Message, Tokenizer

Truncation = Literal["keep_end", "keep_start", "drop", "error"]
"""What becomes of a text that is too long: its oldest messages and then its first tokens go; its last tokens before
the end token go; its row is not used; it is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A text as the model reads it."""

    tokens: tuple[int, ...]
    num_lost: int = 0  # tokens of the whole text that are not in `tokens`, or too many in it (`drop`, `error`)
    ended_with_eos: bool = True  # or with what the chat template ends an answer with
    converted: bool = False  # it came in another form than the model reads


class ScoringTemplate(BaseModel, frozen=True, extra="forbid"):
    """How a text becomes tokens; stored with the model and used wherever it scores."""

    form: Literal["standard", "conversational", "as_given"] = "as_given"  # strings, chats, or each as it comes
    eos_token: str  # appended to a string that does not end with it; a chat ends as its chat template does
    max_length: Annotated[int, Field(ge=2)] | None = 1024  # tokens
    truncation: Truncation = "keep_end"
    template_arguments: dict[str, Any] = {}  # of the chat template, for every text
    unread_token: int | None = None  # tokens of this id at the end are not read: a model trained with pad = EOS

    @property
    def digest(self) -> str:
        """SHA-256: scores of equal texts can be compared only under equal templates."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def render(self, tokenizer: Tokenizer, text: Scorable | Text) -> Rendered:
        """The tokens of a text; token ids pass as they are. InvalidData for a chat where the tokenizer has no chat
        template, and for a prompt and a completion of two forms."""
        if not isinstance(text, Scorable):
            if _is_tokens(text):
                return self._cut(cast("tuple[int, ...]", tuple(text)), 0, ())
            text = Scorable(completion=cast("str | Sequence[Message]", text))
        strings = isinstance(text.completion, str)
        if text.prompt is not None and isinstance(text.prompt, str) != strings:
            raise InvalidData(
                "The prompt and the completion are of two forms.", "One is a string, the other a list of messages."
            )
        converted = self.form != "as_given" and strings != (self.form == "standard")
        if self.form == "standard" or (self.form == "as_given" and strings):
            rendered = self._standard(tokenizer, _as_string(text))
        else:
            arguments = {"tools": list(text.tools) or None, **self.template_arguments, **text.template_arguments}
            rendered = self._chat(tokenizer, _as_messages(text), arguments)
        return replace(rendered, converted=converted)

    def render_comparison(self, tokenizer: Tokenizer, comparison: Comparison) -> tuple[Rendered, ...]:
        """Every completion of a row behind its prompt."""
        return tuple(self.render(tokenizer, text) for text in texts_of(comparison))

    def _standard(self, tokenizer: Tokenizer, text: str) -> Rendered:
        ended = text if text.endswith(self.eos_token) else text + self.eos_token
        tokens = tuple(tokenizer.encode(ended, add_special_tokens=True))
        first = tokenizer.encode("", add_special_tokens=True)[:1]  # a begin token, where the tokenizer puts one
        num_first = len(first) if tokens[:1] == tuple(first) else 0
        return self._cut(tokens, num_first, tuple(tokenizer.encode(self.eos_token)))

    def _chat(self, tokenizer: Tokenizer, messages: Sequence[Message], arguments: Mapping[str, Any]) -> Rendered:
        text = tokenizer.render(messages, add_generation_prompt=False, **arguments)
        tokens = tuple(tokenizer.encode(text))
        ending = tuple(tokenizer.encode(_after_last(text, messages)))
        if self.truncation != "keep_end" or self.max_length is None or len(tokens) <= self.max_length:
            return self._cut(tokens, 0, ending)
        num_system = next((i for i, one in enumerate(messages) if one["role"] != "system"), 0)
        kept = tokens
        for oldest in range(num_system + 1, len(messages)):
            try:
                rest = [*messages[:num_system], *messages[oldest:]]
                kept = tuple(tokenizer.apply_chat_template(rest, add_generation_prompt=False, **arguments))
            except InvalidData:  # a template may insist on a user's message first
                continue
            if len(kept) <= self.max_length:
                break
        cut = self._cut(kept, 0, ending)
        return replace(cut, num_lost=len(tokens) - min(len(kept), self.max_length))

    def _cut(self, tokens: tuple[int, ...], num_first: int, ending: tuple[int, ...]) -> Rendered:
        """Not longer than allowed; the first tokens and the ending stay."""
        longest = self.max_length if self.max_length is not None else len(tokens)
        lost = max(0, len(tokens) - longest)
        kept = tokens
        if lost and self.truncation == "keep_end":
            kept = tokens[:num_first] + tokens[num_first + lost :]
        elif lost and self.truncation == "keep_start":
            kept = tokens[: longest - len(ending)] + ending if len(ending) < longest else tokens[:longest]
        read = kept
        while self.unread_token is not None and len(read) > 1 and read[-1] == self.unread_token:
            read = read[:-1]
        ended = not ending or kept[len(kept) - len(ending) :] == ending
        return Rendered(tokens=read, num_lost=lost, ended_with_eos=ended)


def template_for(tokenizer: Tokenizer, *, eos_token: str | None = None, **settings: Any) -> ScoringTemplate:
    """A template with the tokenizer's own end token, or another that it knows. InvalidConfig where it knows none."""
    token = eos_token or tokenizer.specials.get("eos_token")
    if token is None or len(tokenizer.encode(token)) != 1:
        raise InvalidConfig(
            f"The end token {token!r} is not in the vocabulary." if token else "The tokenizer names no end token.",
            next="Set eos_token to a token that the tokenizer knows.",
            field="eos_token",
        )
    return ScoringTemplate(eos_token=token, **settings)


def padding_token(tokenizer: Tokenizer, eos_token: str) -> str:
    """The token that pads: never the end token, which would then not be read where it ends a text. InvalidData
    where the tokenizer has no other special token."""
    own = tokenizer.specials.get("pad_token")
    if own is not None and own != eos_token and own in tokenizer.special_tokens:
        return own
    others = [
        token for token in tokenizer.special_tokens if token not in (eos_token, tokenizer.specials.get("bos_token"))
    ]
    if not others:
        raise InvalidData(
            f"The tokenizer in {tokenizer.folder} has no token to pad with.",
            "Its only special token ends texts, and transformers does not read the padding token at a text's end.",
            "Name another special token as pad_token in tokenizer_config.json.",
        )
    return min(others, key=lambda token: ("pad" not in token.lower(), "reserved" not in token.lower()))


def texts_of(comparison: Comparison) -> list[Scorable | Text]:
    """The texts of a row, each as it is scored by itself."""
    return [
        completion
        if _is_tokens(completion)
        else Scorable(
            prompt=comparison.prompt,
            completion=cast("str | Sequence[Message]", completion),
            tools=comparison.tools,
            template_arguments=comparison.template_arguments,
        )
        for completion in comparison.completions
    ]


def _is_tokens(text: Any) -> bool:
    return not isinstance(text, str) and len(text) > 0 and isinstance(text[0], int)


def _as_string(text: Scorable) -> str:
    parts = [part for part in (text.prompt, text.completion) if part is not None]
    return "".join(
        part if isinstance(part, str) else "".join(str(one.get("content") or "") for one in part) for part in parts
    )


def _as_messages(text: Scorable) -> list[Message]:
    parts = ((text.prompt, "user"), (text.completion, "assistant"))
    return [
        message
        for part, role in parts
        for message in ([{"role": role, "content": part}] if isinstance(part, str) else part or ())
    ]


def _after_last(rendered: str, messages: Sequence[Message]) -> str:
    """What the chat template puts behind the last message's content."""
    content = messages[-1].get("content")
    if not isinstance(content, str) or not content.strip() or content.strip() not in rendered:
        return ""
    return rendered[rendered.rfind(content.strip()) + len(content.strip()) :]
