"""The end of a run on disk: adapter, results.json, STATUS.md, plot.png.

Owns: what the final answer says, and copying the final weights to where it says they are.
Never: decides how the run ended; fails it because of a picture.
"""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import msgspec

from halteres.errors import HalteresError, NotFound
from halteres.files import replace_file
from halteres.observe.metrics import Row
from halteres.observe.sinks import read_reports
from halteres.redaction import printable
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.evaluations import before_and_after
from halteres.runs.reading.intervals import Difference
from halteres.runs.reading.outcome import Outcome, outcome_of
from halteres.runs.reading.pictures import PLOT, draw
from halteres.runs.reading.progress import Progress, read_progress
from halteres.runs.state import RunState

NUM_SAMPLES = 2
"""Answers shown before and after."""

_TRAINING_ONLY = ("optimizer.safetensors", "state.json")


def final_checkpoint(run: RunDirectory) -> Row | None:
    """The checkpoint that its trainer called final."""
    return next((row for row in reversed(run.checkpoints()) if row.get("final")), None)


def export_adapter(run: RunDirectory) -> Path:
    """Copy the final weights, as a PEFT folder, to RUN/adapter. NotFound where they do not exist."""
    from halteres.service.checkpoints.paths import folder_of

    checkpoint = final_checkpoint(run)
    if checkpoint is None or not checkpoint.get("sampler_path"):
        raise NotFound("There are no final weights.", "The trainer has written no final checkpoint.")
    source = folder_of(run.path / "service", checkpoint["sampler_path"])
    if not (source / "adapter_config.json").is_file():
        raise NotFound(f"The final weights {checkpoint['sampler_path']} are not on disk.", f"{source} is no adapter.")
    beside, target = run.path / ".adapter", run.path / "adapter"
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(source, beside, ignore=shutil.ignore_patterns(*_TRAINING_ONLY))
    mode = stat.S_IMODE(run.path.stat().st_mode)
    for copied in (beside, *beside.iterdir()):  # the service made its files for itself alone
        copied.chmod(mode if copied.is_dir() else mode & 0o666)
    shutil.rmtree(target, ignore_errors=True)
    beside.rename(target)
    return target


def conclude(run: RunDirectory, state: RunState) -> list[str]:
    """Write plot, results and summary for a run that ends in `state`. Returns what could not be made, in sentences."""
    outcome, progress = outcome_of(run, state), read_progress(run, state)
    failures = _plot(run, state, outcome)
    unevaluated = {
        "eval_failed": [{"step": failed.step, "why": failed.why} for failed in progress.eval_failed],
        "no_evaluation": progress.no_evaluation or None,
    }
    results = {**_results(run, state, outcome), **unevaluated}
    try:
        replace_file(run.path / "results.json", json.dumps(results, indent=1).encode() + b"\n")
        replace_file(run.path / "STATUS.md", _summary(run, state, outcome, progress).encode())
    except OSError as error:
        failures.append(f"Results could not be written: {error}.")
    return failures


def _plot(run: RunDirectory, state: RunState, outcome: Outcome) -> list[str]:
    if not outcome.rows:
        return []
    try:
        draw(run, state, outcome.rows, run.path / PLOT)
    except HalteresError as error:
        return [error.sentence]
    return []


def _results(run: RunDirectory, state: RunState, outcome: Outcome) -> dict[str, Any]:
    weights, plot = outcome.weights, run.path / PLOT
    return {
        "run_id": state.run_id,
        "name": state.name,
        "status": state.status,
        "environment": state.environment,
        "base_model": state.base_model,
        "step": state.step,
        "total_steps": state.total_steps,
        "error": state.error,
        "note": state.note,
        "minutes": round(outcome.cost.minutes, 2),
        "final_metrics": outcome.final,
        "baseline": dict(outcome.baseline.figures) if outcome.baseline else {},
        "improvement": {name: gain.facts for name, gain in outcome.gains.items()},
        "weights": {
            "step": weights.step,
            "sampler": weights.sampler,
            "state": weights.state,
            "peft_dir": str(weights.peft_dir) if weights.peft_dir else None,
            **({"reward_model": str(weights.reward_model)} if weights.reward_model else {}),
        },
        "checkpoints": run.checkpoints(),
        "samples": [task.facts for task in before_and_after(run)[:NUM_SAMPLES]],
        "plot": str(plot) if plot.exists() else None,
        "sinks": msgspec.to_builtins(read_reports(run.path)),
    }


def _summary(run: RunDirectory, state: RunState, outcome: Outcome, progress: Progress) -> str:
    lines = [
        f"# Run {state.run_id}: {printable(state.name)}",
        "",
        f"**{state.status}** at step {state.step}/{state.total_steps}",
    ]
    partly = [progress.evaluation_line(*it) for it in progress.evaluation if progress.tasks_evaluated(it[0])]
    told = (state.error, state.note, progress.no_evaluation, *progress.eval_failed, *partly)
    lines += [f"\n{printable(str(text))}" for text in told if text]
    lines += ["", "| metric | before | after | gain (95 % interval) |", "|---|---|---|---|"]
    before, gains = outcome.baseline.figures if outcome.baseline else {}, outcome.gains
    lines += [
        f"| {name} | {_told(before.get(name))} | {_told(value)} | {_gain(gains.get(name))} |"
        for name, value in outcome.final.items()
        if name in gains or name in ("reward/mean", "reward/success")
    ]
    weights = outcome.weights
    where = {"directory": run.path, "sampler": weights.sampler, "state": weights.state, "peft_dir": weights.peft_dir}
    where["reward_model"] = weights.reward_model
    lines += ["", *(f"- {name}: `{value}`" for name, value in where.items() if value)]
    return "\n".join(lines) + "\n"


def _gain(gain: Difference | None) -> str:
    if gain is None:
        return ""
    interval = f" ({gain.interval[0]:+.3f} to {gain.interval[1]:+.3f})" if gain.interval else ""
    return f"{gain.delta:+.3f}{interval}"


def _told(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
