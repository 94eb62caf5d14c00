"""Scores of texts: what is scored, what a scorer gives, in which units; who is best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from halteres.tokenizer import Message

Output = Literal["raw", "standardised", "probability"]
"""Units of a score: of the head; centred and scaled, or between 0 and 1, by the model's calibration
(raw without).
"""

# what an ensemble makes of its members' scores
Combination = Literal["mean", "min", "mean_minus_std"]

REWARD_FILE = "halteres_reward.json"
"""What a reward model of ours has beside its weights: how it shows texts to itself, its
calibration, its probes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorable:
    """A completion and its prompt, both strings or both messages; without a prompt, the completion
    holds everything.
    """

    completion: str | Sequence[Message]
    prompt: str | Sequence[Message] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()  # functions in OpenAI's form, for the chat template
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # `chat_template_kwargs`


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a scorer gives a text."""

    value: float  # in the scorer's own units; larger is better
    num_tokens: int = 0  # that the scorer read; 0: it does not tell
    truncated: bool = False  # the text was longer than the scorer reads
    ended_with_eos: bool = True  # the scorer read an end token last
    # standard deviation of an ensemble's members; None: not an ensemble's
    disagreement: float | None = None
    # beyond every score that the calibration was made from; None: there is none
    out_of_range: bool | None = None
    # the text came in another form than the scorer reads, and was put into its own
    converted: bool = False
    # raw, of each objective; `value` is their weighted sum
    parts: Mapping[str, float] = field(default_factory=dict)


def best_first(values: Sequence[float | None]) -> list[int]:
    """Places of the values, the best first; of equal ones, the earlier; what has no score, last."""
    return sorted(
        range(len(values)), key=lambda place: (values[place] is None, -(values[place] or 0.0))
    )


def is_address(place: str) -> bool:
    """Whether a scorer's place is a server's address; what is none is a folder."""
    return place.startswith(("http://", "https://"))
