"""One run as its page shows it.

Owns: what is told at every look; the settings, told once.
Never: limits how often a person looks (`min_status_interval_s` is for agents), or uses up an agent's look.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from halteres.agent.drafting.drafts import HEADLINE
from halteres.agent.fitting import shortened
from halteres.agent.watching.look import Look, failure_facts, in_force, log_tail, look_at, next_after, why_no_batch
from halteres.files import NOT_JSON, read_regular
from halteres.observe.metrics import Row, merge_by_step
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.evaluations import before_and_after, evaluations
from halteres.runs.reading.progress import Alert, conditions
from halteres.runs.reading.rollouts import steps_of

MOST_EVENTS, MOST_MARKS, LENGTH = 60, 300, 200
"""The newest that are told; marks over the curves; characters of one."""

_TOLD: dict[str, tuple[str, ...]] = {
    "status": ("status", "phase"),
    "ready": ("role",),
    "checkpoint": ("name",),
    "eval": ("step",),
    "eval_failed": ("step", "error"),
    "no_evaluation": ("error",),
    "alert": ("rule", "step"),
    "stop_requested": ("by", "mode"),
    "process_exit": ("role", "code"),
    "restart": ("role", "attempt"),
    "restarts_used_up": ("role",),
    "policy_cap": ("note",),
    "goal_reached": ("note",),
    "drift": ("note",),
    "conclusion_failed": ("error",),
    "sink": ("sink", "state", "url", "note"),
}
"""Kind of event -> its keys that say what it was."""


def timeline_of(events: Sequence[Row]) -> list[dict[str, Any]]:
    """{t, kind, text}, oldest first."""
    known = [event for event in events if isinstance(kind := event.get("type"), str) and kind in _TOLD]
    return [
        {"t": t if isinstance(t := event.get("t"), int | float) else None, "kind": event["type"], "text": _text(event)}
        for event in known[-MOST_EVENTS:]
    ]


def _text(event: Row) -> str:
    said = (_word(key, event.get(key)) for key in _TOLD[event["type"]])
    return " ".join(word for word in said if word)[:LENGTH]


def _word(key: str, value: Any) -> str:
    if value is None:
        return ""
    return f"{key} {value}" if key in ("step", "code", "attempt") else str(value)


def marks_of(events: Sequence[Row]) -> list[dict[str, Any]]:
    """{rule, step} of every time that a rule spoke: for marks over the curves."""
    alerts = [event for event in events if event.get("type") == "alert" and isinstance(event.get("step"), int)]
    return [{"rule": str(event.get("rule"))[:LENGTH], "step": event["step"]} for event in alerts[-MOST_MARKS:]]


_AS_IT_CAME = ("default", "config_init", "wiring")
"""Sources of settings that nobody set for this run."""


def view_of(run: RunDirectory) -> dict[str, Any]:
    """The run now, in the words of the tools' answers."""
    look, events = look_at(run), run.events()
    return {
        **_facts(look),
        **_pace(look),
        "processes": conditions(look.state),
        "alerts": [_alert(alert, look) for alert in look.alerts],
        "failure": _failure(look),
        "no_batch": why_no_batch(look),
        "marks": marks_of(events),
        "timeline": timeline_of(events),
        "rollouts": steps_of(run)[-1:],  # there is nothing to ask for before there are some
        "logs": sorted(file.stem for file in (run.path / "logs").glob("*.log")),
        "next": next_after(look),
        "now": look.at,
    }


def _facts(look: Look) -> dict[str, Any]:
    state = look.state
    return {
        "run_id": look.run.run_id,
        "folder": str(look.run.path),
        "name": state.name,
        "environment": state.environment,
        "kind": state.kind,
        "model": state.base_model,
        "status": state.status,
        "phase": state.phase,
        "terminal": state.terminal,
        "note": state.note,
        "policy": state.policy,
        "resumed_from": state.resumed_from,
        "created_at": state.created_at,
        "ended_at": state.ended_at,
    }


def _pace(look: Look) -> dict[str, Any]:
    return {
        "step": look.step,
        "total_steps": look.state.total_steps,
        "minutes": look.minutes,
        "eta_minutes": look.eta_minutes,
        "step_s": look.progress.step_s,
        "health": look.health,
        "metrics": look.metrics,
    }


def _alert(alert: Alert, look: Look) -> dict[str, Any]:
    return {
        "rule": alert.rule,
        "step": alert.step,
        "times": alert.times,
        "evidence": alert.evidence,
        "remedy": str(alert.remedy),
        "current": not look.state.terminal and alert in in_force(look.alerts, look.step),
    }


def _failure(look: Look) -> dict[str, Any] | None:
    """What went wrong, whole, and in the end of whose log."""
    facts = failure_facts(look)
    if not facts:
        return None
    return {**facts, "error": look.state.error or facts["error"], "log_tail": log_tail(look, facts)}


def settings_of(run: RunDirectory) -> dict[str, Any]:
    """Every setting with its source; `set`: somebody or something set it for this run; `headline`: it matters most."""
    return {
        "settings": [
            {
                "name": name,
                "value": entry.get("value"),
                "source": entry.get("source"),
                "set": entry.get("source") not in _AS_IT_CAME,
                "headline": name in HEADLINE,
            }
            for name, entry in _resolved(run).items()
            if isinstance(entry, dict)
        ]
    }


def _resolved(run: RunDirectory) -> Mapping[str, Any]:
    """Nothing where it cannot be read: half a run directory, or one of another version."""
    try:
        told = json.loads(read_regular(run.path / "config.resolved.json"))
    except (OSError, *NOT_JSON):
        return {}
    return told if isinstance(told, dict) else {}


MOST_TASKS, PROMPT_LENGTH, ANSWER_LENGTH = 6, 1200, 2400
"""Tasks that are shown; characters of each."""


def evaluated(run: RunDirectory) -> dict[str, Any]:
    """Every evaluation's figures, and the held-out tasks that gained most, as answered before and after."""
    found = evaluations(run, merge_by_step(run.metrics()))
    tasks = before_and_after(run)[:MOST_TASKS]
    return {
        "evaluations": [{"step": one.step, **one.figures} for one in found],
        "tasks": [_brief(task.facts) for task in tasks],
    }


def _brief(facts: dict[str, Any]) -> dict[str, Any]:
    prompt = facts["prompt"]
    return {
        "prompt": shortened(prompt if isinstance(prompt, str) else _joined(prompt), PROMPT_LENGTH),
        **{
            when: {"completion": shortened(facts[when]["completion"], ANSWER_LENGTH), "score": facts[when]["score"]}
            for when in ("before", "after")
        },
    }


def _joined(messages: Any) -> str:
    """Chat messages, or whatever an environment has written in their place."""
    if not isinstance(messages, list):
        return str(messages)
    return "\n".join(str(one.get("content", one)) if isinstance(one, dict) else str(one) for one in messages)
