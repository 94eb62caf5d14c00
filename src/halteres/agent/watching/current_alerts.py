"""Alerts of a run, as a look at it tells them.

Owns: which of them matter now, their order, how much of them an answer has room for; what of a remedy is left to do.
Never: raises one; the supervisor does, and, over a supervisor that hangs, `diagnosis.stalled`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from halteres.agent.fitting import clipped
from halteres.runs.diagnosis import stalled
from halteres.runs.diagnosis.refused_calls import RULE as REFUSED
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.alerts import Alert
from halteres.runs.reading.progress import Progress
from halteres.runs.state import RunState

RECENT_STEPS = 20
"""A rule that spoke once and has been silent for so long does not stand for the run's health any more."""

GRAVE = ("nan_loss", "stalled", REFUSED)
"""Rules about a run that will not get well by itself."""

FOR_GOOD = ("reward_hacking", "panel_disagrees")
"""A policy that has learnt to please its scorer does not unlearn it by itself."""

UNHURRIED = ("trainer_starved", "env_idle", "env_ahead", "scorer_slow")
"""Rules about the pace alone: such a run learns on, and may be waited for."""

REFUSAL_LENGTH = 300
"""Characters of what is seen where a server's own words are in it."""

_CALL = re.compile(r'(rl_\w+)\((?:"(?:[^"\\]|\\.)*"|[^()"])*\)')

EVIDENCE_LENGTH, LENGTH = 150, 480
"""Characters of what is seen, and of all alerts of an answer but the first. A remedy is never cut: it is a call."""


def alarms(run: RunDirectory, state: RunState, progress: Progress) -> tuple[Alert, ...]:
    """The last alert of each rule: grave ones first, then the newest."""
    hanging = stalled(run, state)
    spoken = [alert for alert in progress.alerts if hanging is None or alert.rule != hanging.rule]
    return (*((hanging,) if hanging else ()), *sorted(spoken, key=_weight, reverse=True))


def _weight(alert: Alert) -> tuple[bool, int]:
    return alert.rule in GRAVE, alert.step


def in_force(alerts: Sequence[Alert], step: int) -> list[Alert]:
    """Those that stand for the run's health after so many steps. What a step has disproved since, goes."""
    recent = {"stalled": 0, REFUSED: 0, **dict.fromkeys(FOR_GOOD, step)}
    return [alert for alert in alerts if step - alert.step <= recent.get(alert.rule, RECENT_STEPS)]


def pressing(alerts: Sequence[Alert], step: int) -> Alert | None:
    """The alert in force that should be answered before anything else; None where the run may be waited for."""
    candidates = [alert for alert in in_force(alerts, step) if alert.rule not in UNHURRIED]
    return min(candidates, key=lambda alert: alert.rule not in (*FOR_GOOD, *GRAVE), default=None)


def first_call(remedy: str) -> str | None:
    """The call that a remedy begins with.

    >>> first_call('rl_stop_training("3fa9c1d2") then rl_get_results("3fa9c1d2"); only harder tasks would teach more.')
    'rl_stop_training("3fa9c1d2")'
    """
    call = _CALL.match(remedy)
    return call[0] if call else None


def left_of(remedy: str, *made: str) -> str:
    """What is left to do of a remedy whose first calls, as far as they are of these tools, have been made.

    >>> left_of('rl_stop_training("3fa9c1d2") then rl_start_training(environment="sums")', "rl_stop_training")
    'rl_start_training(environment="sums")'
    """
    while (call := _CALL.match(remedy)) and call[1] in made:
        remedy = remedy[call.end() :].lstrip(" ,;:.").removeprefix("then ")
    return remedy


def told_briefly(alerts: Sequence[Alert], state: RunState) -> list[dict[str, Any]]:
    """As many as there is room for, the first one in any case; none beside a failure, which needs the room."""
    if state.status == "failed":
        return []
    told: list[dict[str, Any]] = []
    room = LENGTH
    for brief in map(_brief, alerts):
        room -= len(json.dumps(brief, ensure_ascii=False))
        if told and room < 0:
            break
        told.append(brief)
    return told


def _brief(alert: Alert) -> dict[str, Any]:
    evidence = clipped(alert.evidence, REFUSAL_LENGTH if alert.rule == REFUSED else EVIDENCE_LENGTH)
    return {"rule": alert.rule, "step": alert.step, "evidence": evidence, "remedy": alert.remedy}
