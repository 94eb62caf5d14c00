"""One group as it is shown, in a terminal as on a page: its facts, its sequences in parts, how
likely tokens were.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import msgspec

from halteres.clients.trajectories.groups import CONTEXT, GroupInfo, harmless, on_one_line

if TYPE_CHECKING:  # whoever names no tokenizer need not wait for its libraries
    from halteres.text import Tokenizer

MOST_SCORES = 16
MOST_IDS = 24  # token ids shown of a part that nobody can decode
# tokens that may share one character; what is no text after so many will not become one
LONGEST_CHARACTER = 8
HALF_A_CHARACTER = "\ufffd"
# probabilities; a token below the first one is surprising, below the last one most so
BOUNDS = (0.5, 0.1, 0.01)
_LOG_BOUNDS = tuple(map(math.log, BOUNDS))


class Element(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer gets of a group, as far as it is shown: G sequences, where nothing was set
    aside.
    """

    tokens: list[list[int]] = []
    masks: list[list[int]] = []
    scores: list[float] = []
    advantages: list[list[float]] | None = None
    inference_logprobs: list[list[float]] | None = None
    messages: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stretch of one sequence: what the policy was given, or what it sampled."""

    text: str  # harmless
    is_sampled: bool
    label: str = ""  # a message's role
    tokens: tuple[int, int] | None = None  # first, and behind the last; None: of a message

    def shortened(self, most: int) -> Part:
        """At most about so many characters: of context the end, of sampled text its beginning and
        its end.
        """
        if len(self.text) <= most:
            return self
        left = len(self.text) - most
        begin = most * 2 // 3 if self.is_sampled else most // 4
        gap = f" …[{counted(left, 'character')}]… "
        return replace(self, text=self.text[:begin] + gap + self.text[begin + left :])


@dataclass(frozen=True, slots=True)
class Stretch:
    """Text whose tokens are equally surprising."""

    text: str  # harmless
    level: int  # 0: not surprising; 1 to 3: below as many of BOUNDS


@dataclass(frozen=True)
class Group:
    """A group: what is known of it, whose it is, and its element where that is kept. Sequences
    count from 0.
    """

    info: GroupInfo
    env_name: str  # harmless; "" where it has none, or an unknown one

    @cached_property
    def element(self) -> Element:
        """Read when it is looked at; an empty one where there is none."""
        return (
            msgspec.json.decode(self.info.element, type=Element)
            if self.info.has_tokens
            else Element()
        )

    @property
    def num_sequences(self) -> int:
        """Those that can be shown."""
        return len(self.element.tokens)

    @property
    def owner(self) -> str:
        """Its environment."""
        if self.info.env_id is None:
            return "no environment"
        return (
            f"{self.env_name} ({self.info.env_id})"
            if self.env_name
            else f"environment {self.info.env_id}"
        )

    @property
    def scores(self) -> str:
        """The first of them."""
        scores = self.element.scores
        more = f" … ({len(scores)} in all)" if len(scores) > MOST_SCORES else ""
        return " ".join(f"{score:g}" for score in scores[:MOST_SCORES]) + more

    @property
    def mean(self) -> float | None:
        """Of the scores."""
        return mean_of(self.element.scores)

    @property
    def extremes(self) -> tuple[int, ...]:
        """The best and the worst sequence, the first of each; one where all are alike."""
        scores = self.element.scores[: self.num_sequences]
        if not scores:
            return (0,) if self.num_sequences else ()
        best, worst = scores.index(max(scores)), scores.index(min(scores))
        return (best,) if best == worst else (best, worst)

    @property
    def lengths(self) -> str:
        """Tokens of its sequences, and how many of them were sampled."""
        if not self.num_sequences:
            return "no tokens"
        tokens = _span([len(tokens) for tokens in self.element.tokens])
        sampled = _span([self._num_sampled(at) for at in range(self.num_sequences)])
        return f"{tokens} {'token' if tokens == '1' else 'tokens'}, {sampled} sampled"

    def rank(self, at: int) -> str:
        """Whether a sequence is the best or the worst one, where they differ."""
        extremes = self.extremes
        return (
            dict(zip(extremes, ("best", "worst"), strict=True)).get(at, "")
            if len(extremes) == 2
            else ""
        )

    def score(self, at: int) -> str:
        """Of one sequence."""
        scores = self.element.scores
        return f"score {scores[at]:g}" if at < len(scores) else "no score"

    def figures(self, at: int) -> str:
        """Of one sequence: tokens, advantage and log-probability where they came along."""
        element, mask = self.element, self._mask(at)
        found = [f"{counted(len(element.tokens[at]), 'token')}, {self._num_sampled(at)} sampled"]
        for name, rows in (
            ("advantage", element.advantages),
            ("mean logprob", element.inference_logprobs),
        ):
            row = zip(self._per_token(rows, at) or (), mask, strict=False)
            if (mean := mean_of([value for value, each in row if each != CONTEXT])) is not None:
                found.append(f"{name} {number(mean)}")
        return ", ".join(found)

    def parts(self, at: int, tokenizer: Tokenizer | None) -> tuple[Part, ...]:
        """One sequence: decoded where there is a tokenizer, else its messages, else the ids of its
        tokens.
        """
        every: Any = self.element.messages
        messages: Any = (
            every[at] if isinstance(every, list) and at < len(cast("list[Any]", every)) else None
        )
        if tokenizer is None and isinstance(messages, list) and messages:
            return tuple(map(_of_message, cast("list[Any]", messages)))
        parts, begin = list[Part](), 0
        for is_sampled, run in groupby(self._mask(at), key=lambda mask: mask != CONTEXT):
            end = begin + sum(1 for _ in run)
            tokens = self.element.tokens[at][begin:end]
            if tokenizer is not None:
                text = harmless(_decoded(tokenizer, tokens))
            else:
                half = MOST_IDS // 2 if len(tokens) > MOST_IDS else len(tokens)
                gap, last = (["…"], tokens[-half:]) if half < len(tokens) else ([], [])
                text = " ".join([*map(str, tokens[:half]), *gap, *map(str, last)]) + " "
            parts.append(Part(text=text, is_sampled=is_sampled, tokens=(begin, end)))
            begin = end
        return tuple(parts)

    def stretches(self, at: int, part: Part, tokenizer: Tokenizer | None) -> tuple[Stretch, ...]:
        """A part in stretches; one where nothing tells them apart, or a token's text depends on its
        neighbours.
        """
        whole = (Stretch(part.text, 0),)
        logprobs = self._per_token(self.element.inference_logprobs, at)
        if tokenizer is None or logprobs is None or part.tokens is None or not part.is_sampled:
            return whole
        begin, end = part.tokens
        pieces, first = list[Stretch](), begin
        for last in range(begin, end):  # tokens one by one, those that make one character together
            text = _decoded(tokenizer, self.element.tokens[at][first : last + 1])
            is_open = text.endswith(HALF_A_CHARACTER) and last + 1 - first < LONGEST_CHARACTER
            if not is_open or last + 1 == end:
                lowest = min(logprobs[first : last + 1])
                pieces.append(Stretch(harmless(text), sum(lowest < bound for bound in _LOG_BOUNDS)))
                first = last + 1
        runs = groupby(pieces, key=lambda piece: piece.level)
        found = tuple(Stretch("".join(piece.text for piece in run), level) for level, run in runs)
        return found if "".join(stretch.text for stretch in found) == part.text else whole

    def _mask(self, at: int) -> list[int]:
        """Of a sequence; as long as its tokens, whatever was posted."""
        masks, length = self.element.masks, len(self.element.tokens[at])
        mask = masks[at][:length] if at < len(masks) else []
        return mask + [CONTEXT] * (length - len(mask))

    def _num_sampled(self, at: int) -> int:
        return sum(mask != CONTEXT for mask in self._mask(at))

    def _per_token(self, rows: list[list[float]] | None, at: int) -> list[float] | None:
        """A sequence's row of advantages or log-probabilities; None where it does not fit its
        tokens.
        """
        fits = rows is not None and at < len(rows) and len(rows[at]) == len(self.element.tokens[at])
        return rows[at] if rows is not None and fits else None


# -- facts of a group without its element
# ------------------------------------------------------------------------------


def version(info: GroupInfo) -> str:
    """The policy versions of its tokens; "" where it names none."""
    if info.policy_version is None:
        return ""
    low, high = info.policy_version
    return f"version {low}" if low == high else f"versions {low}–{high}"


def reason(info: GroupInfo) -> str:
    """Why it was set aside, or what is wrong with it."""
    return on_one_line(
        " ".join(filter(None, (info.why, f"({info.reason})" if info.reason else "")))
    )


def no_tokens(info: GroupInfo) -> str:
    """What stands in the place of its sequences."""
    return (
        f"{counted(info.size, 'sequence')}; no tokens are kept of "
        f"{'it' if info.size == 1 else 'them'}"
    )


# -- words and figures
# -------------------------------------------------------------------------------------------------


def counted(number: int, noun: str) -> str:
    """Both.

    >>> counted(1, "group"), counted(2, "group")
    ('1 group', '2 groups')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def clock(at: float) -> str:
    """An hour of the day, here."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def number(value: float | None) -> str:
    """A mean or the like: short, however large or small it is."""
    return "–" if value is None else f"{value:.4g}"


def mean_of(values: Sequence[float]) -> float | None:
    """None of no values. A sum that is too large for a float has a mean all the same."""
    if not values:
        return None
    total = sum(values)
    return (
        total / len(values)
        if math.isfinite(total)
        else sum(value / len(values) for value in values)
    )


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}–{high}"


def _of_message(message: Any) -> Part:
    def text(value: Any) -> str:
        if value is None:
            return ""
        return harmless(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))

    if not isinstance(message, Mapping):
        return Part(text=text(message), is_sampled=False)
    fields = cast("Mapping[str, Any]", message)
    role, calls = text(fields.get("role", "")), fields.get("tool_calls")
    texts = [text(fields.get("content")), text(calls) if calls else ""]
    return Part(text="\n".join(filter(None, texts)), is_sampled=role == "assistant", label=role)


def _decoded(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Their text, special tokens included; an id that the tokenizer does not know as ⟨id⟩."""
    if min(tokens) >= 0 and max(tokens) < tokenizer.vocab_size:
        return tokenizer.decode(tokens, skip_special_tokens=False)
    runs = groupby(tokens, key=lambda token: 0 <= token < 2**32 and tokenizer.knows(token))
    return "".join(
        tokenizer.decode(list(run), skip_special_tokens=False)
        if known
        else "".join(f"⟨{token}⟩" for token in run)
        for known, run in runs
    )
