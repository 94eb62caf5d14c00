"""How likely the policy found what it sampled.

Owns: stretches of a part's text by the probability of their tokens.
Never: shows a character that the part does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from halteres.cli.groups.parts import Part, decoded
from halteres.clients.trajectories.groups.harmless import harmless
from halteres.clients.trajectories.groups.told import Group

if TYPE_CHECKING:  # whoever names no tokenizer need not wait for its libraries
    from halteres.text import Tokenizer

BOUNDS = (0.5, 0.1, 0.01)
"""Probabilities; a token below the first one is surprising, below the last one most so."""

_LOG_BOUNDS = tuple(map(math.log, BOUNDS))

LONGEST_CHARACTER = 8
"""Tokens that may share one character; what is no text after so many will not become one."""

HALF_A_CHARACTER = "\ufffd"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Text whose tokens are equally surprising."""

    text: str  # harmless
    level: int  # 0: not surprising; 1 to 3: below as many of BOUNDS


def stretches(group: Group, at: int, part: Part, tokenizer: Tokenizer | None) -> tuple[Stretch, ...]:
    """A part in stretches; one where nothing tells them apart, or where a token's text depends on its neighbours."""
    whole = (Stretch(part.text, 0),)
    logprobs = group.logprobs(at)
    if tokenizer is None or logprobs is None or part.tokens is None or not part.is_sampled:
        return whole
    begin, end = part.tokens
    pieces = _pieces(group.element.tokens[at][begin:end], logprobs[begin:end], tokenizer)
    runs = groupby(pieces, key=lambda piece: piece.level)
    found = tuple(Stretch("".join(piece.text for piece in run), level) for level, run in runs)
    return found if "".join(stretch.text for stretch in found) == part.text else whole


def _pieces(tokens: Sequence[int], logprobs: Sequence[float], tokenizer: Tokenizer) -> Iterator[Stretch]:
    """Tokens one by one, those that make one character together."""
    first = 0
    for last in range(len(tokens)):
        text = decoded(tokenizer, tokens[first : last + 1])
        is_open = text.endswith(HALF_A_CHARACTER) and last + 1 - first < LONGEST_CHARACTER
        if not is_open or last + 1 == len(tokens):
            yield Stretch(harmless(text), _level(min(logprobs[first : last + 1])))
            first = last + 1


def _level(logprob: float) -> int:
    return sum(logprob < bound for bound in _LOG_BOUNDS)
