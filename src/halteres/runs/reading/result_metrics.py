"""The metrics of a result and of a comparison: which are shown, the names that a caller may use
for one, and of which less is better. A status has figures of its own (`status_figures`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from halteres.errors import nearest
from halteres.runs.reading.evaluations import CORRECT, GREEDY, SCORE
from halteres.runs.reading.status_figures import (
    HELD_OUT_IN_ORDER,
    HELD_OUT_LOSS,
    HELD_OUT_PER_TOKEN,
    IN_ORDER,
    OF_ALL_ROLLOUTS,
    REWARD,
    SUCCESS,
    SUCCESS_OF_ALL,
)

LOSS = "train/loss_per_token"
FAILED = "eval/num_failed"

HEADLINE = (
    REWARD,
    SUCCESS_OF_ALL,
    SUCCESS,
    CORRECT,
    GREEDY,
    f"{CORRECT}_stderr",
    SCORE,
    "eval/truncated",
    "eval/completion_lengths",
    "eval/panel/share_of_gain",
    LOSS,
    "train/completion_lengths",
    "groups/without_signal",
    "kl_sample_train_v2",
    "policy/kl_reference",
    "policy/implicit_reward_gap",
    HELD_OUT_PER_TOKEN,
    HELD_OUT_LOSS,
    HELD_OUT_IN_ORDER,
    "eval/rewards/margins",
    IN_ORDER,
    "eval_accuracy",
    "eval_loss",
    "accuracy",
    "loss",
)
SAMPLED = ", T = 1"

HELD_OUT = (
    (CORRECT, f"correct{SAMPLED}", ".1%"),
    (GREEDY, "correct, greedy", ".1%"),
    ("eval/worked_share", "answers that show their work", ".1%"),
    (SCORE, f"mean score{SAMPLED}", ".3f"),
    (HELD_OUT_PER_TOKEN, "loss per token of an answer", ".4f"),
    (HELD_OUT_LOSS, "loss", ".4f"),
    (HELD_OUT_IN_ORDER, "pairs in order", ".1%"),
    ("eval/rewards/margins", "margin", ".3f"),
)
"""What a person is shown of an evaluation before and after: figure, words, format."""

MOST_OWN = 4  # figures of an environment's own evaluation that belong to the headline
MOST = 12  # metrics of one answer

ALIASES = {
    "reward_mean": REWARD,
    "train/reward_mean": REWARD,
    "percent_correct": "train/percent_correct",
    "eval_percent_correct": CORRECT,
    "loss": LOSS,
    "loss_per_token": LOSS,
    "kl": "kl_sample_train_v2",
}
"""Names of other answers, and of the seeds."""

_SAME = (
    (SUCCESS_OF_ALL, REWARD),
    (SUCCESS, REWARD),
    (SCORE, CORRECT),
)  # of a scorer of 0 and 1 they are the same
_BESIDE = ("eval/num_", "eval/policy_version")
_LOWER = (
    "loss",
    "kl",
    "truncated",
    "failed",
    "without_signal",
    "time/",
    "staleness",
    "absdiff",
    "_stderr",
    "dropped",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Metrics that a call names."""

    names: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what became of the others


def choose(names: Sequence[str], known: Iterable[str], most: int = MOST) -> Choice:
    """Metrics by name, by alias, or by pattern (`eval/*`). An unknown one stays, as null, with a
    note.
    """
    present = sorted(set(known))
    chosen: list[str] = []
    notes: list[str] = []
    for name in (ALIASES.get(name, name) for name in names):
        found = [other for other in present if fnmatchcase(other, name)]
        if not found:
            guess = nearest(name, present)
            notes.append(f"no metric '{name}' here" + (f"; there is '{guess}'" if guess else ""))
        chosen += [other for other in found or [name] if other not in chosen]
    if len(chosen) > most:
        notes.append(f"{len(chosen) - most} more metrics fit; {most} at most are shown")
    return Choice(names=tuple(chosen[:most]), notes=tuple(notes))


def headline(figures: Mapping[str, Any]) -> list[str]:
    """The metrics among these that an answer shows where none were asked for."""
    own = [name for name in figures if name.startswith("eval/") and name not in HEADLINE]
    own = [name for name in own if not name.startswith(_BESIDE) and not name.endswith("_stderr")]
    names = [name for name in HEADLINE if figures.get(name) is not None] + own[:MOST_OWN]
    if figures.get(FAILED):  # the others are then of fewer tasks than they seem
        names += [name for name in ("eval/num_tasks", FAILED) if name in figures]
    twice = {name for name, other in _SAME if figures.get(name) == figures.get(other)}
    if figures.get(SUCCESS_OF_ALL) is not None:  # one share is called success
        twice.add(SUCCESS)
    return [name for name in names if name not in twice]


def tells_better(name: str, chosen: Sequence[str]) -> bool:
    """Whether a run can be the best by this metric: what is trained for, or a chosen one that
    should be low.
    """
    if name == OF_ALL_ROLLOUTS:
        return True
    if name.startswith(("reward/", "eval/")):
        return not name.startswith(_BESIDE)
    return name in chosen and lower_is_better(name)


def lower_is_better(name: str) -> bool:
    """Whether less of this metric is more of what is wanted."""
    return any(part in name for part in _LOWER)
