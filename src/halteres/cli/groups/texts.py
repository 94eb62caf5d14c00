"""What is said of a group, in a terminal as on a page: its facts, its sequences in parts, how likely tokens were."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from halteres.clients.trajectories.groups import CONTEXT, Group, GroupInfo, harmless, on_one_line

if TYPE_CHECKING:
    from halteres.text import Tokenizer


def counted(number: int, noun: str) -> str:
    """Both.

    >>> counted(1, "group"), counted(2, "group")
    ('1 group', '2 groups')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def clock(at: float) -> str:
    """An hour of the day, here."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def owner(group: Group) -> str:
    """Its environment."""
    if group.info.env_id is None:
        return "no environment"
    return f"{group.env_name} ({group.info.env_id})" if group.env_name else f"environment {group.info.env_id}"


def version(info: GroupInfo) -> str:
    """The policy versions of its tokens; "" where it names none."""
    if info.policy_version is None:
        return ""
    low, high = info.policy_version
    return f"version {low}" if low == high else f"versions {low}–{high}"


def reason(info: GroupInfo) -> str:
    """Why it was set aside, or what is wrong with it."""
    return on_one_line(" ".join(filter(None, (info.why, f"({info.reason})" if info.reason else ""))))


def number(value: float | None) -> str:
    """A mean or the like: short, however large or small it is."""
    return "–" if value is None else f"{value:.4g}"


def score(group: Group, at: int) -> str:
    """Of one sequence."""
    scores = group.element.scores
    return f"score {scores[at]:g}" if at < len(scores) else "no score"


def figures(group: Group, at: int) -> str:
    """Of one sequence: tokens, advantage and log-probability where they came along."""
    element = group.element
    tokens = f"{counted(len(element.tokens[at]), 'token')}, {group.num_sampled(at)} sampled"
    more = {"advantage": element.advantages, "mean logprob": element.inference_logprobs}
    means = {name: group.mean_of_sampled(rows, at) for name, rows in more.items()}
    return ", ".join([tokens, *(f"{name} {number(mean)}" for name, mean in means.items() if mean is not None)])


def lengths(group: Group) -> str:
    """Tokens of its sequences, and how many of them were sampled."""
    if not group.num_sequences:
        return "no tokens"
    sampled = [group.num_sampled(at) for at in range(group.num_sequences)]
    span = _span([len(tokens) for tokens in group.element.tokens])
    return f"{span} {'token' if span == '1' else 'tokens'}, {_span(sampled)} sampled"


def gone(info: GroupInfo) -> str:
    """What is said of a group without tokens."""
    return f"{counted(info.size, 'sequence')}; no tokens are kept of {'it' if info.size == 1 else 'them'}"


def rank(group: Group, at: int) -> str:
    """Whether it is the best or the worst one, where they differ."""
    extremes = group.extremes
    if len(extremes) < 2 or at not in extremes:
        return ""
    return "best" if at == extremes[0] else "worst"


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}–{high}"


MOST_IDS = 24  # token ids shown of a part that nobody can decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stretch of one sequence."""

    text: str  # harmless
    is_sampled: bool
    label: str = ""  # a message's role
    tokens: tuple[int, int] | None = None  # first, and behind the last; None: of a message


def parts_of(group: Group, at: int, tokenizer: Tokenizer | None) -> tuple[Part, ...]:
    """One sequence: decoded where there is a tokenizer, else its messages, else the ids of its tokens."""
    given: Any = group.element.messages
    messages: Any = given[at] if isinstance(given, list) and at < len(cast("list[Any]", given)) else None
    if tokenizer is None and isinstance(messages, list) and messages:
        return tuple(map(_of_message, cast("list[Any]", messages)))
    parts, begin, all_tokens = list[Part](), 0, group.element.tokens[at]
    for is_sampled, run in groupby(group.mask(at), key=lambda mask: mask != CONTEXT):
        end = begin + sum(1 for _ in run)
        tokens = all_tokens[begin:end]
        text = _ids(tokens) + " " if tokenizer is None else harmless(decoded(tokenizer, tokens))
        parts.append(Part(text=text, is_sampled=is_sampled, tokens=(begin, end)))
        begin = end
    return tuple(parts)


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


BOUNDS = (0.5, 0.1, 0.01)  # probabilities; a token below the first one is surprising, below the last one most so
_LOG_BOUNDS = tuple(map(math.log, BOUNDS))

LONGEST_CHARACTER = 8  # tokens that may share one character; what is no text after so many will not become one
HALF_A_CHARACTER = "\ufffd"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Text whose tokens are equally surprising."""

    text: str  # harmless
    level: int  # 0: not surprising; 1 to 3: below as many of BOUNDS


def stretches(group: Group, at: int, part: Part, tokenizer: Tokenizer | None) -> tuple[Stretch, ...]:
    """A part in stretches; one where nothing tells them apart, or where a token's text depends on its neighbours."""
    whole = (Stretch(part.text, 0),)
    logprobs = group.per_token(group.element.inference_logprobs, at)
    if tokenizer is None or logprobs is None or part.tokens is None or not part.is_sampled:
        return whole
    begin, end = part.tokens
    pieces, first = list[Stretch](), begin
    for last in range(begin, end):  # tokens one by one, those that make one character together
        text = decoded(tokenizer, group.element.tokens[at][first : last + 1])
        is_open = text.endswith(HALF_A_CHARACTER) and last + 1 - first < LONGEST_CHARACTER
        if not is_open or last + 1 == end:
            lowest = min(logprobs[first : last + 1])
            pieces.append(Stretch(harmless(text), sum(lowest < bound for bound in _LOG_BOUNDS)))
            first = last + 1
    runs = groupby(pieces, key=lambda piece: piece.level)
    found = tuple(Stretch("".join(piece.text for piece in run), level) for level, run in runs)
    return found if "".join(stretch.text for stretch in found) == part.text else whole
