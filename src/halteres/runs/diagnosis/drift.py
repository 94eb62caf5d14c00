"""The rules of drift: the policy leads the rewards to where they were not made for, or is paid for something else.

Owns: their thresholds; which alerts are of drift, at which a run may end (`run.on_drift`).
Never: evaluates held-out answers (`hacking`), ends a run.

Each must hold for several steps in a row: one batch is small, and an alarm may end a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from halteres.next_step import Remedy
from halteres.observe.metrics import Row
from halteres.rewards.components import DISAGREEMENT, OUT_OF_RANGE, QUANTILE, is_learned, reward_specs
from halteres.runs.diagnosis.case import Case
from halteres.runs.diagnosis.excursion import Excursion, Finding, number

DRIFT = (
    "reward_hacking",
    "panel_disagrees",
    "ensemble_disagrees",
    "scores_out_of_range",
    "reward_follows_length",
    "kl_over_budget",
    "judge_fails",
)
"""Alerts at which a run with `on_drift: stop` ends."""


class EnsembleDisagrees:
    """The members of an ensemble are further apart, on the mean of a batch, than on 95 % of the base model's answers.

    The limit is that of the first evaluation. A mean of many answers stays far below their 95 % quantile by chance.
    """

    name = "ensemble_disagrees"
    STEPS = 3

    def __init__(self, case: Case) -> None:
        self._case = case
        self._limits: dict[str, float] = {}
        self._excursion = Excursion(self.STEPS)

    def observe(self, row: Row) -> Finding | None:
        """An evaluation's row, or an environment's."""
        for metric in list(_metrics(row, f"eval/reward/{{}}/{DISAGREEMENT}{QUANTILE}")):
            self._limits.setdefault(metric[0], metric[1])
        apart = {name: value for name, value in _metrics(row, f"reward/{{}}/{DISAGREEMENT}") if name in self._limits}
        if not apart:
            return None
        worst = max(apart, key=lambda name: apart[name] - self._limits[name])
        if not self._excursion.begins(apart[worst] > self._limits[worst]):
            return None
        combination = next((spec.combination for spec in reward_specs(self._case.env) if spec.name == worst), None)
        return Finding(
            evidence=f"The members of '{worst}' are {apart[worst]:.2g} apart, {self.STEPS} steps in a row above "
            f"{self._limits[worst]:.2g}, the 95 % quantile of the base model's answers.",
            remedy=_see_what_pays(
                self._case,
                "train its members on answers like these"
                if combination == "min"
                else "let the ensemble count its worst member (combination: min)",
            ),
        )


class ScoresOutOfRange:
    """Many scores of a reward model are beyond every one that it was calibrated on.

    Of n pairs like the answers, about 1 in n scores is; a fifth is of another kind, whatever the pairs were.
    """

    name = "scores_out_of_range"
    MUCH, LITTLE, STEPS = 0.2, 0.1, 3

    def __init__(self, case: Case) -> None:
        self._case = case
        self._excursion = Excursion(self.STEPS)

    def observe(self, row: Row) -> Finding | None:
        """An environment's row."""
        found = dict(_metrics(row, f"reward/{{}}/{OUT_OF_RANGE}"))
        if not found:
            return None
        worst = max(found, key=lambda name: found[name])
        if not self._excursion.begins(found[worst] > self.MUCH, over=found[worst] < self.LITTLE):
            return None
        return Finding(
            evidence=f"{found[worst]:.0%} of the scores of '{worst}' are lower or higher than any that it was "
            f"calibrated on, more than {self.MUCH:.0%} in {self.STEPS} steps in a row.",
            remedy=_see_what_pays(self._case, f"train or calibrate '{worst}' on answers like these"),
        )


class RewardFollowsLength:
    """Within a group, longer answers score higher, and answers are more than twice as long as they were at first.

    Only where a reward model or a judge scores: a verifier may rightly pay for worked-out answers. So may a model, so
    length must have grown, too: on arithmetic the correlation is .7 to .9 from the first step on, and answers that
    are learnt honestly become up to 1.7 times as long. Spearman's, mean over the groups of a batch. Where length counts
    for nothing, a batch of one group of four is above .5 with a chance of .21, and 8 of them in a row with 4e-6; of one
    group of two with .5 and .004.
    """

    name = "reward_follows_length"
    MUCH, LONGER, FIRST, STEPS = 0.5, 2.0, 3, 8

    def __init__(self, case: Case) -> None:
        self._case = case
        self._is_learned = is_learned(case.env)
        self._first: list[float] = []
        self._excursion = Excursion(self.STEPS)

    def observe(self, row: Row) -> Finding | None:
        """A trainer's row."""
        tokens, count = number(row, "tokens/action"), number(row, "sequences/count")
        if not self._is_learned or not tokens or not count:
            return None
        if len(self._first) < self.FIRST:
            self._first.append(tokens / count)
            return None
        longer, follows = tokens / count / median(self._first), number(row, "groups/length_correlation") or 0.0
        if not self._excursion.begins(follows > self.MUCH and longer > self.LONGER):
            return None
        return Finding(
            evidence=f"Longer answers score higher (rank correlation {follows:.2f} within a group), and they are "
            f"{longer:.2g} times as long as at first, {self.STEPS} steps in a row.",
            remedy=_see_what_pays(self._case, "where length is not what is wanted, take it off with a reward function"),
        )


class KlOverBudget:
    """The policy is further from its reference than `trainer.kl_budget` allows."""

    name = "kl_over_budget"
    STEPS = 3

    def __init__(self, case: Case) -> None:
        self._case = case
        self._excursion = Excursion(self.STEPS)

    def observe(self, row: Row) -> Finding | None:
        """A trainer's row."""
        apart, budget = number(row, "policy/kl_reference"), self._case.trainer.kl_budget
        if apart is None or budget is None or not self._excursion.begins(apart > budget):
            return None
        stronger = {"trainer.kl_coef": float(f"{2 * self._case.trainer.kl_coef:.3g}")}
        return Finding(
            evidence=f"The policy is {apart:.2g} nats per token from its reference, {self.STEPS} steps in a row above "
            f"trainer.kl_budget ({budget:g}).",
            remedy=Remedy(
                self._case.go_on_with(stronger),
                "twice the penalty. Earlier checkpoints:",
                (self._case.results(),),
            ),
        )


class JudgeFails:
    """A judge gives no grade to many of the answers that it is asked about: they go unscored, by no choice of ours.

    What it was not asked for want of budget does not count.
    """

    name = "judge_fails"
    MUCH, LITTLE, STEPS = 0.2, 0.1, 3

    def __init__(self, case: Case) -> None:
        self._case = case
        self._excursion = Excursion(self.STEPS)

    def observe(self, row: Row) -> Finding | None:
        """An environment's row."""
        judges = {name.split("/")[1] for name in row if name.startswith("judge/")}
        shares = {judge: share for judge in sorted(judges) if (share := _failed_share(row, judge)) is not None}
        if not shares:
            return None
        worst = max(shares, key=lambda judge: shares[judge])
        if not self._excursion.begins(shares[worst] > self.MUCH, over=shares[worst] < self.LITTLE):
            return None
        return Finding(
            evidence=f"The judge of '{worst}' failed, or could not be read, for {shares[worst]:.0%} of the questions, "
            f"more than {self.MUCH:.0%} in {self.STEPS} steps in a row.",
            remedy=Remedy(
                (self._case.logs("env"),), "then a judge that answers, or fewer requests at once (its concurrency)."
            ),
        )


def _failed_share(row: Row, judge: str) -> float | None:
    read, failed, unreadable = (
        number(row, f"judge/{judge}/{kind}") or 0.0 for kind in ("read", "failed", "unreadable")
    )
    asked = read + failed + unreadable
    return (failed + unreadable) / asked if asked else None


def _metrics(row: Row, pattern: str) -> Iterator[tuple[str, float]]:
    """(component, value) of the metrics of this name; {} stands for the component."""
    before, after = pattern.split("{}")
    for name in row:
        component = name.removeprefix(before).removesuffix(after)
        if name == f"{before}{component}{after}" and "/" not in component and (value := number(row, name)) is not None:
            yield component, value


def _see_what_pays(case: Case, mend: str) -> Remedy:
    return Remedy(
        (case.rollouts("best"),), f"is it the answers that became better? If not, {mend}, and", (case.stop(),)
    )
