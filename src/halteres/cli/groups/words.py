"""What is said of a group, in a terminal as on a page.

Owns: its words and figures as plain, harmless text.
Never: knows colours or HTML.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from halteres.cli.groups.counting import counted
from halteres.clients.trajectories.groups.harmless import on_one_line
from halteres.clients.trajectories.groups.told import Group, Told


def clock(at: float) -> str:
    """An hour of the day, here."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def place(told: Told) -> str:
    """Where it is."""
    return told.place.replace("_", " ")


def owner(group: Group) -> str:
    """Its environment."""
    if group.told.env_id is None:
        return "no environment"
    return f"{group.env_name} ({group.told.env_id})" if group.env_name else f"environment {group.told.env_id}"


def version(told: Told) -> str:
    """The policy versions of its tokens; "" where it names none."""
    if told.policy_version is None:
        return ""
    low, high = told.policy_version
    return f"version {low}" if low == high else f"versions {low}–{high}"


def reason(told: Told) -> str:
    """Why it was set aside, or what is wrong with it."""
    return on_one_line(" ".join(filter(None, (told.why, f"({told.reason})" if told.reason else ""))))


def mean(group: Group) -> str:
    """Of its scores."""
    return "–" if group.mean is None else number(group.mean)


def number(value: float) -> str:
    """A mean or the like: short, however large or small it is."""
    return f"{value:.4g}"


def score(group: Group, at: int) -> str:
    """Of one sequence."""
    value = group.score(at)
    return "no score" if value is None else f"score {value:g}"


def figures(group: Group, at: int) -> str:
    """Of one sequence: tokens, advantage and log-probability where they came along."""
    tokens = f"{counted(len(group.element.tokens[at]), 'token')}, {group.num_sampled(at)} sampled"
    more = {"advantage": group.advantage(at), "mean logprob": group.mean_logprob(at)}
    return ", ".join([tokens, *(f"{name} {number(value)}" for name, value in more.items() if value is not None)])


def lengths(group: Group) -> str:
    """Tokens of its sequences, and how many of them were sampled."""
    if not group.num_sequences:
        return "no tokens"
    sampled = [group.num_sampled(at) for at in range(group.num_sequences)]
    span = _span([len(tokens) for tokens in group.element.tokens])
    return f"{span} {'token' if span == '1' else 'tokens'}, {_span(sampled)} sampled"


def gone(told: Told) -> str:
    """What is said of a group without tokens."""
    return f"{counted(told.size, 'sequence')}; no tokens are kept of {'it' if told.size == 1 else 'them'}"


def rank(group: Group, at: int) -> str:
    """Whether it is the best or the worst one, where they differ."""
    extremes = group.extremes
    if len(extremes) < 2 or at not in extremes:
        return ""
    return "best" if at == extremes[0] else "worst"


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}–{high}"
