"""Reads what the roles have written since the last look: events and rows of metrics, and what follows from them.

Owns: reading events.jsonl and metrics.jsonl as they grow; that each row reaches state, evaluator, budget and diagnosis
once; that their alerts are written, by nobody else.
Never: ends the run.
"""

from __future__ import annotations

import logging
from typing import Any

from halteres.observe.metrics import Tail
from halteres.runs.diagnosis import Diagnosis
from halteres.runs.diagnosis.drift import DRIFT
from halteres.runs.reading.alerts import Alert
from halteres.runs.supervision.budgets import Budget
from halteres.runs.supervision.evaluation import Evaluator, Snapshot
from halteres.runs.supervision.state_writer import StateWriter

_log = logging.getLogger(__name__)


class EventReader:
    """What the roles write. What a resumed run was carried over is remembered, and no news."""

    def __init__(self, writer: StateWriter, evaluator: Evaluator, diagnosis: Diagnosis, budget: Budget) -> None:
        self._writer, self._evaluator, self._diagnosis, self._budget = writer, evaluator, diagnosis, budget
        self._events, self._metrics = (Tail(writer.run.path / name) for name in ("events.jsonl", "metrics.jsonl"))
        self._events.fresh()
        carried_over = self._metrics.fresh()
        self.evaluation: dict[str, Any] = {}  # the newest row of an evaluation
        self.drift: Alert | None = None  # the first alert of drift
        diagnosis.remember(carried_over)
        budget.remember(carried_over)

    async def read(self) -> None:
        """Read on, and act on every row."""
        for event in self._events.fresh():
            await self._on_event(event)
        for row in self._metrics.fresh():
            self._on_metrics(row)

    def tell(self, alert: Alert) -> None:
        """Write an alert."""
        _log.warning("%s", alert)
        if alert.rule in DRIFT:
            self.drift = self.drift or alert
        self._writer.event("alert", **alert.facts)

    async def _on_event(self, event: dict[str, Any]) -> None:
        kind, step = event.get("type"), event.get("step")
        if kind == "notice":
            self.tell(self._diagnosis.notice(event, resumable=self._writer.run.newest_checkpoint() is not None))
        elif kind == "planned" and isinstance(total := event.get("total_steps"), int):
            self._writer.update(total_steps=total)
        elif kind == "checkpoint" and isinstance(step, int):
            if event.get("state_path"):
                self._writer.update(last_checkpoint={k: event.get(k) for k in ("name", "step", "state_path")})
            if event.get("sampler_path") and self._evaluator.is_due(step, bool(event.get("final"))):
                await self._evaluator.ask(Snapshot(step=step, sampler_path=event["sampler_path"]))

    def _on_metrics(self, row: dict[str, Any]) -> None:
        step = row.get("step")
        if row.get("src") == "trainer" and isinstance(step, int):
            self._writer.update(step=max(step, self._writer.state.step))
        if row.get("src") == "eval":
            self.evaluation = row
        self._budget.see(row)
        for alert in self._diagnosis.observe(row):
            self.tell(alert)
