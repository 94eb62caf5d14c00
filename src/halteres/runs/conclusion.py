"""The end of a run on disk: adapter, results.json, STATUS.md, plot.png.

Owns: what the final answer says, and copying the final weights to where it says they are.
Never: decides how the run ended; fails it because of a picture.
"""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halteres.errors import HalteresError, NotFound, ServerError, boundary
from halteres.files import replace_file
from halteres.observe.metrics import Row, merge_by_step
from halteres.runs.answers import before_and_after
from halteres.runs.directory import RunDirectory
from halteres.runs.state import RunState

NUM_SAMPLES = 2
"""Answers shown before and after."""

_TRAINING_ONLY = ("optimizer.safetensors", "state.json")


def final_checkpoint(run: RunDirectory) -> Row | None:
    """The checkpoint that its trainer called final."""
    return next((row for row in reversed(run.checkpoints()) if row.get("final")), None)


def export_adapter(run: RunDirectory) -> Path:
    """Copy the final weights, as a PEFT folder, to RUN/adapter. NotFound where they do not exist."""
    from halteres.service.checkpoints import folder_of

    checkpoint = final_checkpoint(run)
    if checkpoint is None or not checkpoint.get("sampler_path"):
        raise NotFound("There are no final weights.", "The trainer has written no final checkpoint.")
    source = folder_of(run.path / "service", checkpoint["sampler_path"])
    if not (source / "adapter_config.json").is_file():
        raise NotFound(f"The final weights {checkpoint['sampler_path']} are not on disk.", f"{source} is no adapter.")
    beside, target = run.path / ".adapter", run.path / "adapter"
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(source, beside, ignore=shutil.ignore_patterns(*_TRAINING_ONLY))
    beside.chmod(stat.S_IMODE(run.path.stat().st_mode))  # the service made its folder for itself alone
    shutil.rmtree(target, ignore_errors=True)
    beside.rename(target)
    return target


def conclude(run: RunDirectory, state: RunState) -> list[str]:
    """Write plot, results and summary for a run that ends in `state`. Returns what could not be made, in sentences."""
    failures = _plot(run, state)
    results = _results(run, state)
    try:
        replace_file(run.path / "results.json", json.dumps(results, indent=1).encode() + b"\n")
        replace_file(run.path / "STATUS.md", _summary(run, state, results).encode())
    except OSError as error:
        failures.append(f"Results could not be written: {error}.")
    return failures


def _plot(run: RunDirectory, state: RunState) -> list[str]:
    rows = run.metrics()
    if not rows:
        return []
    try:
        with boundary(ServerError, "Plotting"):  # matplotlib reads fonts and caches of the machine: much can be wrong
            from halteres.observe.plots import plot_run

            plot_run(rows, run.path / "plot.png", state.name)
    except HalteresError as error:
        return [error.sentence]
    return []


def _results(run: RunDirectory, state: RunState) -> dict[str, Any]:
    rows = merge_by_step(run.metrics())
    evaluations = [row for row in rows if any(name.startswith("eval/") for name in row)]
    baseline, last = ({} if not evaluations else _figures(evaluations[at]) for at in (0, -1))
    final = final_checkpoint(run) or state.last_checkpoint or {}
    adapter = run.path / "adapter"
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
        "minutes": round(((state.ended_at or state.created_at) - state.created_at) / 60, 2),
        "final_metrics": {**_last_training(rows), **last},
        "baseline": baseline,
        "improvement": {
            name: round(last[name] - baseline[name], 6)
            for name in last
            if len(evaluations) > 1 and name in baseline and not name.startswith("eval/num_")
        },
        "weights": {
            "sampler": final.get("sampler_path"),
            "state": final.get("state_path"),
            "peft_dir": str(adapter) if adapter.is_dir() else None,
        },
        "checkpoints": run.checkpoints(),
        "samples": [task.facts for task in before_and_after(run)[:NUM_SAMPLES]],
        "plot": str(run.path / "plot.png") if (run.path / "plot.png").exists() else None,
    }


def _figures(row: Row) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("eval/") and isinstance(value, (int, float))}


def _last_training(rows: list[Row]) -> dict[str, Any]:
    trained = [row for row in rows if "reward/mean" in row]
    return {k: v for k, v in trained[-1].items() if k not in ("step", "t")} if trained else {}


def _summary(run: RunDirectory, state: RunState, results: Mapping[str, Any]) -> str:
    lines = [f"# Run {state.run_id}: {state.name}", "", f"**{state.status}** at step {state.step}/{state.total_steps}"]
    lines += [f"\n{text}" for text in (state.error, state.note) if text]
    lines += ["", "| metric | before | after |", "|---|---|---|"]
    lines += [
        f"| {name} | {results['baseline'].get(name, '')} | {value} |"
        for name, value in results["final_metrics"].items()
        if name.startswith("eval/") or name in ("reward/mean", "reward/success")
    ]
    lines += ["", f"- directory: `{run.path}`"]
    lines += [f"- {name}: `{value}`" for name, value in results["weights"].items() if value]
    return "\n".join(lines) + "\n"
