"""The figures of a run's status: every reader shows those of one table, and how they went.

A new figure is one line of `FIGURES`: the tools, the page and the terminal show it from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Literal

from halteres.observe.metrics import Row
from halteres.short_texts import rounded

Series = tuple[tuple[int, float], ...]  # (step, value), ascending

Form = Literal["number", "share", "GB", "tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureKind:
    """One figure that a status has, where its metric is measured."""

    name: str  # as answers call it
    label: str  # as people read it
    metric: str  # column of metrics.jsonl
    form: Form = "number"
    # whether a status has it without a value, too, by kind of run: null, and a dash for people
    always: tuple[str, ...] = ()
    only: tuple[str, ...] = ()  # kinds of run that have it at all; none: every kind
    has_trend: bool = False  # whether how it went is a part of the answer while the run goes on
    # whether it holds of the step that it was measured at alone: none at the newest step, none now
    of_newest_step: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of a run now."""

    kind: FigureKind
    value: float | None
    step: int | None  # that it is of

    @property
    def text(self) -> str:
        """As people read it."""
        if self.value is None:
            return "–"
        match self.kind.form:
            case "share":
                return f"{self.value:.1%}"
            case "number":
                return f"{self.value:.3g}"
            case unit:
                return f"{self.value:.3g} {unit}"


REWARD, SUCCESS = "reward/mean", "reward/success"
SUCCESS_OF_ALL = "train/percent_correct"
"""Share of a step's rollouts that are a success, also those of groups that were dropped. `SUCCESS`
is that of the batch: it stands for a foreign environment, which counts nothing.
"""

OF_ALL_ROLLOUTS = "rollouts/score"
"""Mean score of a step's rollouts, also of those of groups that were dropped, which `REWARD` leaves
out.
"""

_RL, _REWARD_MODEL, _SFT, _DPO = ("rl",), ("reward",), ("sft",), ("dpo",)

LOSS, HELD_OUT_LOSS = "train/loss", "eval/loss"
HELD_OUT_PER_TOKEN = "eval/loss_per_token"  # noqa: S105 - tokens of a text
IN_ORDER, HELD_OUT_IN_ORDER = "rewards/accuracies", "eval/rewards/accuracies"
"""Of a training on preferences: share of the pairs whose chosen answer has the higher implicit
reward."""

_share = partial(FigureKind, form="share")

FIGURES = (
    FigureKind(name="reward_mean", label="Reward", metric=REWARD, always=_RL),
    _share(name="percent_correct", label="Success", metric=SUCCESS_OF_ALL, always=_RL),
    _share(
        name="eval_percent_correct", label="Held out", metric="eval/percent_correct", always=_RL
    ),
    _share(name="accuracy", label="Accuracy", metric="accuracy", always=_REWARD_MODEL),
    _share(name="eval_accuracy", label="Held out", metric="eval_accuracy", always=_REWARD_MODEL),
    FigureKind(
        name="loss_per_token", label="Loss per token", metric="train/loss_per_token", always=_SFT
    ),
    FigureKind(
        name="eval_loss_per_token", label="Held out", metric=HELD_OUT_PER_TOKEN, always=_SFT
    ),
    FigureKind(name="loss", label="Loss", metric=LOSS, always=_DPO, only=_DPO),
    FigureKind(name="eval_loss", label="Held out", metric=HELD_OUT_LOSS, always=_DPO),
    _share(name="preference_accuracy", label="Pairs in order", metric=IN_ORDER),
    _share(name="eval_preference_accuracy", label="Held-out pairs", metric=HELD_OUT_IN_ORDER),
    FigureKind(name="margin", label="Margin", metric="rewards/margins", has_trend=True),
    # at another temperature, and of tokens of older versions, nothing is compared
    FigureKind(name="kl", label="KL", metric="kl_sample_train_v2", of_newest_step=True),
    FigureKind(name="kl_reference", label="KL to reference", metric="policy/kl_reference"),
    FigureKind(
        name="implicit_reward_gap", label="Implicit reward gap", metric="policy/implicit_reward_gap"
    ),
    FigureKind(name="share_of_gain", label="Share of the gain", metric="eval/panel/share_of_gain"),
    FigureKind(
        name="explained_variance",
        label="Explained by the critic",
        metric="critic/explained_variance",
        has_trend=True,
    ),
    FigureKind(name="entropy", label="Entropy", metric="policy/entropy", has_trend=True),
    FigureKind(
        name="completion_tokens",
        label="Answer length",
        metric="train/completion_lengths",
        form="tokens",
        has_trend=True,
    ),
    _share(name="truncated", label="Cut off", metric="train/truncated", has_trend=True),
    _share(name="truncated_paid", label="Cut off, of the paid", metric="train/truncated_paid"),
    FigureKind(name="engine_gb", label="Engine, peak", metric="engine/peak_memory_gb", form="GB"),
)
"""In the order of a status."""

PHASES = ("batch", "forward", "train", "publish", "checkpoint")
"""What a step's time goes to, `time/...`: waiting for rollouts, passes without a gradient, those
with one and the optimiser's step, weights for the sampler, checkpoints.
"""

ENGINE_SHARE = "engine/cpu_share"
"""Metric of the engine's process: of the time since the last step in which it wanted a core, the
share in which it had one.
"""

METRICS = (
    ENGINE_SHARE,
    *(kind.metric for kind in FIGURES),
    SUCCESS,
    *(f"time/{phase}" for phase in PHASES),
)
"""Columns of metrics.jsonl that a status reads."""

RECENT = 8  # steps whose mean is taken for where the run is now
MOST_OWN = 4  # measures of an environment's own that are shown

_OURS = (
    *("groups/", "rollouts/", "sampling/", "reward/", "judge/", "time/", "tokens/", "eval/"),
    "tasks/",
    *(SUCCESS_OF_ALL, "train/completion_lengths", "train/truncated"),
)
"""How the metrics of an environment begin that are not its own measures."""


def success_in(rows: Iterable[Row]) -> str:
    """The metric of these rows that is called success: one, wherever a reader looks."""
    if any(SUCCESS_OF_ALL in row for row in rows):
        return SUCCESS_OF_ALL
    return SUCCESS


def figures_of(series: Mapping[str, Series], kind: str) -> tuple[Figure, ...]:
    """What is known of each figure of a run of this kind, the newest of every series."""
    found: list[Figure] = []
    newest = max((step for step, _ in series.get(REWARD, ())), default=0)
    for one in FIGURES:
        if one.only and kind not in one.only:
            continue
        values = series.get(one.metric, ())
        # of a foreign environment, which counts no rollouts, the batch's
        if one.metric == SUCCESS_OF_ALL and not values:
            values = series.get(SUCCESS, ())
        if values and not (one.of_newest_step and values[-1][0] < newest):
            step, value = values[-1]
            found.append(Figure(kind=one, value=rounded(value, 3), step=step))
        elif values or kind in one.always:
            found.append(Figure(kind=one, value=None, step=None))
    return tuple(found)


def trends_of(series: Mapping[str, Series]) -> dict[str, str]:
    """How the figures went that tell why a run does not learn: name -> "first->last"; none of one
    that was 0 all the time.
    """
    courses: dict[str, str] = {}
    for one in FIGURES:
        values = [value for _, value in series.get(one.metric, ())]
        if one.has_trend and any(values):
            courses[one.name] = went(values)
    return courses


def time_shares(series: Mapping[str, Series]) -> dict[str, float]:
    """What share of the last steps' time each phase took, of those that took any."""
    seconds = {
        phase: fmean(value for _, value in values[-RECENT:])
        for phase in PHASES
        if (values := series.get(f"time/{phase}", ()))
    }
    whole = sum(seconds.values())
    shares = {phase: rounded(value / whole, 2) for phase, value in seconds.items() if whole}
    return {phase: share for phase, share in shares.items() if share >= 0.005}


def own_measures(first: Sequence[Row], last: Sequence[Row]) -> dict[str, str]:
    """How the environment's own measures went; `first`, `last`: rows from both ends of a run."""
    before, after = _own(first), _own(last)
    names = [name for name in after if name in before][:MOST_OWN]
    return {name: went([before[name][0], after[name][-1]]) for name in names}


def step_measures(rows: Iterable[Row], step: int) -> dict[str, float]:
    """The environment's own measures of one step: each is the mean over the rollouts that have
    it.
    """
    found = _own(row for row in rows if row.get("step") == step)
    return {name: rounded(values[-1], 3) for name, values in list(found.items())[:MOST_OWN]}


def _own(rows: Iterable[Row]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.get("src") != "env":
            continue
        for name, value in row.items():
            is_figure = isinstance(value, int | float) and not isinstance(value, bool)
            if is_figure and name not in ("step", "t") and not name.startswith(_OURS):
                found.setdefault(name, []).append(float(value))
    return found


def went(values: Sequence[float]) -> str:
    """From the first to the last.

    >>> went([0.151, 0.09, 0.02])
    '0.151->0.02'
    """
    return f"{rounded(values[0], 3):g}->{rounded(values[-1], 3):g}"
