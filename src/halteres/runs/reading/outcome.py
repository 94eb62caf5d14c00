"""What a run has come to: its figures, what it has gained, its weights, what it took; and the picture of it."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halteres.config import environ
from halteres.errors import ServerError, boundary
from halteres.files import NOT_JSON, read_regular
from halteres.observe.metrics import Row, merge_by_step
from halteres.redaction import Redactor
from halteres.rewards.model_folder import RESULT
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.evaluations import Difference, Evaluation, differences, evaluations
from halteres.runs.state import RunState
from halteres.scores import REWARD_FILE

_TRAINED = ("reward/mean", "num_tokens")
"""Metrics that every trained step has: of a policy, of a reward model."""

_NO_METRICS = ("step", "t", "src")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Where the newest weights are."""

    step: int | None  # optimiser steps they have had
    sampler: str | None  # tinker:// path to sample from
    state: str | None  # tinker:// path to train on from
    peft_dir: Path | None  # a PEFT adapter, once the run has ended
    reward_model: Path | None = None  # its folder, once a run that trains one has completed


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a run has taken so far; where it goes on from another, that one's share is not in it."""

    minutes: float  # by the clock, start-up and evaluations included
    tokens: int  # sampled for training


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run has come to, so far or in the end."""

    rows: Sequence[Row]  # metrics, one per step
    evaluations: Sequence[Evaluation]  # oldest first
    weights: Weights
    cost: Cost
    gains: Mapping[str, Difference]  # the last evaluation over the first; nothing where there is only one

    @property
    def final(self) -> dict[str, float]:
        """The last trained step's metrics and the last evaluation's."""
        trained = next((row for row in reversed(self.rows) if any(name in row for name in _TRAINED)), {})
        last = self.evaluations[-1].figures if self.evaluations else {}
        return {**{k: v for k, v in trained.items() if k not in _NO_METRICS and not k.startswith("eval/")}, **last}

    @property
    def baseline(self) -> Evaluation | None:
        """The first evaluation; of the untrained model where its step is 0."""
        return self.evaluations[0] if self.evaluations else None


def outcome_of(run: RunDirectory, state: RunState) -> Outcome:
    """Read it now; at any time of a run."""
    rows, checkpoints = merge_by_step(run.metrics()), run.checkpoints()
    found = evaluations(run, rows)
    newest = next((row for row in reversed(checkpoints) if row.get("sampler_path") or row.get("final")), {})
    resumable = next((row for row in reversed(checkpoints) if row.get("state_path")), {})
    adapter, model = run.path / "adapter", run.path / RESULT
    began = int((state.resume_point or {}).get("step", 0))
    tokens = [row.get("tokens/action") for row in rows if row["step"] > began]
    return Outcome(
        rows=rows,
        evaluations=found,
        weights=Weights(
            step=newest.get("step"),
            sampler=newest.get("sampler_path"),
            state=resumable.get("state_path"),
            peft_dir=adapter if adapter.is_dir() else None,
            reward_model=model if (model / REWARD_FILE).is_file() else None,
        ),
        cost=Cost(
            minutes=((state.ended_at or time.time()) - state.created_at) / 60,
            tokens=round(math.fsum(count for count in tokens if isinstance(count, int | float))),
        ),
        gains=differences(found[0], found[-1]) if len(found) > 1 else {},
    )


_CHOSEN = ("file", "edit", "draft")

_ITS_OWN = ("run.environment", "run.name")
"""The environment is named beside `changes`, and refused among them; two runs of one name cannot be told apart."""


def chosen(run: RunDirectory) -> dict[str, Any]:
    """What the run was started with: section.field -> value; nothing where the file that tells cannot be read."""
    try:
        settings = json.loads(read_regular(run.path / "config.resolved.json"))
    except (OSError, *NOT_JSON):
        return {}
    rows = settings.items() if isinstance(settings, dict) else ()
    given = {name: row.get("value") for name, row in rows if isinstance(row, dict) and row.get("source") in _CHOSEN}
    return {name: value for name, value in given.items() if name not in _ITS_OWN}


PLOT = "plot.png"

_drawing = threading.Lock()
"""Tools run in threads, and matplotlib's fonts are not made for several."""


def draw(run: RunDirectory, state: RunState, rows: Sequence[Row], file: Path) -> None:
    """Draw one run; ServerError where matplotlib cannot: it reads fonts and caches of the machine."""
    alerts = [
        (event["rule"], event["step"])
        for event in run.events()
        if event.get("type") == "alert" and isinstance(event.get("rule"), str) and isinstance(event.get("step"), int)
    ]
    with _drawing, boundary(ServerError, "Plotting"):
        from halteres.observe import plots

        title = f"{state.name}: {state.status} at step {state.step} of {state.total_steps}"
        plot = plots.plot_reward_training if state.kind == "reward" else plots.plot_run
        plot(rows, file, Redactor.of_this_process().text(title), alerts)


def picture_of(run: RunDirectory, state: RunState, rows: Sequence[Row]) -> Path:
    """The run's own picture once it has ended, else one drawn now, in the cache."""
    own = run.path / PLOT
    if state.terminal and own.exists():
        return own
    file = _cache() / f"plot-{run.run_id}.png"
    draw(run, state, rows, file)
    return file


def comparison_of(curves: Mapping[str, Sequence[Row]], metrics: Sequence[str]) -> Path:
    """One picture of several runs, by label, in the cache; the same runs and metrics always have the same file."""
    known = hashlib.sha256(repr((sorted(curves), list(metrics))).encode()).hexdigest()[:12]
    file, redactor = _cache() / f"compare-{known}.png", Redactor.of_this_process()
    with _drawing, boundary(ServerError, "Plotting"):
        from halteres.observe import plots

        labelled = {redactor.text(label): rows for label, rows in curves.items()}
        plots.plot_runs(labelled, file, f"{len(curves)} runs", *metrics)
    return file


def _cache() -> Path:
    folder = environ.home() / "cache"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
