"""All rules together.

Owns: which rules there are, that one's words become an alert.
Never: knows a threshold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from halteres.next_step import Remedy
from halteres.observe.metrics import Row
from halteres.runs.diagnosis.case import Case
from halteres.runs.diagnosis.drift import (
    EnsembleDisagrees,
    JudgeFails,
    KlOverBudget,
    RewardFollowsLength,
    ScoresOutOfRange,
)
from halteres.runs.diagnosis.excursion import CEILING, Finding, Rewards, Rule, number
from halteres.runs.diagnosis.flow import (
    EnvironmentAhead,
    EnvironmentIdle,
    HeldOutFailed,
    KlDrift,
    LogprobDrift,
    LossIsNoNumber,
    ScorerSlow,
    TrainerStarved,
    Truncation,
)
from halteres.runs.diagnosis.hacking import Hacking, PanelDisagrees
from halteres.runs.diagnosis.learning import EntropyCollapse, NotRising, NoVariance
from halteres.runs.diagnosis.refused_calls import RULE as REFUSED
from halteres.runs.diagnosis.refused_calls import Calls, RefusedCalls
from halteres.runs.diagnosis.stall_detector import RULE, StallDetector
from halteres.runs.reading.alerts import Alert


class Diagnosis:
    """Takes in what the roles write, and says what is wrong."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._rewards = Rewards()
        self._rules = rules(case, self._rewards)
        self._step = 0
        self._refused = RefusedCalls(case)
        self.has_trained = False  # a step of this run is done
        self.pulse = StallDetector(case)

    def remember(self, rows: Iterable[Row]) -> None:
        """Rows of the run that this one goes on from: they count, and nothing is said of them."""
        for row in rows:
            self.observe(row)
        self.has_trained = False

    def observe(self, row: Row) -> list[Alert]:
        """One row of metrics.jsonl, in the order of writing."""
        step = row.get("step")
        if not isinstance(step, int):
            return []
        if "reward/mean" in row:
            self._step, self.has_trained = step, True
            self._rewards.see(row)
            self.pulse.step(row)
        found = [(rule.name, rule.observe(row)) for rule in self._rules]
        return [_alert(name, step, finding) for name, finding in found if finding]

    def notice(self, event: Mapping[str, Any], *, resumable: bool) -> Alert:
        """What a role has noticed that no row shows: {rule, step, evidence}, perhaps a remedy in words; of groups
        without variance also percent_correct."""
        rule, step = str(event.get("rule")), event.get("step")
        remedy = self._unvaried(event) if rule == NoVariance.name else _remedy(rule, self._case, resumable)
        said = str(event.get("remedy") or "")
        return Alert(
            rule=rule,
            step=step if isinstance(step, int) else self._step,
            evidence=str(event.get("evidence") or ""),
            remedy=replace(remedy, words=" ".join(text for text in (remedy.words, said) if text)),
        )

    def _unvaried(self, event: Mapping[str, Any]) -> Remedy:
        """Groups of equal scores that the environment drops are in no batch: its own share correct tells why."""
        share = number(dict(event), "percent_correct")
        if share is not None and share >= CEILING:
            return Remedy((self._case.stop(), self._case.results()))
        if share == 0.0 and self._step > 0:  # before the first batch there are no rollouts to read
            return self._case.unscored()
        return Remedy(self._case.go_on_with(self._case.larger_groups()))

    def look(self, processes: Mapping[str, Mapping[str, Any]], *, training: bool) -> Alert | None:
        """With every heartbeat: does anything still happen?"""
        finding = self.pulse.look(processes, training=training)
        return _alert(RULE, self._step, finding) if finding else None

    def hear(self, calls: Calls) -> Alert | None:
        """Before the first step, with every heartbeat: what a server says of the environment's calls."""
        finding = None if self.has_trained else self._refused.look(calls)
        return _alert(REFUSED, self._step, finding) if finding else None


def rules(case: Case, rewards: Rewards) -> tuple[Rule, ...]:
    """Every rule that reads rows."""
    return (
        NoVariance(case, rewards),
        NotRising(case, rewards),
        EntropyCollapse(case, rewards),
        Hacking(case, rewards),
        PanelDisagrees(case),
        EnsembleDisagrees(case),
        ScoresOutOfRange(case),
        RewardFollowsLength(case),
        KlOverBudget(case),
        JudgeFails(case),
        Truncation(case, rewards),
        LogprobDrift(case),
        KlDrift(case),
        TrainerStarved(case),
        EnvironmentIdle(case),
        EnvironmentAhead(case),
        ScorerSlow(case),
        HeldOutFailed(case),
        LossIsNoNumber(case),
    )


def _alert(rule: str, step: int, finding: Finding) -> Alert:
    return Alert(rule=rule, step=step, evidence=finding.evidence, remedy=finding.remedy)


def _remedy(rule: str, case: Case, resumable: bool) -> Remedy:
    """What mends what a role has noticed."""
    if rule == "temperature":
        return Remedy(case.go_on_with({"env.temperature": 1.0}))
    if rule == "own_advantages":
        return Remedy(case.go_on_with({"trainer.advantage": "environment"}))
    if rule == "nan_loss":  # the trainer ends itself; what it had learnt is in its last checkpoint
        return Remedy((case.resume(case.slower()) if resumable else case.begin_anew(case.slower()),))
    return Remedy((case.logs("env"),))
