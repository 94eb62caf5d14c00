"""A sequence as people read it: what the policy was given, and what it sampled.

Owns: text of tokens or messages, cut where a mask changes.
Never: knows colours or HTML.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from halteres.cli.groups.counting import counted
from halteres.clients.trajectories.groups.harmless import harmless
from halteres.clients.trajectories.groups.told import CONTEXT, Group

if TYPE_CHECKING:  # whoever names no tokenizer need not wait for its libraries
    from halteres.text import Tokenizer

MOST_IDS = 24
"""Token ids shown of a part that nobody can decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stretch of one sequence."""

    text: str  # harmless
    is_sampled: bool
    label: str = ""  # a message's role
    tokens: tuple[int, int] | None = None  # first, and behind the last; None: of a message


def parts_of(group: Group, at: int, tokenizer: Tokenizer | None) -> tuple[Part, ...]:
    """One sequence: decoded where there is a tokenizer, else its messages, else the ids of its tokens."""
    messages = _messages(group, at)
    if tokenizer is None and messages:
        return tuple(map(_of_message, messages))
    return tuple(_of_tokens(group, at, tokenizer))


def _messages(group: Group, at: int) -> Sequence[Any]:
    given = group.element.messages
    mine = cast("Any", given[at]) if isinstance(given, list) and at < len(cast("list[Any]", given)) else None
    return cast("list[Any]", mine) if isinstance(mine, list) else ()


def _of_message(message: Any) -> Part:
    if not isinstance(message, Mapping):
        return Part(text=_text(message), is_sampled=False)
    fields = cast("Mapping[str, Any]", message)
    role = _text(fields.get("role", ""))
    calls = fields.get("tool_calls")
    texts = [_text(fields.get("content")), *([_text(calls)] if calls else [])]
    return Part(text="\n".join(filter(None, texts)), is_sampled=role == "assistant", label=role)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return harmless(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _of_tokens(group: Group, at: int, tokenizer: Tokenizer | None) -> Iterator[Part]:
    begin, all_tokens = 0, group.element.tokens[at]
    for is_sampled, run in groupby(group.mask(at), key=lambda mask: mask != CONTEXT):
        end = begin + sum(1 for _ in run)
        tokens = all_tokens[begin:end]
        text = _ids(tokens) + " " if tokenizer is None else harmless(decoded(tokenizer, tokens))
        yield Part(text=text, is_sampled=is_sampled, tokens=(begin, end))
        begin = end


def decoded(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Their text, special tokens included; an id that the tokenizer does not know as ⟨id⟩."""
    size = tokenizer.vocab_size
    if min(tokens) >= 0 and max(tokens) < size:
        return tokenizer.decode(tokens, skip_special_tokens=False)
    runs = groupby(tokens, key=lambda token: 0 <= token < 2**32 and tokenizer.knows(token))
    return "".join(
        tokenizer.decode(list(run), skip_special_tokens=False) if known else "".join(f"⟨{token}⟩" for token in run)
        for known, run in runs
    )


def _ids(tokens: Sequence[int]) -> str:
    if len(tokens) <= MOST_IDS:
        return " ".join(map(str, tokens))
    half = MOST_IDS // 2
    return " ".join([*map(str, tokens[:half]), "…", *map(str, tokens[-half:])])


def shortened(part: Part, most: int) -> Part:
    """At most about so many characters: of given text the end, of sampled text its beginning and its end."""
    if len(part.text) <= most:
        return part
    left = len(part.text) - most
    gap = f" …[{counted(left, 'character')}]… "
    begin = most * 2 // 3 if part.is_sampled else most // 4
    return replace(part, text=part.text[:begin] + gap + part.text[begin + left :])
