"""Alerts of a run as readers get them: what each rule said last, and which of them still stand."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from halteres.errors import HalteresError
from halteres.files import tail
from halteres.next_step import NextStep, Remedy, as_call, written
from halteres.observe.metrics import Row, events_of
from halteres.process import is_stopped
from halteres.runs.directory import HEARTBEAT_S, RunDirectory
from halteres.runs.state import RunState

STALLED, REFUSED = "stalled", "calls_refused"  # rules that read no rows
# a heartbeat older than this, under a held lock: the supervisor does nothing any more
STALE_S = 2.5 * HEARTBEAT_S

# an alert whose rule has been silent for so long does not stand for the run's health any more
RECENT_STEPS = 20

GRAVE = ("nan_loss", "stalled", REFUSED)  # rules about a run that will not get well by itself

FOR_GOOD = ("reward_hacking", "panel_disagrees")
"""A policy that has learnt to please its scorer does not unlearn it by itself."""

UNHURRIED = ("trainer_starved", "env_idle", "env_ahead", "scorer_slow")
"""Rules about the pace alone: such a run learns on, and may be waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """What one rule said last: what is wrong though nothing has failed."""

    rule: str
    step: int
    evidence: str
    remedy: Remedy
    times: int = 1  # how often it has spoken
    over_at: int | None = None  # the step at which its cause was found gone

    @property
    def is_over(self) -> bool:
        """Whether its cause is gone; some are for good."""
        return self.over_at is not None and self.rule not in FOR_GOOD

    def text(self, write: Callable[[NextStep], str] = as_call) -> str:
        """As people read it, its calls as `write` has them."""
        often = ""
        if self.times > 1:
            often = f", {self.times} times"
        sentences = " ".join(text for text in (self.evidence, written(self.remedy, write)) if text)
        return f"{self.rule} (step {self.step}{often}): {sentences}"

    def __str__(self) -> str:
        return self.text()

    @property
    def facts(self) -> dict[str, Any]:
        """As events.jsonl has it: what to do as text, and in its parts."""

        def calls(steps: Iterable[NextStep]) -> list[Row]:
            return [{"tool": step.tool, "args": dict(step.args)} for step in steps]

        parts = {
            "steps": calls(self.remedy.steps),
            "words": self.remedy.words,
            "later": calls(self.remedy.later),
        }
        return {
            "rule": self.rule,
            "step": self.step,
            "evidence": self.evidence,
            "remedy": str(self.remedy),
            **parts,
        }


def alerts_of(lines: Sequence[bytes]) -> tuple[Alert, ...]:
    """One alert for each rule that has spoken in the lines of events.jsonl, in the order of their
    first words.
    """
    by_rule: dict[str, Alert] = {}
    # in the order of writing: what begins may end, and begin again
    for event in events_of(lines, "alert", "alert_over"):
        rule, step = str(event.get("rule")), event.get("step")
        if event.get("type") == "alert_over":
            if rule in by_rule:
                by_rule[rule] = replace(by_rule[rule], over_at=step)
            continue
        # of an earlier version's event, which has the text alone
        remedy = Remedy(words=str(event.get("remedy") or ""))
        if "steps" in event:
            calls = (event[name] for name in ("steps", "later"))
            steps, later = (
                tuple(NextStep(step["tool"], step["args"]) for step in part) for part in calls
            )
            remedy = Remedy(steps, event["words"], later)
        by_rule[rule] = Alert(
            rule=rule,
            step=step if isinstance(step, int) else 0,
            evidence=str(event.get("evidence") or ""),
            remedy=remedy,
            times=by_rule[rule].times + 1 if rule in by_rule else 1,
        )
    return tuple(by_rule.values())


def in_force(alerts: Sequence[Alert], step: int) -> list[Alert]:
    """The alerts that stand for the run's health after so many steps: a later step may have
    disproved the others.
    """
    recent = {"stalled": 0, REFUSED: 0, **dict.fromkeys(FOR_GOOD, step)}
    return [
        alert
        for alert in alerts
        if not alert.is_over and step - alert.step <= recent.get(alert.rule, RECENT_STEPS)
    ]


def stalled(run: RunDirectory, state: RunState | None = None) -> Alert | None:
    """What a reader has to say of a supervisor that holds its lock and does nothing; None of one
    that shows that it lives. Cheap there. `state`: where it was read just before.
    """
    try:
        state = state or run.state()
        silent_s = time.time() - (run.path / "heartbeat").stat().st_mtime
    except (HalteresError, OSError):
        return None
    if state.terminal or silent_s < HEARTBEAT_S:
        return None
    who = state.supervisor or {}
    stopped = is_stopped(who)
    if not stopped and silent_s < STALE_S:
        return None
    why = ""
    if stopped:
        why = f" Its process {who.get('pid')} was stopped by a signal (SIGSTOP)."
    words = (
        f"let it go on with kill -CONT {who.get('pid')}, or end it with kill -KILL "
        f"{who.get('pid')} and then"
    )
    logs = NextStep("rl_get_logs", {"run_id": run.run_id, "role": "supervisor"})
    resume = NextStep("rl_start_training", {"resume_from": run.run_id})
    # A trainer may go on while the supervisor, and with it run.json, stands still.
    steps = [_step(line) for line in tail(run.path / "metrics.jsonl", 8)]
    return Alert(
        rule=STALLED,
        step=max(state.step, *steps, 0),
        evidence=(
            f"The run's supervisor lives, but has shown no sign of it for {silent_s:.0f} s.{why}"
        ),
        remedy=Remedy((logs,), words, (resume,)),
    )


def _step(line: str) -> int:
    try:
        step = json.loads(line).get("step")
    except (ValueError, RecursionError, AttributeError):
        return 0
    if isinstance(step, int):
        return step
    return 0
