"""The values that cross rooms: frozen nouns, each field with its unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NewType

PolicyVersion = NewType("PolicyVersion", int)
"""Optimiser steps the model had taken when an immutable set of weights was published."""

# why sampling ended: a stop token or string, or the token limit
StopReason = Literal["stop", "length"]

Outcome = Literal[
    "success", "failure", "turn_limit", "format_error", "length_stop", "context_overflow"
]
"""How an episode ended that yields a trajectory: by its task, at its turn limit, or by the policy's
own fault.
"""

MASKED = -100  # mask value of a context token (Atropos); an action token's mask is its own id

CONTEXT_LOGPROB = 1.0
"""`inference_logprobs` of a context token (Atropos): no log-probability is positive, so it marks
itself.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One prompt and the one action sampled for it."""

    prompt: tuple[int, ...]  # tokens as the sampler received them
    action: tuple[int, ...]  # tokens as the sampler returned them, never tokenised again
    logprobs: tuple[float, ...]  # natural log, one per action token, temperature 1, full vocabulary
    text: str  # the action decoded, without the terminator
    version_min: PolicyVersion  # of the weights that wrote the first action token
    version_max: PolicyVersion  # ... and the last; they differ when a publish fell inside the turn
    stop_reason: StopReason
    reward: float = 0.0  # in the environment's own units


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The record of one rollout."""

    turns: tuple[Turn, ...]
    score: float  # in the environment's own units
    metrics: Mapping[str, float] = field(default_factory=dict)
    outcome: Outcome | None = None  # None: the environment does not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRollout:
    """A rollout that ended without a trajectory: data, not a crash."""

    code: str  # of the error, e.g. "env_error"
    why: str
    prompt_tokens: int = 0  # of a prompt that left no room for an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where one turn's action lies in a group, and what the environment paid for it."""

    sequence: int  # index within the group
    start: int  # the action's first token
    stop: int  # one past its last
    reward: float  # in the environment's own units


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rollouts of one task scored together: the unit the trajectory server delivers. S sequences,
    T_i tokens each.

    A rollout is one sequence, or several where its prompts do not continue each other (`episodes`
    says which).
    """

    tokens: tuple[tuple[int, ...], ...]  # S x T_i
    masks: tuple[tuple[int, ...], ...]  # S x T_i: MASKED on context, the token id elsewhere
    scores: tuple[float, ...]  # S, reward units: of the sequence's rollout
    logprobs: tuple[tuple[float, ...], ...]  # S x T_i: CONTEXT_LOGPROB on context
    # S x (smallest, largest) policy version; empty if untagged
    versions: tuple[tuple[int, int], ...]
    overrides: tuple[Mapping[str, Any], ...] = ()  # S or none; `set_advantage_to_zero`
    # S: the sequence's rollout, 0, 1, ... in order; none: each sequence is one
    episodes: tuple[int, ...] = ()
    # every turn, in order of time; none: a sequence's actions are one turn of its score
    spans: tuple[Span, ...] = ()
    advantages: tuple[tuple[float, ...], ...] = ()  # S x T_i or none: the environment's own
    ref_logprobs: tuple[tuple[float, ...], ...] = ()  # S x T_i or none: of a reference policy
    env_id: int | None = None  # who made it, as the trajectory server numbers environments
    # its environment says that top-p, top-k or min-p cut what could be sampled
    is_truncated: bool = False

    @property
    def num_rollouts(self) -> int:
        """Rollouts in the group."""
        return self.episodes[-1] + 1 if self.episodes else len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What the trajectory server delivered for one optimiser step."""

    groups: tuple[Group, ...]
    # groups of the run that were set aside as too old so far; None: nobody tells
    num_stale: int | None = None
    # whose it is; empty: of a trainer that named no run; None: the server does not tell
    run_id: str | None = None

    @property
    def num_rollouts(self) -> int:
        """Rollouts in all groups."""
        return sum(group.num_rollouts for group in self.groups)

    @property
    def num_sequences(self) -> int:
        """Sequences in all groups."""
        return sum(len(group.tokens) for group in self.groups)
