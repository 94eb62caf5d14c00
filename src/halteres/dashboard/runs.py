"""Runs as the page shows them: the list of all, and one with its timeline, settings and
evaluations.

Nothing here limits how often a person looks (`min_status_interval_s` is for agents), or uses up an
agent's look.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from halteres.config.settings import HEADLINE
from halteres.dashboard.curves import spark_of
from halteres.errors import NotFound, UserError, boundary
from halteres.files import NOT_JSON, read_regular
from halteres.next_step import Advice, NextStep, lines_of
from halteres.observe.metrics import Row, merge_by_step
from halteres.runs.directory import UNREADABLE, Entry, RunDirectory, known_runs
from halteres.runs.notes import FILE, change_notes, read_notes
from halteres.runs.reading.alerts import Alert
from halteres.runs.reading.evaluations import before_and_after, evaluations
from halteres.runs.reading.logs import log_tail
from halteres.runs.reading.progress import conditions
from halteres.runs.reading.report import RunReport, environment_of, report_of
from halteres.runs.reading.rollouts import steps_of
from halteres.runs.state import RunState, RunUnreadable
from halteres.short_texts import clipped, shortened, size_of

ERROR_LENGTH = 200  # characters of an error in the list; the run's own page has the whole sentence


def list_of_runs(only: Collection[str] | None = None) -> dict[str, Any]:
    """Every run, newest first, or those among these ids that there are; `now` is the clock that
    their times are of.
    """
    found = [run for run in known_runs() if only is None or run.run_id in only]
    rows = [row for row in map(_row, found) if row is not None]
    return {"runs": rows, "now": time.time()}


def _row(run: Entry) -> dict[str, Any] | None:
    """One row, also of a run that cannot be read; None of one that was removed while we looked."""
    if run.unreadable:
        return _unreadable_row(run, run.error)
    try:
        # whatever is wrong with one run, the others stay
        with boundary(RunUnreadable, f"Reading run {run.run_id}"):
            if run.ended:
                return _row_of_ended(run.path, *_stamps(run.path))
            return _row_of(RunDirectory(run.path))
    except RunUnreadable as error:
        return _unreadable_row(run, error.what)
    except NotFound:
        return None


def _unreadable_row(run: Entry, error: str | None) -> dict[str, Any]:
    facts = run.facts
    return {
        "run_id": run.run_id,
        "name": facts.name,
        "environment": facts.environment,
        "kind": "rl",
        "model": "",
        "status": UNREADABLE,
        "phase": None,
        "step": facts.step,
        "total_steps": facts.total_steps,
        "created_at": facts.created_at,
        "ended_at": facts.created_at,
        "reward": None,
        "evaluation": None,
        "curve": [],
        "alerts": [],
        "tags": [],
        "error": error,
    }


def _row_of(run: RunDirectory) -> dict[str, Any]:
    """The report of a run, in brief, and a sketch of its curve."""
    report = report_of(run)
    state = report.state
    spark = spark_of(run.path / "metrics.jsonl", state.kind)
    return {
        "run_id": run.run_id,
        "name": state.name,
        "environment": state.environment,
        "kind": state.kind,
        "model": state.base_model,
        "status": state.status,
        "phase": state.phase,
        "step": report.step,
        "total_steps": state.total_steps,
        "created_at": state.created_at,
        "ended_at": state.ended_at,
        "reward": spark.reward,
        "evaluation": spark.evaluation,
        "curve": [float(f"{value:.4g}") for value in spark.rewards],
        "alerts": [alert.rule for alert in report.alerts if not alert.is_over],
        "tags": notes_of(run)["tags"],
        "error": state.error and clipped(state.error, ERROR_LENGTH),
    }


@lru_cache(maxsize=2048)
def _row_of_ended(path: Path, *_stamps: int) -> dict[str, Any]:
    """The same, read again only once one of its files has changed: a list has hundreds."""
    return _row_of(RunDirectory(path))


def _stamps(path: Path) -> Iterator[int]:
    """Sizes and times of the files that a report is made of."""
    for name in ("run.json", "metrics.jsonl", "events.jsonl", FILE):
        try:
            found = (path / name).stat()
        except FileNotFoundError:
            continue
        yield from (found.st_size, found.st_mtime_ns)


# the newest that are shown; marks over the curves; characters of one
MOST_EVENTS, MOST_MARKS, LENGTH = 60, 300, 200

_EVENT_KEYS: dict[str, tuple[str, ...]] = {
    "status": ("status", "phase"),
    "ready": ("role",),
    "checkpoint": ("name",),
    "eval": ("step",),
    "eval_failed": ("step", "error"),
    "no_evaluation": ("error",),
    "alert": ("rule", "step"),
    "alert_over": ("rule", "step"),
    "stop_requested": ("by", "mode"),
    "process_exit": ("role", "code"),
    "restart": ("role", "attempt", "reason"),
    "stuck": ("role", "step", "where"),
    "restarts_used_up": ("role",),
    "policy_cap": ("note",),
    "goal_reached": ("note",),
    "drift": ("note",),
    "conclusion_failed": ("error",),
    "sink": ("sink", "state", "url", "note"),
}
"""Kind of event -> its keys that say what it was."""


def view_of(run: RunDirectory, write: Callable[[NextStep], str]) -> dict[str, Any]:
    """The run now; `write`: a call as a person types it."""
    report, events = report_of(run), run.events()
    state, progress = report.state, report.progress
    quarantined_tasks: dict[str, int] = {}
    if report.quarantined is not None:
        quarantined_tasks.update(report.quarantined.codes)
    notes = [note for note in (state.note, report.hardly_moved, *report.remarks) if note]
    return {
        "run_id": run.run_id,
        "folder": str(run.path),
        "name": state.name,
        "environment": state.environment,
        "kind": state.kind,
        "model": state.base_model,
        "status": state.status,
        "phase": state.phase,
        "terminal": state.terminal,
        "can_go_on": _can_go_on(run, state),
        "note": " · ".join(notes) or None,
        "notes": notes_of(run),
        "policy": state.policy,
        "resumed_from": state.resumed_from,
        "created_at": state.created_at,
        "ended_at": state.ended_at,
        "step": report.step,
        "total_steps": state.total_steps,
        "seconds": report.seconds,
        "eta_minutes": report.eta_minutes,
        "step_s": progress.step_s,
        "health": report.health,
        "metrics": report.metrics,
        "figures": [
            {
                "name": one.kind.name,
                "label": one.kind.label,
                "value": one.value,
                "form": one.kind.form,
            }
            for one in report.figures
        ],
        "processes": conditions(state),
        "alerts": _alert_rows(report, write),
        "failure": _failure(report),
        "no_batch": report.no_batch,
        "failed_rollouts": dict(progress.failed_rollouts),
        "quarantined_tasks": quarantined_tasks,
        "marks": _marks(events),
        "timeline": timeline_of(events),
        "rollouts": steps_of(run)[-1:],  # there is nothing to ask for before there are some
        "logs": sorted(file.stem for file in (run.path / "logs").glob("*.log")),
        "next": _lines(report.next, write),
        "now": report.at,
    }


def origin_of(run: RunDirectory) -> dict[str, Any]:
    """The run's name, and its environment as the tools select it.

    Raises:
        UserError: the run trains on a file, and has no environment.
    """
    state = run.state()
    if state.kind != "rl":
        raise UserError(
            f"Run {run.run_id} is not started again from this page.",
            f"It has no environment: it trains on a file, by {state.kind}.",
            "Use rl_start_training with data, or rl_train_reward_model.",
        )
    return {"name": state.name, "environment": environment_of(state)}


def _can_go_on(run: RunDirectory, state: RunState) -> bool:
    """Whether another run can begin where this one ended."""
    return state.terminal and state.kind == "rl" and run.newest_checkpoint() is not None


def notes_of(run: RunDirectory) -> dict[str, Any]:
    """Tags and note of a person; `error` in their place where the file is damaged."""
    try:
        found = read_notes(run)
    except RunUnreadable as error:
        return {"tags": [], "note": "", "revision": 0, "error": error.sentence}
    return {"tags": list(found.tags), "note": found.note, "revision": found.revision}


def _lines(advice: Advice, write: Callable[[NextStep], str]) -> list[dict[str, str]]:
    return [{"words": one.words, "command": one.command} for one in lines_of(advice, write)]


def _alert_rows(report: RunReport, write: Callable[[NextStep], str]) -> list[dict[str, Any]]:
    """Every alert: one whose cause is gone with the step at which it was, the others with what to
    do.
    """
    current: list[Alert] = []
    if not report.state.terminal:
        current = report.current_alerts
    rows: list[dict[str, Any]] = []
    for alert in report.alerts:
        row: dict[str, Any] = {
            "rule": alert.rule,
            "step": alert.step,
            "times": alert.times,
            "evidence": alert.evidence,
            "remedy": [],
            "over_at": None,
            "current": alert in current,
        }
        if alert.is_over:
            row["over_at"] = alert.over_at
        else:
            row["remedy"] = _lines(alert.remedy, write)
        rows.append(row)
    return rows


def _failure(report: RunReport) -> dict[str, Any] | None:
    """The whole error of a failed run, and the end of its log; None of any other."""
    failure = report.failure
    if failure is None:
        return None
    exited = None
    if failure.exit:
        exited = failure.exit.facts
    facts = {"error": report.state.error or failure.error, "code": failure.code, "exit": exited}
    return {**facts, "log_tail": log_tail(report, size_of(facts))}


def _marks(events: Sequence[Row]) -> list[dict[str, Any]]:
    """Rule and step of each alert that was raised, for marks over the curves: the newest."""
    raised = [event for event in events if event.get("type") == "alert"]
    marks = [
        {"rule": str(event.get("rule"))[:LENGTH], "step": event["step"]}
        for event in raised
        if isinstance(event.get("step"), int)
    ]
    return marks[-MOST_MARKS:]


def timeline_of(events: Sequence[Row]) -> list[dict[str, Any]]:
    """{t, kind, text}, oldest first."""
    kinds = [(event.get("type"), event) for event in events]
    known = [
        (kind, event) for kind, event in kinds if isinstance(kind, str) and kind in _EVENT_KEYS
    ]
    timeline: list[dict[str, Any]] = []
    for kind, event in known[-MOST_EVENTS:]:
        t = event.get("t")
        if not isinstance(t, int | float):
            t = None
        timeline.append({"t": t, "kind": kind, "text": _event_text(kind, event)[:LENGTH]})
    return timeline


def _event_text(kind: str, event: Row) -> str:
    """What happened, in a few words."""
    words: list[str] = []
    for key in _EVENT_KEYS[kind]:
        value = event.get(key)
        if value is None:
            continue
        if key in ("step", "code", "attempt"):
            words.append(f"{key} {value}")
        else:
            words.append(str(value))
    return " ".join(word for word in words if word)


class NotesChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a page wants a run's notes to be; `revision`: of those that it showed."""

    tags: tuple[str, ...]
    note: str
    revision: int


def change_notes_of(run: RunDirectory, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Write tags and note, and say what they are then.

    Raises:
        UserError: they are not what they can be, or were changed since the page showed them.
    """
    try:
        change = msgspec.convert(dict(wanted), NotesChange)
    except msgspec.ValidationError as error:
        raise UserError(
            "These are no notes of a run.", f"{error}.", "Send tags, note and revision."
        ) from error
    change_notes(run, tags=change.tags, note=change.note, revision=change.revision)
    return notes_of(run)


def settings_of(run: RunDirectory) -> dict[str, Any]:
    """Every setting with its source; `set`: it was set for this run; `headline`: it matters most.
    Nothing where they cannot be read: half a run directory, or one of another version.
    """
    try:
        resolved = json.loads(read_regular(run.path / "config.resolved.json"))
    except (OSError, *NOT_JSON):
        resolved = {}
    if not isinstance(resolved, dict):
        resolved = {}
    return {
        "settings": [
            {
                "name": name,
                "value": entry.get("value"),
                "source": entry.get("source"),
                "set": entry.get("source") not in ("default", "config_init", "model", "wiring"),
                "headline": name in HEADLINE,
            }
            for name, entry in resolved.items()
            if isinstance(entry, dict)
        ]
    }


MOST_TASKS, PROMPT_LENGTH, ANSWER_LENGTH = 6, 1200, 2400  # tasks that are shown; characters of each


def evaluations_of(run: RunDirectory) -> dict[str, Any]:
    """Every evaluation's figures, and the held-out tasks that gained most, as answered before and
    after.
    """
    found = evaluations(run, merge_by_step(run.metrics()))
    tasks: list[dict[str, Any]] = []
    for task in before_and_after(run)[:MOST_TASKS]:
        answers = {
            "before": {
                "completion": shortened(task.before, ANSWER_LENGTH),
                "score": task.before_score,
            },
            "after": {
                "completion": shortened(task.after, ANSWER_LENGTH),
                "score": task.after_score,
            },
        }
        tasks.append({"prompt": shortened(_prompt_text(task.prompt), PROMPT_LENGTH), **answers})
    return {"evaluations": [{"step": one.step, **one.figures} for one in found], "tasks": tasks}


def _prompt_text(prompt: Any) -> str:
    """A text, chat messages, or whatever an environment has written in their place."""
    if not isinstance(prompt, list):
        return str(prompt)
    texts: list[str] = []
    for message in prompt:
        if isinstance(message, dict):
            texts.append(str(message.get("content", message)))
        else:
            texts.append(str(message))
    return "\n".join(texts)
