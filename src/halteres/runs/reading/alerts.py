"""Alerts of a run: what is wrong though nothing has failed.

Owns: the noun `Alert`, reading them from events.jsonl.
Never: raises one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from halteres.next_step import NextStep, Remedy
from halteres.observe.metrics import Row, decoded, read_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """What one rule said last."""

    rule: str
    step: int
    evidence: str
    remedy: Remedy
    times: int = 1  # how often it has spoken

    def __str__(self) -> str:
        often = f", {self.times} times" if self.times > 1 else ""
        said = " ".join(text for text in (self.evidence, str(self.remedy)) if text)
        return f"{self.rule} (step {self.step}{often}): {said}"

    @property
    def facts(self) -> dict[str, Any]:
        """As events.jsonl has it: the remedy as text, and in its parts."""
        remedy = self.remedy
        parts = {"steps": _written(remedy.steps), "words": remedy.words, "later": _written(remedy.later)}
        return {"rule": self.rule, "step": self.step, "evidence": self.evidence, "remedy": str(remedy), **parts}


def read_alerts(file: Path) -> tuple[Alert, ...]:
    """One alert for each rule that has spoken, in the order of their first words; none where there is no file."""
    lines = (line for line in read_lines(file) if b'"alert"' in line)
    return alerts_of(row for line in lines if (row := decoded(_decoder, line)) is not None)


def alerts_of(events: Iterable[Mapping[str, Any]]) -> tuple[Alert, ...]:
    """The same from rows of events.jsonl."""
    by_rule: dict[str, Alert] = {}
    for event in events:
        if event.get("type") == "alert":
            rule = str(event.get("rule"))
            before = by_rule.get(rule)
            by_rule[rule] = Alert(
                rule=rule,
                step=step if isinstance(step := event.get("step"), int) else 0,
                evidence=str(event.get("evidence") or ""),
                remedy=_remedy(event),
                times=before.times + 1 if before else 1,
            )
    return tuple(by_rule.values())


def _remedy(event: Mapping[str, Any]) -> Remedy:
    """Of an alert's event; that of an earlier version has its text alone."""
    if "steps" not in event:
        return Remedy(words=str(event.get("remedy") or ""))
    return Remedy(_read(event["steps"]), event["words"], _read(event["later"]))


def _written(steps: Iterable[NextStep]) -> list[dict[str, Any]]:
    return [{"tool": step.tool, "args": dict(step.args)} for step in steps]


def _read(steps: Iterable[Mapping[str, Any]]) -> tuple[NextStep, ...]:
    return tuple(NextStep(step["tool"], step["args"]) for step in steps)


_decoder = msgspec.json.Decoder(Row)
