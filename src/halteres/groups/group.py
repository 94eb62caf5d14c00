"""One scored group as it is read and shown: its scores, its sequences in parts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from halteres.clients.trajectories.groups import harmless
from halteres.files import lines_of, open_regular
from halteres.observe.metrics import decoded
from halteres.types import MASKED

if TYPE_CHECKING:  # a user who names no tokenizer need not wait for its libraries
    from halteres.tokenizer import Tokenizer

LONGEST_LINE = 64 * 2**20  # bytes; a longer line is no group of ours and is passed over
MOST_SCORES = 16
MOST_IDS = 24  # token ids shown of a part that cannot be decoded

_Rows = list[list[float] | None] | None


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
        begin = most // 4
        if self.is_sampled:
            begin = most * 2 // 3
        gap = f" …[{counted(left, 'character')}]… "
        return replace(self, text=self.text[:begin] + gap + self.text[begin + left :])


class ScoredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer gets of a group, as far as it is looked at: G sequences, counted from 0.

    A group that a server set aside is shown, too: its rows need not fit each other.
    """

    tokens: list[list[int]] = []
    masks: list[list[int]] = []
    scores: list[float]
    episodes: list[int] | None = None  # of each sequence, where rollouts have several
    advantages: _Rows = None
    inference_logprobs: _Rows = None
    messages: list[Any] | None = None

    @property
    def num_sequences(self) -> int:
        """Those that can be shown."""
        return len(self.tokens)

    @property
    def listed_scores(self) -> str:
        """The first of them."""
        listed = " ".join(f"{score:g}" for score in self.scores[:MOST_SCORES])
        if len(self.scores) > MOST_SCORES:
            listed += f" … ({len(self.scores)} in all)"
        return listed

    @property
    def rollout_scores(self) -> tuple[float, ...]:
        """One for each rollout, which may have several sequences."""
        if self.episodes is None:
            return tuple(self.scores)
        return tuple(dict(zip(self.episodes, self.scores, strict=False)).values())

    @property
    def mean(self) -> float | None:
        """Of the scores."""
        return mean_of(self.scores)

    @property
    def spread(self) -> float | None:
        """Standard deviation of the scores; None of no scores, or where they are too large."""
        mean = self.mean
        if mean is None:
            return None
        try:
            return math.sqrt(sum((score - mean) ** 2 for score in self.scores) / len(self.scores))
        except OverflowError:
            return None

    @property
    def extremes(self) -> tuple[int, ...]:
        """The best and the worst sequence, the first of each; one where all are alike."""
        scores = self.scores[: self.num_sequences]
        if not scores:
            return tuple(range(self.num_sequences))[:1]
        best, worst = scores.index(max(scores)), scores.index(min(scores))
        if best == worst:
            return (best,)
        return (best, worst)

    @property
    def lengths(self) -> str:
        """Tokens of its sequences, and how many of them were sampled."""
        if not self.num_sequences:
            return "no tokens"
        tokens = _span([len(tokens) for tokens in self.tokens])
        sampled = _span([self.num_sampled(at) for at in range(self.num_sequences)])
        noun = "tokens"
        if tokens == "1":
            noun = "token"
        return f"{tokens} {noun}, {sampled} sampled"

    def rank(self, at: int) -> str:
        """Whether a sequence is the best or the worst one, where they differ."""
        if len(self.extremes) < 2:
            return ""
        best, worst = self.extremes
        return {best: "best", worst: "worst"}.get(at, "")

    def score(self, at: int) -> str:
        """Of one sequence, in words."""
        score = self.score_of(at)
        if score is None:
            return "no score"
        return f"score {score:g}"

    def score_of(self, at: int) -> float | None:
        """Of one sequence; None where it has none."""
        if at >= len(self.scores):
            return None
        return self.scores[at]

    def mean_advantage(self, at: int) -> float | None:
        """Of one sequence's sampled tokens; None where none came along."""
        row = zip(self._per_token(self.advantages, at) or (), self._mask(at), strict=False)
        return mean_of([value for value, each in row if each != MASKED])

    def logprobs_of(self, at: int) -> list[float] | None:
        """Of one sequence's tokens; None where none came along."""
        return self._per_token(self.inference_logprobs, at)

    def parts(self, at: int, tokenizer: Tokenizer | None) -> tuple[Part, ...]:
        """One sequence: decoded where there is a tokenizer, else its messages, else the ids of its
        tokens.
        """
        messages = self._messages(at)
        if tokenizer is None and messages:
            return tuple(map(_of_message, messages))
        parts: list[Part] = []
        begin = 0
        for is_sampled, run in groupby(self._mask(at), key=lambda mask: mask != MASKED):
            end = begin + sum(1 for _ in run)
            tokens = self.tokens[at][begin:end]
            text = _ids(tokens)
            if tokenizer is not None:
                text = harmless(_decoded(tokenizer, tokens))
            parts.append(Part(text=text, is_sampled=is_sampled, tokens=(begin, end)))
            begin = end
        return tuple(parts)

    def _messages(self, at: int) -> list[Any]:
        """Of a sequence; none where they are no list."""
        if self.messages is None or at >= len(self.messages):
            return []
        messages = self.messages[at]
        if not isinstance(messages, list):
            return []
        return cast("list[Any]", messages)

    def _mask(self, at: int) -> list[int]:
        """Of a sequence; as long as its tokens, whatever was posted."""
        length = len(self.tokens[at])
        mask: list[int] = []
        if at < len(self.masks):
            mask = self.masks[at][:length]
        return mask + [MASKED] * (length - len(mask))

    def num_sampled(self, at: int) -> int:
        """Tokens of a sequence that the policy sampled."""
        return sum(mask != MASKED for mask in self._mask(at))

    def _per_token(self, rows: _Rows, at: int) -> list[float] | None:
        """A sequence's row of advantages or log-probabilities; None where it does not fit its
        tokens.
        """
        if rows is None or at >= len(rows):
            return None
        row = rows[at]
        if row is None or len(row) != len(self.tokens[at]):
            return None
        return row


_decoder = msgspec.json.Decoder(ScoredGroup)


def read_group(element: msgspec.Raw) -> ScoredGroup:
    """A group as a trajectory server gives it."""
    return _decoder.decode(element)


def read_groups(file: Path) -> list[ScoredGroup | None]:
    """A group for each line of a file that is not empty, None for a line that is no group, as a
    torn one; no groups where the file cannot be read.
    """
    try:
        with open_regular(file) as stream:
            lines = [line for line in lines_of(stream, LONGEST_LINE) if line.strip()]
    except OSError:
        return []
    return [decoded(_decoder, line) for line in lines]


# -- words and figures


def counted(number: int, noun: str) -> str:
    """Both.

    >>> counted(1, "group"), counted(2, "group")
    ('1 group', '2 groups')
    """
    if number != 1:
        noun += "s"
    return f"{number} {noun}"


def number(value: float | None) -> str:
    """A mean or the like: short, however large or small it is."""
    if value is None:
        return "–"
    return f"{value:.4g}"


def mean_of(values: Sequence[float]) -> float | None:
    """None of no values. A sum that is too large for a float has a mean all the same."""
    if not values:
        return None
    total = sum(values)
    if math.isfinite(total):
        return total / len(values)
    return sum(value / len(values) for value in values)


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    if low == high:
        return str(low)
    return f"{low}–{high}"


def _ids(tokens: Sequence[int]) -> str:
    """The first and the last of them, as numbers."""
    shown = [str(token) for token in tokens]
    if len(tokens) > MOST_IDS:
        half = MOST_IDS // 2
        shown = [*shown[:half], "…", *shown[-half:]]
    return " ".join(shown) + " "


def _of_message(message: Any) -> Part:
    if not isinstance(message, Mapping):
        return Part(text=_text(message), is_sampled=False)
    fields = cast("Mapping[str, Any]", message)
    role = _text(fields.get("role", ""))
    # no calls may be written as an empty list
    texts = [_text(fields.get("content")), _text(fields.get("tool_calls") or None)]
    return Part(text="\n".join(filter(None, texts)), is_sampled=role == "assistant", label=role)


def _text(value: Any) -> str:
    """A value of a message, harmless."""
    if value is None:
        return ""
    if isinstance(value, str):
        return harmless(value)
    return harmless(json.dumps(value, ensure_ascii=False))


def _decoded(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Their text, special tokens included; an id that the tokenizer does not know as ⟨id⟩."""
    if min(tokens) >= 0 and max(tokens) < tokenizer.vocab_size:
        return tokenizer.decode(tokens, skip_special_tokens=False)
    texts: list[str] = []
    for known, run in groupby(
        tokens, key=lambda token: 0 <= token < 2**32 and tokenizer.knows(token)
    ):
        if known:
            texts.append(tokenizer.decode(list(run), skip_special_tokens=False))
        else:
            texts += (f"⟨{token}⟩" for token in run)
    return "".join(texts)
